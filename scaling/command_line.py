"""A command line of ours: what is refused before Hydra sees it, and what Hydra's refusals mean in one line."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from scaling.config import conf_dir

# Hydra's flags that only print, or that add a folder of the user's, and the values they take; all else is an override.
FLAGS: dict[str, tuple[str, ...] | None] = {
    "--help": None,
    "--cfg": ("job", "hydra", "all"),
    "--resolve": None,
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--config-dir": (),
}
SHORT = {"-h": "--help", "-c": "--cfg", "-i": "--info", "-cd": "--config-dir", "-m": "--multirun"}
ONE_RUN = "one launch is one measurement; a matrix of runs is python -m scaling.study"
UNREADABLE = (HydraException, OmegaConfBaseException, YAMLError)


@dataclass(frozen=True)
class CommandLine:
    """A command line of ours: Hydra's flags first, which Hydra itself only takes in one place, then the overrides."""

    name: str
    flags: list[str]
    overrides: list[str]
    config_dir: Path | None  # of the user's, beside conf/

    @classmethod
    def of(cls, name: str, argv: list[str]) -> CommandLine:
        """Raises ValueError for what Hydra would take and we do not."""
        flags, overrides = {}, []
        rest = list(argv)
        while rest:
            argument = rest.pop(0)
            if argument.startswith("-"):
                flag, value = _flag(argument, rest)
                flags[flag] = value
            else:
                overrides.append(_override(argument))
        folder = flags.get("--config-dir")
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"--config-dir={folder}: no such folder")
        words = [flag if value is None else f"{flag}={value}" for flag, value in flags.items()]
        return cls(name, words, overrides, Path(folder).resolve() if folder else None)

    @property
    def for_hydra(self) -> list[str]:
        """The words that Hydra parses: what `model=custom` is called with, only its function knows, so it is added."""
        return [*self.flags, *(f"++{text}" if self.is_free(text) else text for text in self.overrides)]

    def is_free(self, override: str) -> bool:
        """Whether this override sets an argument of a function of the user's, of any name."""
        return "model=custom" in self.overrides and override.startswith(("model.args.", "model.args="))

    def groups(self) -> dict[str, list[str]]:
        """The options of every group of conf/ and of the user's folder."""
        found: dict[str, set[str]] = {}
        for root in (conf_dir(), self.config_dir):
            for option in root.glob("*/*.yaml") if root else ():
                found.setdefault(option.parent.name, set()).add(option.stem)
        return {group: sorted(options) for group, options in sorted(found.items())}

    def describe_groups(self) -> str:
        return "\n".join(f"  {group}: {', '.join(options)}" for group, options in self.groups().items())

    def tree(self, choices: list[str]) -> DictConfig:
        """The config with these options of groups and nothing else from the command line."""
        search = [f"hydra.searchpath=['file://{self.config_dir}']"] if self.config_dir else []
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return hydra.compose(self.name, [*choices, *search])


def _flag(argument: str, rest: list[str]) -> tuple[str, str | None]:
    """One flag and its value, which may be the next argument: then it leaves `rest`."""
    flag, equals, value = argument.partition("=")
    flag = SHORT.get(flag, flag)
    if flag == "--multirun":
        raise ValueError(f"{argument}: {ONE_RUN}")
    if flag not in FLAGS:
        close = difflib.get_close_matches(flag, FLAGS, n=1)
        hint = f"did you mean {close[0]}?" if close else "options are written key=value; --help lists them"
        raise ValueError(f"{argument}: no such option; {hint}")
    choices = FLAGS[flag]
    if choices is None:
        if equals:
            raise ValueError(f"{argument}: {flag} takes no value")
        return flag, None
    if not equals and flag == "--info" and (not rest or rest[0] not in choices):
        value = "all"
    elif not equals:
        value = rest.pop(0) if rest else ""
    if (choices and value not in choices) or not value:
        raise ValueError(f"{flag}={value}: needs {'one of ' + ', '.join(choices) if choices else 'a folder'}")
    return flag, value


def _override(argument: str) -> str:
    if argument.startswith(("+", "~")):
        raise ValueError(
            f"{argument}: keys are neither added nor removed here; existing ones are changed with key=value "
            "(--help lists them), a matrix of runs is python -m scaling.study"
        )
    if argument.startswith(("hydra.", "hydra/", "hydra=")):
        raise ValueError(f"{argument}: Hydra's own settings are fixed here; --config-dir adds a folder of your configs")
    return argument


def explain(line: CommandLine, error: Exception) -> str:
    """One line for a command line that Hydra refused: which override, and what would work."""
    if isinstance(error, MissingMandatoryValue):
        asked = "; it is package.module:function" if error.full_key == "model.target" else ""
        return f"{error.full_key}: has no value here, and needs one: {error.full_key}=...{asked}"
    parser = OverridesParser.create()
    overrides: list[Override] = []
    for text in line.overrides:
        if "=" not in text:
            return f"{text}: not an override; write key=value or group=option"
        try:
            overrides.append(parser.parse_override(text))
        except HydraException as problem:
            return f"{text}: cannot be read ({str(problem).splitlines()[0]}); quote the value, as in 'key=\"a value\"'"
    try:
        for override in overrides:
            if message := _explain_one(line, overrides, override):
                return message
    except UNREADABLE:  # a file of the user's; the error says which
        pass
    return str(error)


def _explain_one(line: CommandLine, overrides: list[Override], override: Override) -> str | None:
    key, text = override.key_or_group, override.input_line or ""
    if override.is_sweep_override():
        return f"{text}: several values are a sweep; {ONE_RUN}"
    if line.is_free(text):
        lone = key == "model.args" and not isinstance(override.value(), dict)
        return f"{text}: model.args holds arguments; write model.args.NAME=VALUE" if lone else None
    groups = line.groups()
    if key in groups:
        option = str(override.value())
        if option not in groups[key]:
            return f"{text}: no such {key}{_near(option, groups[key])}; there are: {', '.join(groups[key])}"
        return None
    chosen = [
        o.input_line or "" for o in overrides if o.key_or_group in groups and str(o.value()) in groups[o.key_or_group]
    ]
    tree = line.tree(chosen)
    known = sorted(_keys(tree))
    if key in known:
        try:
            OmegaConf.update(tree, key, override.value())
            return None
        except (ConfigKeyError, ConfigAttributeError) as problem:  # inside a value that is itself a mapping
            key = str(problem.full_key)
        except OmegaConfBaseException as problem:
            if isinstance(tree[key] if "." not in key else None, DictConfig):
                return f"{text}: {key} is a group of keys, {', '.join(tree[key])}; write {key}.KEY=VALUE"
            return f"{text}: {str(problem).splitlines()[0]}"
    if owners := _owners(line, key, groups):
        return f"{text}: {key} belongs to {', '.join(owners)}; here {_siblings(key, known)}"
    return f"{text}: no such key{_near(key, sorted({*known, *groups}))}; {_siblings(key, known)}"


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key below `node`, groups of keys included."""
    for key in node:
        yield f"{prefix}{key}"
        if OmegaConf.is_missing(node, key):
            continue
        if isinstance(child := node[key], DictConfig):
            yield from _keys(child, f"{prefix}{key}.")


def _owners(line: CommandLine, key: str, groups: dict[str, list[str]]) -> list[str]:
    """The options of other groups that have this key, as `data=text`."""
    group = key.split(".")[0]
    owners = []
    for option in groups.get(group, []):
        with contextlib.suppress(*UNREADABLE):  # another file that is wrong as well
            if key in set(_keys(line.tree([f"{group}={option}"]))):
                owners.append(f"{group}={option}")
    return owners


def _near(word: str, known: list[str]) -> str:
    leaf = {k.split(".")[-1]: k for k in reversed(known)}
    longer = [k for k in known if len(word) > 2 and k.startswith(word)]
    close = (
        longer[:3]
        or difflib.get_close_matches(word, known, n=2)
        or [leaf[match] for match in difflib.get_close_matches(word.split(".")[-1], leaf, n=2)]
    )
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _siblings(key: str, known: list[str]) -> str:
    parent = key.rpartition(".")[0]
    if parent not in known:
        parent = ""
    depth = parent.count(".") + 1 if parent else 0
    names = [
        k.rpartition(".")[2] for k in known if k.startswith(f"{parent}." if parent else "") and k.count(".") == depth
    ]
    return f"{parent or 'the config'} has {', '.join(names) or 'no keys'}"

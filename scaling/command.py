"""The one module around `hydra.main`: a mistake is one line with near misses, printed once, with exit code 2."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scaling.config import TrainConfig, conf_dir, register_schemas, validate
from scaling.world import Launch, Refused

# Hydra's own flags that only print, or that add a folder of the user's; everything else is an override.
FLAGS_WITH_VALUE = ("--cfg", "-c", "--info", "-i", "--package", "-p", "--config-dir", "-cd")
FLAGS = (*FLAGS_WITH_VALUE, "--help", "-h", "--hydra-help", "--resolve", "--shell-completion", "-sc")
PRINTING = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
ONE_RUN = "one launch is one measurement; a matrix of runs is python -m scaling.study"
PATIENCE_S = 10.0  # how long the other ranks leave the word to the one that prints


def run(name: str, main: Callable[[TrainConfig, Launch], int]) -> NoReturn:
    """Compose conf/<name>.yaml with the command line, validate it, and exit with what `main` returns."""
    launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1, nodes=1, torchrun=False)
    try:
        launch = Launch.from_env(os.environ)
        config = compose(name, sys.argv[1:], launch)
        code = main(validate(config, launch.world_size), launch)
    except Refused as mistake:
        _refuse(name, str(mistake), launch, printer=mistake.rank)
    except ValueError as mistake:
        _refuse(name, str(mistake), launch, printer=None)
    sys.stdout.flush()
    sys.exit(code)


def _refuse(name: str, message: str, launch: Launch, *, printer: int | None) -> NoReturn:
    """Print on the rank that owns the mistake (None: rank 0, and whoever is still there after it should have)."""
    prints = launch.rank == (printer or 0)
    if not prints:
        time.sleep(PATIENCE_S)
        prints = printer is None
    if prints:
        print(f"scaling.{name}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    os._exit(2)  # no destructor of a half-open process group may hold the exit up


def compose(name: str, argv: list[str], launch: Launch) -> TrainConfig:
    """The typed config of this command line; exits where Hydra only printed. Raises ValueError in one line."""
    _check_argv(argv)
    if launch.rank != 0 and any(argument.split("=")[0] in PRINTING for argument in argv):
        sys.exit(0)
    register_schemas()
    OmegaConf.register_new_resolver("scaling_groups", _describe_groups, replace=True)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let the exceptions come out here
    composed: list[DictConfig] = []
    entry = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=name)(composed.append)
    try:
        entry()
        if not composed:
            sys.exit(0)
        config = OmegaConf.to_object(composed[0])
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(explain(name, argv, error)) from error
    assert isinstance(config, TrainConfig)
    return config


def _check_argv(argv: list[str]) -> None:
    """Refuse what Hydra would take and we do not, before Hydra starts."""
    skip = False
    for argument in argv:
        if skip:
            skip = False
            continue
        flag = argument.split("=")[0]
        if flag in ("--multirun", "-m"):
            raise ValueError(f"{flag}: {ONE_RUN}")
        if argument.startswith(("+", "~")):
            raise ValueError(
                f"{argument}: keys are neither added nor removed here; existing ones are changed with key=value "
                "(--help lists them), a matrix of runs is python -m scaling.study"
            )
        if argument.startswith("-"):
            if flag not in FLAGS:
                close = difflib.get_close_matches(flag, FLAGS, n=1)
                hint = f"did you mean {close[0]}?" if close else "options are written key=value; --help lists them"
                raise ValueError(f"{argument}: no such option; {hint}")
            skip = flag in FLAGS_WITH_VALUE and "=" not in argument


def explain(name: str, argv: list[str], error: Exception) -> str:
    """One line for a command line that Hydra refused: which override, and what would work."""
    texts = [argument for argument in argv if not argument.startswith("-")]
    parser = OverridesParser.create()
    overrides: list[Override] = []
    for text in texts:
        if "=" not in text:
            return f"{text}: not an override; write key=value or group=option"
        try:
            overrides.append(parser.parse_override(text))
        except HydraException as problem:
            return f"{text}: cannot be read ({str(problem).splitlines()[0]}); quote the value, as in 'key=\"a value\"'"
    for override in overrides:
        if (override.key_or_group or "").split(".")[0] != "hydra" and (
            message := _explain_one(name, overrides, override)
        ):
            return message
    return str(error).splitlines()[0]


def _explain_one(name: str, overrides: list[Override], override: Override) -> str | None:
    key, text = override.key_or_group, override.input_line or ""
    if override.is_sweep_override():
        return f"{text}: several values are a sweep; {ONE_RUN}"
    groups = _groups()
    if key in groups:
        option = str(override.value())
        if option not in groups[key]:
            return f"{text}: no such {key}{_near(option, groups[key])}; there are: {', '.join(groups[key])}"
        return None
    chosen = [
        o.input_line or "" for o in overrides if o.key_or_group in groups and str(o.value()) in groups[o.key_or_group]
    ]
    tree = _quietly_compose(name, chosen)
    if key not in (known := sorted(_keys(tree))):
        owners = _owners(name, key, groups)
        if owners:
            return f"{text}: {key} belongs to {' and '.join(owners)}; here {_siblings(key, known)}"
        return f"{text}: no such key{_near(key, sorted({*known, *groups}))}; {_siblings(key, known)}"
    try:
        OmegaConf.update(tree, key, override.value())
    except OmegaConfBaseException as problem:
        return f"{text}: {str(problem).splitlines()[0]}"
    return None


def _groups() -> dict[str, list[str]]:
    """The options of every group of conf/."""
    folders = sorted(path for path in conf_dir().iterdir() if path.is_dir())
    return {folder.name: sorted(option.stem for option in folder.glob("*.yaml")) for folder in folders}


def _describe_groups() -> str:
    return "\n".join(f"  {group}: {', '.join(options)}" for group, options in _groups().items())


def _quietly_compose(name: str, overrides: list[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra.compose(name, overrides)


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key below `node`, groups of keys included."""
    for key in node:
        yield f"{prefix}{key}"
        if OmegaConf.is_missing(node, key):
            continue
        if isinstance(child := node[key], DictConfig):
            yield from _keys(child, f"{prefix}{key}.")


def _owners(name: str, key: str, groups: dict[str, list[str]]) -> list[str]:
    """The options of other groups that have this key, as `data=text`."""
    group = key.split(".")[0]
    return [
        f"{group}={o}" for o in groups.get(group, []) if key in set(_keys(_quietly_compose(name, [f"{group}={o}"])))
    ]


def _near(word: str, known: list[str]) -> str:
    leaf = {k.split(".")[-1]: k for k in reversed(known)}
    close = difflib.get_close_matches(word, known, n=2) or [
        leaf[match] for match in difflib.get_close_matches(word.split(".")[-1], leaf, n=2)
    ]
    return f", did you mean {' or '.join(close)}?" if close else ""


def _siblings(key: str, known: list[str]) -> str:
    parent = key.rpartition(".")[0]
    if parent not in known:
        parent = ""
    depth = parent.count(".") + 1 if parent else 0
    names = [
        k.rpartition(".")[2] for k in known if k.startswith(f"{parent}." if parent else "") and k.count(".") == depth
    ]
    return f"{parent or 'the config'} has {', '.join(names)}"


def repeat_command(name: str, launch: Launch, argv: list[str]) -> str:
    """The command line that starts this run again, quoted for a shell."""
    import shlex

    python = f"-m scaling.{name} " + shlex.join(argv)
    if not launch.torchrun:
        return f"python {python}".strip()
    nodes = f"--nnodes={launch.nodes} " if launch.nodes > 1 else ""
    return f"torchrun {nodes}--nproc_per_node={launch.local_world_size} {python}".strip()

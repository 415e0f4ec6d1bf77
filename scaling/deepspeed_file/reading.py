"""Reading the user's JSON strictly: what DeepSpeed or Python's reader would take silently is refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from scaling.deepspeed_file.sections import join, shown

# Words that a template engine or a shell would have replaced; `<X>` only where it is the whole string.
QUOTED_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\$\{.*?\}|^<[^<>]+>$")
BARE_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\$\{.*?\}|\$\w+|<[^<>\s]+>|[A-Za-z_]\w*")
TRAILING_COMMA = re.compile(r",\s*[}\]]")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class _Pairs(list[tuple[str, Any]]):
    """An object before its keys are known to be unique."""


@dataclass(frozen=True)
class _Constant:
    """NaN or an infinity, which JSON does not have."""

    name: str


def read_settings(path: str | None) -> dict[str, Any]:
    """The object in this DeepSpeed file. Raises ValueError in one line for whatever is no plain, filled-in JSON."""
    if not path:
        raise ValueError("strategy.config=: strategy=deepspeed needs your DeepSpeed file: strategy.config=FILE.json")
    try:
        text = _text(Path(path))
        parsed = _parsed(text)
        if not isinstance(parsed, _Pairs):
            kind = "a list" if isinstance(parsed, list) else shown(parsed)
            raise ValueError(f"holds {kind}; a DeepSpeed file is one object, {{...}}")
        settings = _unique(parsed, "")
    except ValueError as error:
        raise ValueError(f"strategy.config={path}: {error}") from None
    assert isinstance(settings, dict)
    return settings


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"there is no such file (looked from {Path.cwd()})") from None
    except IsADirectoryError:
        raise ValueError("is a folder; name the DeepSpeed file in it") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _parsed(text: str) -> object:
    if not text.strip():
        raise ValueError("is empty; a DeepSpeed file is one object, {...}")
    try:
        return json.loads(text, object_pairs_hook=_Pairs, parse_constant=_Constant)
    except RecursionError:
        raise ValueError("is nested too deeply for a DeepSpeed file") from None
    except json.JSONDecodeError as error:
        _refuse_syntax(text, error)


def _refuse_syntax(text: str, error: json.JSONDecodeError) -> NoReturn:
    where = f"is not JSON at line {error.lineno}, column {error.colno}"
    # `{{x}}` fails at its second brace.
    start = error.pos - 1 if text[error.pos - 1 : error.pos + 1] == "{{" else error.pos
    rest = text[start:]
    word = BARE_TEMPLATE.match(rest)
    if rest.startswith(("//", "/*", "#")):
        raise ValueError(f"{where}: comments are Hjson, which DeepSpeed reads and JSON does not have; take them out")
    if TRAILING_COMMA.search(text[: error.pos].rstrip()[-1:] + rest[:1]) or TRAILING_COMMA.match(rest):
        raise ValueError(f"{where}: a comma has nothing after it; take it out")
    if rest.startswith("'"):
        raise ValueError(f'{where}: strings take double quotes, "..."')
    if word and word[0] in PYTHON_WORDS:
        raise ValueError(f"{where}: {word[0]} is Python; write {PYTHON_WORDS[word[0]]}")
    if word:
        raise ValueError(f"{where}: {word[0]} is no value; if it is a word of a template, it must be filled in first")
    raise ValueError(f"{where}: {error.msg}")


def _unique(value: object, path: str) -> object:
    """Plain dicts and lists. Raises ValueError for a key given twice, a non-finite number, and a template word."""
    if isinstance(value, _Pairs):
        result: dict[str, Any] = {}
        for key, inner in value:
            inner_path = join(path, key)
            if key in result:
                both = f"{_briefly(result[key])} and {_briefly(inner)}"
                raise ValueError(f"the key {inner_path} is given twice, {both}; JSON would keep the last: remove one")
            _refuse_template(key, inner_path)
            result[key] = _unique(inner, inner_path)
        return result
    if isinstance(value, list):
        return [_unique(inner, f"{path}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, _Constant) or (isinstance(value, float) and not math.isfinite(value)):
        name = value.name if isinstance(value, _Constant) else "a number beyond float64"
        raise ValueError(f"{path} is {name}; write a finite number")
    if isinstance(value, str):
        _refuse_template(value, path)
    return value


def _refuse_template(text: str, path: str) -> None:
    if word := QUOTED_TEMPLATE.search(text):
        raise ValueError(f"{path} holds {word[0]}, a word of a template: it must be filled in first")


def _briefly(value: object) -> str:
    if isinstance(value, _Constant):
        return value.name
    if isinstance(value, dict | _Pairs):
        return "{...}"
    return "[...]" if isinstance(value, list) else shown(value)

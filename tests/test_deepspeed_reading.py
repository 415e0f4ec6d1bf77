"""Reading a DeepSpeed file: nothing that is not plain, filled-in JSON."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deepspeed_files import FIXTURES, refusal, write

from scaling.deepspeed_file import read_settings


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("[1]", "holds a list; .* one object"),
        ("3", "holds 3; .* one object"),
        (b"\xff\xfe{}", r"not UTF-8 text \(byte 0\)"),
        ('{"a": 1,\n "b" 2}', "not JSON at line 2, column 6: Expecting ':' delimiter"),
        ('{"a": 1,\n // note\n "b": 2}', "line 2, column 2: comments are Hjson"),
        ('{"a": 1} # note', "line 1, column 10: comments are Hjson"),
        ('{"a": 1,\n}', "a comma has nothing after it; take it out"),
        ('{"a": [1, 2,]}', "a comma has nothing after it; take it out"),
        ("{'a': 1}", "strings take double quotes"),
        ('{"a": True}', "True is Python; write true"),
        ('{"a": GB_SIZE}', "line 1, column 7: GB_SIZE is no value; .* filled in first"),
        ('{"a": {{ size }}}', r"line 1, column 8: \{\{ size \}\} is no value; .* filled in first"),
        ('{"a": ${SIZE}}', r"\$\{SIZE\} is no value; .* filled in first"),
        ('{"a": <SIZE>}', "<SIZE> is no value; .* filled in first"),
        ('{"a": {"b": ["x", "{{size}}"]}}', r"a\.b\[1\] holds \{\{size\}\}, a word of a template: .* filled in first"),
        ('{"a": "/data/${JOB}/x"}', r"a holds \$\{JOB\}, a word of a template"),
        ('{"a": "<SIZE>"}', "a holds <SIZE>, a word of a template"),
        ('{"{{key}}": 1}', r"holds \{\{key\}\}, a word of a template"),
        ('{"a": {"b": NaN}}', r"a\.b is NaN; write a finite number"),
        ('{"a": -Infinity}', "a is -Infinity; write a finite number"),
        ('{"a": 1e999}', "a is a number beyond float64"),
        ('{"a": 1, "a": 2}', "the key a is given twice, 1 and 2; JSON would keep the last"),
        ('{"z": [{"s": {"k": 1, "k": "auto"}}]}', r'the key z\[0\]\.s\.k is given twice, 1 and "auto"'),
        ('{"z": {"k": 1}, "z": {"k": 2}}', r"the key z is given twice, \{\.\.\.\} and \{\.\.\.\}"),
        ('{"z": 1, "z": NaN}', "the key z is given twice, 1 and NaN"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "is nested too deeply for a DeepSpeed file"),
        ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "is nested too deeply for a DeepSpeed file"),
    ],
)
def test_what_is_no_plain_json_is_refused(tmp_path: Path, content: str, words: str) -> None:
    message = refusal(write(tmp_path, content))
    assert re.search(words, message), message


@pytest.mark.parametrize("path", [None, ""])
def test_a_strategy_without_its_file_says_what_to_write(path: str | None) -> None:
    assert "strategy.config=FILE.json" in refusal(path)


def test_paths_that_hold_no_file_are_refused(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "ds.json")
    assert "is a folder" in refusal(tmp_path)
    assert "cannot be read: Not a directory" in refusal(Path(__file__) / "ds.json")


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    assert read_settings(str(write(tmp_path, b"\xef\xbb\xbf{}"))) == {}


def test_a_public_file_with_a_key_twice_is_refused() -> None:
    message = refusal(FIXTURES / "d09_DUPLICATE_KEYS_int_then_auto.json")
    assert 'the key train_batch_size is given twice, 128 and "auto"' in message


def test_a_public_template_is_refused() -> None:
    message = refusal(FIXTURES / "d13_TEMPLATE_unquoted_placeholder_not_json.json")
    assert (
        "line 2, column 24: GB_SIZE is no value; if it is a word of a template, it must be filled in first" in message
    )

"""Batch numbers of a DeepSpeed file: its own arithmetic, completed from the command line, never adjusted silently."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed_files import FIXTURES, config, refusal, settings_of, write

from scaling.config import BatchConfig, PrecisionConfig, validate
from scaling.deepspeed_file import read_settings, resolve

ROWS = list(csv.DictReader((FIXTURES / "expected_resolution.tsv").open(), delimiter="\t"))
NUMBERED = [row for row in ROWS if row["world_size"] != "any"]
RESOLVED = re.compile(r"micro=(\d+) gas=(\d+) dp=(\d+) global=(\d+)")
UNEQUAL = re.compile(r"ERROR (\d+) != (\d+)\*(\d+)\*(\d+)")
TO_ZERO = re.compile(r"ERROR resolved micro=(\d+) gas=(\d+)")

# DeepSpeed's own reading of every file for every world size, as lines of JSON; null where it stops.
THEIRS = """
import json, sys
from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
comm.get_rank = lambda: 0
for path, world_size in json.load(sys.stdin):
    comm.get_world_size = lambda: world_size
    try:
        config = DeepSpeedConfig(load_ds_config(path))
    except (AssertionError, TypeError, ValueError):
        print("null")
    else:
        keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
        print(json.dumps([getattr(config, key) for key in keys]))
"""


def row_name(row: dict[str, str]) -> str:
    return f"{row['file'][:3]}-{row['world_size']}"


@pytest.mark.parametrize("row", NUMBERED, ids=row_name)
def test_batch_numbers_resolve_as_in_deepspeed(row: dict[str, str]) -> None:
    settings, world_size = read_settings(str(FIXTURES / row["file"])), int(row["world_size"])
    expected = row["expected"]
    if match := RESOLVED.match(expected):
        micro, steps, dp, total = map(int, match.groups())
        assert dp == world_size
        assert resolve(settings, world_size) == (micro, steps, total)
        return
    with pytest.raises(ValueError, match="batch_size") as error:
        resolve(settings, world_size)
    message = str(error.value)
    if '"auto"' in expected:
        assert 'train_batch_size="auto" reached DeepSpeed' in message
    elif match := UNEQUAL.match(expected):
        total, micro, steps, dp = map(int, match.groups())
        assert f"{total} is not micro {micro} x accumulation {steps} x {dp} ranks" in message
    else:
        match = TO_ZERO.match(expected)
        assert match is not None
        assert f"micro {match[1]} x accumulation {match[2]} x {world_size} ranks = 0" in message


@pytest.mark.parametrize("row", NUMBERED, ids=row_name)
def test_files_resolve_with_the_command_line_as_alone_and_autos_are_filled(row: dict[str, str]) -> None:
    path, world_size = FIXTURES / row["file"], int(row["world_size"])
    given = read_settings(str(path))
    half = "fp16" if "fp16" in given else "bf16" if "bf16" in given else "fp32"
    started = config(path, precision=PrecisionConfig(half))
    if match := RESOLVED.match(row["expected"]):
        micro, steps, _, total = map(int, match.groups())
    elif '"auto"' in row["expected"]:
        started = replace(started, batch=BatchConfig(micro_batch_size=3, accumulation_steps=4))
        micro, steps, total = 3, 4, 12 * world_size
    else:
        with pytest.raises(ValueError, match=f"is not micro .* x {world_size} ranks"):
            validate(started, world_size)
        return
    validated = validate(started, world_size)
    assert validated.batch.sizes == (micro, steps, total)
    assert resolve(settings_of(validated), world_size) == (micro, steps, total)


@pytest.mark.parametrize(
    ("file", "given", "expected"),
    [
        ({}, (None, None, None), (8, 1, 16)),  # the model's own micro-batch
        ({}, (None, None, 64), (32, 1, 64)),
        ({}, (4, 2, None), (4, 2, 16)),
        ({"gradient_accumulation_steps": 4}, (None, None, None), (8, 4, 64)),
        ({"gradient_accumulation_steps": 4}, (None, None, 16), (2, 4, 16)),
        ({"gradient_accumulation_steps": 4}, (3, 4, None), (3, 4, 24)),  # the same number on both sides
        ({"train_micro_batch_size_per_gpu": 4}, (None, 4, None), (4, 4, 32)),
        ({"train_micro_batch_size_per_gpu": 4}, (None, None, 64), (4, 8, 64)),
        ({"train_batch_size": 64}, (8, None, None), (8, 4, 64)),
        ({"train_batch_size": 64}, (None, 4, None), (8, 4, 64)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, (None, None, None), (32, 1, 64)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}, (None, 4, 64), (8, 4, 64)),
        ({"train_batch_size": None, "train_micro_batch_size_per_gpu": 8}, (None, None, None), (8, 1, 16)),
    ],
)
def test_the_command_line_completes_what_the_file_leaves_open(
    tmp_path: Path, file: dict[str, Any], given: tuple[Any, ...], expected: tuple[int, ...]
) -> None:
    validated = validate(config(write(tmp_path, file), batch=BatchConfig(*given)), 2)
    assert validated.batch.sizes == expected
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert tuple(settings_of(validated)[key] for key in keys) == expected


@pytest.mark.parametrize(
    ("file", "given", "words"),
    [
        # C17: every backward would be a boundary, and only the last micro-batch would survive.
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
            (None, 4, None),
            "the file has train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1, which is "
            "micro 2 x accumulation 1 x 2 ranks = 4, but the command line has batch.accumulation_steps=4",
        ),
        (
            {"gradient_accumulation_steps": 1},
            (None, 4, None),
            "has gradient_accumulation_steps=1 for 2 ranks, but the command line has batch.accumulation_steps=4",
        ),
        (
            {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 3},
            (None, 4, None),
            "which is micro 3 x accumulation 16 x 2 ranks = 96, but the command line has batch.accumulation_steps=4",
        ),
        ({"train_batch_size": 64}, (8, 2, None), "batch.micro_batch_size=8, batch.accumulation_steps=2"),
        ({"train_batch_size": 64}, (None, None, 32), "train_batch_size=64.*batch.global_batch_size=32"),
        (
            {"train_batch_size": 64},
            (5, None, None),
            r"64 is not micro 5 x accumulation 6 x 2 ranks = 60; what works: train_batch_size 60 or 70 "
            r"\(the command line gave batch.micro_batch_size=5\)",
        ),
        ({"train_batch_size": 64}, (0, None, None), "batch.micro_batch_size=0: must be at least 1"),
        ({}, (1, 2, 3), "all given; give two"),
        ({"train_batch_size": 0}, (), "train_batch_size=0: must be at least 1"),
        ({"train_batch_size": 8.0}, (), 'train_batch_size=8.0: must be a whole number or "auto"'),
        ({"train_batch_size": True}, (), "train_batch_size=true: must be a whole number"),
        ({"train_batch_size": "GB_SIZE"}, (), 'train_batch_size="GB_SIZE": .*must be filled in first'),
    ],
)
def test_batch_numbers_that_disagree_are_refused_with_both_sides(
    tmp_path: Path, file: dict[str, Any], given: tuple[Any, ...], words: str
) -> None:
    message = refusal(write(tmp_path, file), batch=BatchConfig(*given))
    assert re.search(words, message), message


@pytest.mark.parametrize(
    ("file", "world_size", "words"),
    [
        (
            {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 3},
            3,
            "train_batch_size 90 or 99, or 2 or 4 ranks",
        ),
        ({"train_batch_size": 96, "train_micro_batch_size_per_gpu": 3}, 64, "train_batch_size 192, or 32 ranks"),
        (
            {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2},
            7,
            "micro 2 x accumulation 18 x 7 ranks = 252",
        ),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 3, "micro 10 x accumulation 2 x 3 ranks = 60"),
        ({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2}, 2, "train_batch_size 4, or 1 rank"),
        (
            # An engine that saw a world of one would have found these to agree.
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            4,
            "8 is not micro 2 x accumulation 4 x 4 ranks = 32; what works: train_batch_size 32, or 1 rank",
        ),
    ],
)
def test_a_batch_that_does_not_fit_says_which_would(file: dict[str, Any], world_size: int, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        resolve(file, world_size)


def test_a_file_without_a_batch_is_refused_as_deepspeed_would() -> None:
    with pytest.raises(ValueError, match="neither train_batch_size nor train_micro_batch_size_per_gpu"):
        resolve({"gradient_accumulation_steps": 2}, 2)


def test_deepspeed_resolves_the_same() -> None:
    asked = [(str(FIXTURES / row["file"]), int(row["world_size"])) for row in NUMBERED]
    done = subprocess.run(
        [sys.executable, "-c", THEIRS],
        input=json.dumps(asked),
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = [json.loads(line) for line in done.stdout.splitlines()]
    ours: list[list[int] | None] = []
    for path, world_size in asked:
        try:
            ours.append(list(resolve(read_settings(path), world_size)))
        except ValueError:
            ours.append(None)
    assert ours == theirs
    assert sum(numbers is not None for numbers in ours) > 20

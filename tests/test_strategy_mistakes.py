"""Mistakes with strategies end as all others do: in one line that names every number, with exit code 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from deepspeed_files import FIXTURES
from launching import SMALL, environment, forked, free_port, rank_environment, run_dirs
from test_mistakes import assert_refused

FILES: dict[str, dict[str, Any]] = {
    "once.json": {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
    "plain.json": {"gradient_clipping": 0.0},
    "half.json": {"bf16": {"enabled": True}},
    "fp16.json": {"fp16": {"enabled": True}},
    "clips.json": {"gradient_clipping": 1.0},
    "invented.json": {"zero_optimization": {"stage": 2, "reduce_bucket": 100}},
    "negative.json": {"zero_optimization": {"stage": 2, "reduce_bucket_size": -1}},
    "world.json": {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3},
    "null.json": {"zero_optimization": None},
    "untyped.json": {"optimizer": {"params": {"lr": 0.1}}},
    "scheduler.json": {"scheduler": {"type": "Nope", "params": {}}},
    "argument.json": {"optimizer": {"type": "AdamW", "params": {"learning_rate": 0.1}}},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with DeepSpeed files, two of them public ones."""
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).write_text(json.dumps(content))
    shutil.copy(FIXTURES / "d09_DUPLICATE_KEYS_int_then_auto.json", folder / "twice.json")
    shutil.copy(FIXTURES / "d13_TEMPLATE_unquoted_placeholder_not_json.json", folder / "template.json")
    return folder


def own(file: str, *words: str) -> list[str]:
    return [*SMALL, "strategy=deepspeed", f"strategy.config={file}", *words]


# Before the ranks meet: rank 0 of two is enough


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # options
        ("strategy=zero4", ["strategy=zero4: no such strategy", "ddp, deepspeed, fsdp, single, zero0, zero1"]),
        ("strategy=zero0 strategy.bucket_mb=1", ["strategy.bucket_mb belongs to", "zero1", "here strategy has name"]),
        (
            "strategy=zero1 strategy.coalesce_grad_reduction=true",
            ["strategy.coalesce_grad_reduction belongs to strategy=fsdp", "strategy=zero2, strategy=zero3; here"],
        ),
        ("strategy=fsdp strategy.overlap=false", ["strategy.overlap belongs to", "here strategy has "]),
        ("strategy=ddp strategy.defaults=deepspeed", ["strategy.defaults belongs to strategy=zero1"]),
        ("strategy=zero2 strategy.defaults=mine", ["strategy.defaults=mine: choose one of scaling, deepspeed"]),
        (
            "strategy=zero2 strategy.defaults=deepspeed strategy.bucket_mb=10",
            ["strategy.bucket_mb=10.0: strategy.defaults=deepspeed takes DeepSpeed's own; leave out either"],
        ),
        (
            "strategy=zero1 strategy.defaults=deepspeed strategy.overlap=false",
            ["strategy.overlap=False: strategy.defaults=deepspeed takes"],
        ),
        ("strategy=zero1 strategy.bucket_mb=0", ["strategy.bucket_mb=0.0: must be greater than 0"]),
        (
            "strategy=zero3 strategy.param_persistence_threshold=-1",
            ["strategy.param_persistence_threshold=-1: must be at least 0"],
        ),
        ("strategy=zero3 strategy.max_live_parameters=1e9", ["strategy.max_live_parameters=1e9:", "Integer"]),
        ("strategy=single", ["strategy=single is one device without a wrapper, but 2 ranks", "use strategy=ddp"]),
        ("precision.gather=half", ["precision.gather=half: choose one of auto, fp32, compute"]),
        # a user's file
        (
            "strategy=deepspeed",
            ["strategy.config=: strategy=deepspeed needs your DeepSpeed file: strategy.config=FILE.json"],
        ),
        ("strategy=deepspeed strategy.config=gone.json", ["strategy.config=gone.json: there is no such file"]),
        (
            "strategy=deepspeed strategy.config=twice.json",
            ["strategy.config=twice.json: the key", "is given twice", "remove one"],
        ),
        (
            "strategy=deepspeed strategy.config=template.json",
            ["strategy.config=template.json: is not JSON at line", "template", "filled in first"],
        ),
        (  # C17: gas=1 in the file, 4 in the loop
            "strategy=deepspeed strategy.config=once.json batch.accumulation_steps=4",
            [
                "the file has train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1",
                "which is micro 2 x accumulation 1 x 2 ranks = 4",
                "but the command line has batch.accumulation_steps=4",
                "or make them agree",
            ],
        ),
        (
            "strategy=deepspeed strategy.config=once.json batch.micro_batch_size=2 batch.global_batch_size=16",
            ["= 4, but the command line has batch.global_batch_size=16, batch.micro_batch_size=2"],
        ),
        (
            "strategy=deepspeed strategy.config=half.json",
            ["trains in bf16 (bf16.enabled is on), but precision=fp32 was asked for; start with precision=bf16"],
        ),
        (
            "strategy=deepspeed strategy.config=plain.json precision=bf16",
            ["trains in fp32", "but precision=bf16 was asked for", '"bf16": {"enabled": true}'],
        ),
        (
            "strategy=deepspeed strategy.config=null.json",
            ["strategy.config=null.json: zero_optimization=null: DeepSpeed cannot read that; leave it out"],
        ),
        (
            "strategy=deepspeed strategy.config=untyped.json",
            ['strategy.config=untyped.json: optimizer: names no "type"'],
        ),
        (
            "strategy=deepspeed strategy.config=clips.json optimizer.clip=0.5",
            ["gradient_clipping=1.0 but optimizer.clip=0.5 on the command line"],
        ),
        (
            "strategy=deepspeed strategy.config=plain.json strategy.bucket_mb=1",
            ["strategy.bucket_mb belongs to strategy=ddp", "here strategy has config"],
        ),
        (
            "strategy=deepspeed strategy.config=plain.json strategy.settings.gradient_clipping=1",
            ["strategy.settings.gradient_clipping=1: no such key"],
        ),
    ],
)
def test_a_command_line_that_asks_for_what_there_is_not(line: str, words: list[str], place: Path) -> None:
    assert_refused(forked([*SMALL, *line.split()], place, rank_environment(0, 2, 29500)), *words)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (8, ["rank 1 of 8 did not come within timeout_s=1"]),  # 24 = 3 x 1 x 8: it goes on, and waits for the others
        (7, ["train_batch_size 24 is not micro 3 x accumulation 1 x 7 ranks = 21", "train_batch_size 21 or 42"]),
        (5, ["train_batch_size 24 is not micro 3 x accumulation 1 x 5 ranks = 15", "4 or 8 ranks"]),
    ],
)
def test_the_world_of_the_launcher_counts_before_there_is_a_group(  # C19
    ranks: int, words: list[str], place: Path
) -> None:
    env = rank_environment(0, ranks, free_port())
    assert_refused(forked(own("world.json", "timeout_s=1"), place, env), *words)


# On this host


def test_another_accelerator_in_the_environment_is_named(place: Path) -> None:
    for words in ([*SMALL, "strategy=zero1"], own("plain.json")):
        ended = forked(words, place, environment(DS_ACCELERATOR="cuda"))
        assert_refused(ended, "DS_ACCELERATOR=cuda is set, but this run is on device=cpu; unset it")
    assert run_dirs(place) == []


def test_fp16_on_a_host_is_refused_for_a_file_too(place: Path) -> None:
    assert_refused(forked(own("fp16.json", "precision=fp16"), place), "precision=fp16: cpu (", "it does fp32, bf16")


# While the engine is built


@pytest.mark.usefixtures("deepspeed_compiled")
@pytest.mark.parametrize(
    ("file", "words"),
    [
        (
            "invented.json",
            ["DeepSpeed does not take these settings", "reduce_bucket", "Extra inputs are not permitted"],
        ),
        (
            "negative.json",
            ["DeepSpeed does not take these settings", "reduce_bucket_size", "greater than 0"],
        ),
        ("scheduler.json", ["DeepSpeed does not take these settings", "Nope"]),
        ("argument.json", ["DeepSpeed does not take these settings", "learning_rate"]),
    ],
)
def test_what_deepspeed_itself_refuses_is_one_line_too(file: str, words: list[str], place: Path) -> None:
    before = set(run_dirs(place))
    assert_refused(forked(own(file), place), *words)
    (run_dir,) = set(run_dirs(place)) - before
    error = json.loads((run_dir / "error.json").read_text())
    assert (error["kind"], error["rank"]) == ("config", 0)
    assert all(word in error["message"] for word in words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "strategy=zero3 precision=bf16 precision.gather=fp32 precision.reduce=bf16",
            ["strategy=zero3 with float32 weights", "use precision.reduce=fp32"],
        ),
        (
            "model=resnet_tiny strategy=fsdp precision=bf16 precision.gather=compute",
            ["strategy=fsdp with precision.gather=compute", "batch normalisation", "leave precision.gather=auto"],
        ),
        (
            "strategy=ddp precision=bf16 precision.gather=compute",
            ["precision.gather=compute: strategy=ddp gathers no weights"],
        ),
    ],
)
def test_pairs_that_a_library_does_not_allow_say_why(line: str, words: list[str], place: Path) -> None:
    small = [word for word in SMALL if not word.startswith("model")] if "model=" in line else SMALL
    assert_refused(forked([*small, *line.split()], place), *words)

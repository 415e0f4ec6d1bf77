"""Batch arithmetic, cross-field errors, and the digest that names a configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scaling.config import (
    BatchConfig,
    DDPConfig,
    MeasureConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    SingleConfig,
    SyntheticConfig,
    TextConfig,
    TrackingConfig,
    TrainConfig,
    digest,
    resolve_batch,
    validate,
)


def config(**changes: Any) -> TrainConfig:
    base = TrainConfig(
        model=ModelConfig("m", "a:b", micro_batch_size=8),
        strategy=DDPConfig(),
        precision=PrecisionConfig("fp32"),
        data=SyntheticConfig(),
        tracking=TrackingConfig("off"),
    )
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("given", "world_size", "expected"),
    [
        ((None, None, None), 2, (8, 1, 16)),  # the model's own micro-batch
        ((4, None, None), 2, (4, 1, 8)),
        ((None, 4, None), 2, (8, 4, 64)),
        ((4, 8, None), 2, (4, 8, 64)),
        ((3, None, 96), 1, (3, 32, 96)),
        ((3, None, 96), 16, (3, 2, 96)),
        ((64, None, 65536), 16, (64, 64, 65536)),  # C09: the accumulation shrinks as ranks are added
        ((64, None, 65536), 1024, (64, 1, 65536)),
        ((None, None, 64), 8, (8, 1, 64)),
        ((None, 2, 64), 8, (4, 2, 64)),
    ],
)
def test_two_batch_numbers_give_the_third(given: tuple[Any, ...], world_size: int, expected: tuple[int, ...]) -> None:
    assert resolve_batch(BatchConfig(*given), 8, world_size).sizes == expected


@pytest.mark.parametrize(
    ("given", "world_size", "numbers"),
    [
        ((1, 2, 3), 4, ["1", "2", "3", "4 ranks"]),
        ((3, None, 96), 7, ["96", "micro_batch_size=3", "7 ranks", "21", "84 or 105"]),
        ((None, None, 64), 3, ["64", "accumulation_steps=1", "3 ranks", "63 or 66"]),
        ((3, None, 24), 64, ["24", "192"]),  # C19: floor division would have made this zero
        ((None, 1, 256), 14, ["256", "14 ranks", "252 or 266"]),  # and this 18
        ((0, None, None), 1, ["micro_batch_size=0", "at least 1"]),
    ],
)
def test_batch_numbers_that_do_not_fit_are_named_and_never_adjusted(
    given: tuple[Any, ...], world_size: int, numbers: list[str]
) -> None:
    with pytest.raises(ValueError, match="batch") as error:
        resolve_batch(BatchConfig(*given), 8, world_size)
    assert all(number in str(error.value) for number in numbers), str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": SingleConfig()}, "single is one device.*2 ranks.*ddp"),
        ({"strategy": DDPConfig(bucket_mb=0)}, "strategy.bucket_mb=0"),
        ({"strategy": DDPConfig(name="single")}, "strategy.name=single: choose with strategy=OPTION"),
        ({"data": TextConfig(lengths="random")}, "data.lengths=random: choose one of fixed, mixed"),
        ({"data": TextConfig(workers=-1)}, "data.workers=-1: must be at least 0"),
        ({"precision": PrecisionConfig("fp8")}, "precision.name=fp8: choose one of fp32"),
        ({"precision": PrecisionConfig("bf16", "fp16")}, "precision.reduce=fp16: choose one of fp32, bf16"),
        ({"optimizer": OptimizerConfig("lion")}, "optimizer.name=lion: choose one of adamw, sgd"),
        ({"optimizer": OptimizerConfig(lr=-1.0)}, r"optimizer.lr=-1.0: must be greater than 0"),
        ({"optimizer": OptimizerConfig(clip=0.0)}, r"optimizer.clip=0.0: must be greater than 0"),
        ({"measure": MeasureConfig(block_steps=0)}, "measure.block_steps=0: must be at least 1"),
        ({"measure": MeasureConfig(max_seconds=float("nan"))}, "measure.max_seconds=nan"),
        ({"threads": 0}, "threads=0: must be at least 1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**31}, "seed=2147483648"),
        ({"model": ModelConfig("m", "a:b", dropout=1.0)}, "model.dropout=1.0"),
    ],
)
def test_what_no_machine_can_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(config(**changes), 2)


def test_the_digest_names_what_is_measured_and_not_where_it_is_written() -> None:
    base = config()
    assert digest(base) == digest(config(output_dir="elsewhere", run_dir="x"))
    assert digest(base) != digest(config(seed=1))
    assert digest(base) != digest(config(batch=BatchConfig(4)))
    assert len(digest(base)) == 8

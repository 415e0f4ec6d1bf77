"""What DeepSpeed is given for `zero0` to `zero3`: every default that changes the training, written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scaling.config import (
    BatchConfig,
    DDPConfig,
    DeepSpeedConfig,
    FSDPConfig,
    OptimizerConfig,
    PrecisionConfig,
    SingleConfig,
    StrategyConfig,
    TrainConfig,
    Zero0Config,
    Zero1Config,
    Zero2Config,
    Zero3Config,
)
from scaling.engine.zero_config import coalesces, offloads, stage, zero_settings

ALL = (Zero0Config(), Zero1Config(), Zero2Config(), Zero3Config())
CLASSES = ["torch.nn.modules.linear.Linear", "torch.nn.modules.sparse.Embedding"]


def settings(
    strategy: StrategyConfig,
    precision: PrecisionConfig | None = None,
    *,
    half_weights: bool = False,
    on_host: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    base = TrainConfig(strategy=strategy, precision=precision or PrecisionConfig("fp32"), batch=BatchConfig(2, 4, 16))
    config = replace(base, **changes)
    return zero_settings(config, half_weights=half_weights, weight_classes=CLASSES, on_host=on_host)


def zero(strategy: StrategyConfig, **options: Any) -> dict[str, Any]:
    """The section `zero_optimization`."""
    section: dict[str, Any] = settings(strategy, **options)["zero_optimization"]
    return section


@pytest.mark.parametrize("strategy", ALL)
def test_what_every_stage_is_told(strategy: StrategyConfig) -> None:
    given = settings(strategy)
    del given["zero_optimization"]
    assert given == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.0,  # DeepSpeed's own is 1.0
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,  # sgd, and our AdamW
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
    }


def test_clipping_is_that_of_the_command_line() -> None:
    assert settings(Zero2Config(), optimizer=OptimizerConfig(clip=0.5))["gradient_clipping"] == 0.5


COMMON = {"allgather_bucket_size": 500_000_000, "contiguous_gradients": True, "reduce_scatter": True}
BUCKETS = {"reduce_bucket_size": 6_553_600, "overlap_comm": True, **COMMON}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Zero0Config(), {"stage": 0}),
        (Zero1Config(), {"stage": 1, **BUCKETS, "compute_grad_norm": False}),
        (Zero2Config(), {"stage": 2, **BUCKETS, "compute_grad_norm": False}),
        (
            Zero3Config(),
            {
                "stage": 3,
                **BUCKETS,
                "stage3_param_persistence_threshold": 100_000,
                "stage3_max_live_parameters": 1_000_000_000,
                "stage3_max_reuse_distance": 1_000_000_000,
                "stage3_prefetch_bucket_size": 50_000_000,
            },
        ),
    ],
)
def test_buckets_are_ddps_and_the_rest_is_written_out(strategy: StrategyConfig, expected: dict[str, Any]) -> None:
    assert zero(strategy) == expected


@pytest.mark.parametrize(
    ("bucket_mb", "elements"),
    [(25.0, 6_553_600), (1.0, 262_144), (0.5, 131_072), (1e-9, 1)],  # MiB of float32 gradients; never none
)
def test_a_bucket_holds_as_many_gradients_as_ddps(bucket_mb: float, elements: int) -> None:
    for strategy in (Zero1Config, Zero2Config, Zero3Config):
        assert zero(strategy(bucket_mb=bucket_mb))["reduce_bucket_size"] == elements
    half = zero(Zero2Config(bucket_mb=bucket_mb), precision=PrecisionConfig("bf16", reduce="bf16"), half_weights=True)
    assert half["reduce_bucket_size"] == elements, "DDP's are measured in float32 too"


def test_without_overlap() -> None:
    assert [zero(kind(overlap=False))["overlap_comm"] for kind in (Zero1Config, Zero2Config, Zero3Config)] == [
        False
    ] * 3


@pytest.mark.parametrize(("kind", "overlaps"), [(Zero1Config, False), (Zero2Config, False), (Zero3Config, True)])
def test_deepspeeds_own_values(kind: type[Zero1Config], overlaps: bool) -> None:
    section = zero(kind(defaults="deepspeed"))
    assert (section["reduce_bucket_size"], section["overlap_comm"]) == (500_000_000, overlaps)
    assert {name: section[name] for name in COMMON} == COMMON


def test_a_threshold_of_0_is_0_and_none_is_deepspeeds() -> None:
    section = zero(Zero3Config(param_persistence_threshold=0, max_live_parameters=0))
    assert section["stage3_param_persistence_threshold"] == 0
    assert section["stage3_max_live_parameters"] == 0
    assert section["stage3_max_reuse_distance"] == 1_000_000_000
    assert zero(Zero3Config(max_reuse_distance=7))["stage3_max_reuse_distance"] == 7


@pytest.mark.parametrize(("on_host", "pinned"), [(True, False), (False, True)])
def test_offload(on_host: bool, pinned: bool) -> None:
    there = {"device": "cpu", "pin_memory": pinned}
    for kind in (Zero1Config, Zero2Config, Zero3Config):
        section = zero(kind(offload_optimizer=True), on_host=on_host)
        assert section["offload_optimizer"] == there
        assert "offload_param" not in section
    section = zero(Zero3Config(offload_parameters=True), on_host=on_host)
    assert section["offload_param"] == there
    assert "offload_optimizer" not in section


CLIPPED, BF16, FP16 = OptimizerConfig(clip=1.0), PrecisionConfig("bf16"), PrecisionConfig("fp16")


@pytest.mark.parametrize(
    ("strategy", "options", "computed"),
    [
        (Zero1Config(), {}, False),
        (Zero2Config(), {}, False),
        (Zero1Config(), {"optimizer": CLIPPED}, True),
        (Zero2Config(), {"optimizer": CLIPPED}, True),
        (Zero2Config(offload_optimizer=True), {}, True),
        (Zero1Config(), {"precision": BF16, "half_weights": True}, True),  # an optimizer of its own, which needs it
        (Zero1Config(), {"precision": BF16}, False),
        (Zero1Config(), {"precision": FP16, "half_weights": True}, False),
        (Zero2Config(), {"precision": BF16, "half_weights": True}, False),
        (Zero2Config(defaults="deepspeed"), {}, None),
        (Zero0Config(), {"optimizer": CLIPPED}, None),
        (Zero3Config(), {"optimizer": CLIPPED}, None),
    ],
)
def test_a_norm_that_nobody_needs_is_not_computed(
    strategy: StrategyConfig, options: dict[str, Any], computed: bool | None
) -> None:
    assert zero(strategy, **options).get("compute_grad_norm") is computed


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_float32_has_no_section_of_its_own(strategy: StrategyConfig, name: str) -> None:
    given = settings(strategy, PrecisionConfig(name))
    assert not {"fp16", "bf16", "torch_autocast", "data_types"} & set(given)


@pytest.mark.parametrize("strategy", ALL[1:])
def test_half_weights_have_masters_and_float32_gradients(strategy: StrategyConfig) -> None:
    given = settings(strategy, PrecisionConfig("bf16"), half_weights=True)
    assert given["bf16"] == {"enabled": True, "check_grad_overflow": False}
    assert given["data_types"] == {"grad_accum_dtype": "fp32"}
    assert not {"fp16", "torch_autocast"} & set(given)


def test_deepspeeds_own_bf16_looks_for_overflow() -> None:
    strategy = Zero2Config(defaults="deepspeed")
    assert settings(strategy, PrecisionConfig("bf16"), half_weights=True)["bf16"]["check_grad_overflow"] is True


def test_fp16_scales_as_torchs_scaler_does_and_never_grows() -> None:
    """C37: DeepSpeed doubles the scale before it divides by it, and the step after which it grows moves half as far."""
    given = settings(Zero2Config(), PrecisionConfig("fp16"), half_weights=True)
    assert given["fp16"] == {
        "enabled": True,
        "loss_scale": 0,  # dynamic
        "initial_scale_power": 16,
        "loss_scale_window": 2**31 - 1,
        "hysteresis": 1,
        "min_loss_scale": 1,
    }
    assert given["data_types"] == {"grad_accum_dtype": "fp32"}
    assert not {"bf16", "torch_autocast"} & set(given)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
@pytest.mark.parametrize(("reduce", "classes"), [("fp32", []), ("bf16", CLASSES)])
def test_float32_weights_under_autocast_are_reduced_by_class(
    name: str, dtype: str, reduce: str, classes: list[str]
) -> None:
    given = settings(Zero1Config(), PrecisionConfig(name, reduce=reduce))
    assert given["torch_autocast"] == {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": classes}
    assert not {"fp16", "bf16", "data_types"} & set(given)


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_gradients_travel_as_precision_reduce_says(reduce: str) -> None:
    for strategy in ALL:
        assert settings(strategy, PrecisionConfig("fp32", reduce=reduce))["communication_data_type"] == reduce


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        *((strategy, number) for number, strategy in enumerate(ALL)),
        (SingleConfig(), None),
        (DDPConfig(), None),
        (FSDPConfig(), None),
        (DeepSpeedConfig(settings={}), 0),
        (DeepSpeedConfig(settings={"zero_optimization": {}}), 0),
        (DeepSpeedConfig(settings={"zero_optimization": {"stage": 3}}), 3),
        (DeepSpeedConfig(settings={"zero_optimization": True}), 1),  # an old form, which DeepSpeed reads
        (DeepSpeedConfig(settings={"zero_optimization": False}), 0),
    ],
)
def test_the_stage_of_a_strategy(strategy: StrategyConfig, expected: int | None) -> None:
    assert stage(strategy) == expected


def of_a_file(section: object) -> DeepSpeedConfig:
    return DeepSpeedConfig(settings={"zero_optimization": section})


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (DDPConfig(), False),
        (Zero0Config(), False),
        (Zero2Config(), False),
        (Zero2Config(offload_optimizer=True), True),
        (Zero3Config(offload_parameters=True), False),  # the update stays on the device
        (DeepSpeedConfig(settings={}), False),
        (of_a_file({"stage": 2, "offload_optimizer": {"device": "cpu"}}), True),
        (of_a_file({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}), True),
        (of_a_file({"stage": 2, "offload_optimizer": {"device": "none"}}), False),
        (of_a_file({"stage": 2, "offload_optimizer": None}), False),
        (of_a_file({"stage": 2, "offload_optimizer": {}}), False),
        (of_a_file(True), False),
        (of_a_file({"stage": 2, "cpu_offload": True}), True),  # its old name, which DeepSpeed reads
        (of_a_file({"stage": 2, "cpu_offload": False}), False),
    ],
)
def test_who_updates_on_the_host(strategy: StrategyConfig, expected: bool) -> None:
    assert offloads(strategy) is expected


def test_only_zero_2_and_3_of_ours_coalesce() -> None:
    assert coalesces(Zero2Config(coalesce_grad_reduction=True)) and coalesces(Zero3Config(coalesce_grad_reduction=True))
    assert not any(map(coalesces, (*ALL, of_a_file({"stage": 2}), FSDPConfig(coalesce_grad_reduction=True))))

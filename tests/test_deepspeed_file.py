"""A DeepSpeed file of the user's, reconciled with the command line or refused, and what is told about it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_files import FIXTURES, config, refusal, settings_of, write

from scaling.config import DeepSpeedConfig, OptimizerConfig, PrecisionConfig
from scaling.deepspeed_file import notes, reconcile, reductions_per_step, settings_stage
from scaling.deepspeed_file.spelling import KNOWN


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ({}, "fp32"),
        ({}, "tf32"),
        ({"fp16": {"enabled": False}}, "fp32"),
        ({"fp16": {"loss_scale": 0}}, "fp32"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, "bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "half"}}, "fp16"),
    ],
)
def test_a_file_in_the_same_precision_passes_untouched(tmp_path: Path, file: dict[str, Any], name: str) -> None:
    settings = settings_of(reconcile(config(write(tmp_path, file), precision=PrecisionConfig(name)), 2))
    assert {key: settings[key] for key in file} == file


@pytest.mark.parametrize(
    ("file", "name", "words"),
    [
        (
            {},
            "bf16",
            'trains in fp32 .* precision=bf16 .* write "bf16": {"enabled": true} into it, or .* precision=fp32',
        ),
        ({"bf16": {"enabled": False}}, "bf16", "trains in fp32"),
        (
            {"fp16": {"enabled": True}},
            "fp32",
            r"fp16 \(fp16.enabled is on\), but precision=fp32 .* precision=fp16, or set fp16.enabled to false$",
        ),
        ({"fp16": {"enabled": True}}, "bf16", 'precision=bf16 .* set fp16.enabled to false and write "bf16": '),
        ({"bfloat16": {"enabled": True}}, "fp16", "bfloat16.enabled is on"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "bf16", "torch_autocast.enabled is on"),
        ({"torch_autocast": {"enabled": True}}, "bf16", 'torch_autocast.dtype=null: must be "bfloat16" or "float16"'),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16", "fp16.enabled and bf16.enabled are both on"),
        (
            {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bf16"}},
            "bf16",
            "bf16.enabled and torch_autocast.enabled are both on",
        ),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bf16", "keep bf16 only"),
        ({"fp16": {"enabled": 1}}, "fp16", "fp16.enabled=1: must be true or false"),
        ({"fp16": True}, "fp16", r"fp16=true: must be a section, \{\.\.\.\}"),
    ],
)
def test_a_file_in_another_precision_is_refused(tmp_path: Path, file: dict[str, Any], name: str, words: str) -> None:
    message = refusal(write(tmp_path, file), precision=PrecisionConfig(name))
    assert re.search(words, message), message


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
def test_an_open_precision_is_filled_from_the_command_line(tmp_path: Path, name: str) -> None:
    auto = {"enabled": "auto"}
    file = {"fp16": dict(auto), "bf16": dict(auto), "torch_autocast": {**auto, "dtype": "auto"}}
    settings = settings_of(reconcile(config(write(tmp_path, file), precision=PrecisionConfig(name)), 2))
    assert [settings[key]["enabled"] for key in file] == [name == "fp16", name == "bf16", False]
    settings = settings_of(
        reconcile(
            config(write(tmp_path, {"torch_autocast": {**auto, "dtype": "auto"}}), precision=PrecisionConfig(name)), 2
        )
    )
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(name)
    assert settings["torch_autocast"] == ({"enabled": True, "dtype": half} if half else {"enabled": False})


@pytest.mark.parametrize(
    ("file", "clip", "expected"),
    [
        ({}, None, {}),  # untouched: DeepSpeed's own default, and a note
        ({}, 0.5, {"gradient_clipping": 0.5}),
        ({"gradient_clipping": "auto"}, None, {"gradient_clipping": 0.0}),
        ({"gradient_clipping": "auto"}, 0.5, {"gradient_clipping": 0.5}),
        ({"gradient_clipping": 1}, 1.0, {"gradient_clipping": 1}),
        ({"gradient_clipping": 0.0}, None, {"gradient_clipping": 0.0}),
        ({"gradient_clipping": 1.0}, 0.5, "gradient_clipping=1.0 but optimizer.clip=0.5"),
        ({"gradient_clipping": 0.0}, 0.5, "gradient_clipping=0.0 but optimizer.clip=0.5"),
        ({"gradient_clipping": None}, None, "gradient_clipping=null: must be a number"),
        ({"gradient_clipping": -1}, None, "gradient_clipping=-1: must be a number"),
    ],
)
def test_clipping(tmp_path: Path, file: dict[str, Any], clip: float | None, expected: dict[str, float] | str) -> None:
    if isinstance(expected, str):
        assert expected in refusal(write(tmp_path, file), optimizer=OptimizerConfig(clip=clip))
        return
    reconciled = reconcile(config(write(tmp_path, file), optimizer=OptimizerConfig(clip=clip)), 2)
    settings = settings_of(reconciled)
    assert {key: value for key, value in settings.items() if key == "gradient_clipping"} == expected
    # What DeepSpeed will do is what the record's config says, its own default included.
    assert reconciled.optimizer.clip == (expected.get("gradient_clipping", 1.0) or None)


@pytest.mark.parametrize(
    ("value", "reduce", "expected"),
    [
        ("auto", "fp32", "fp32"),
        ("auto", "bf16", "bf16"),
        ("BF16", "bf16", "BF16"),
        (None, "bf16", None),
        ("bf16", "fp32", 'precision.reduce=fp32; start with precision.reduce=bf16, or write "fp32" or "auto"'),
        ("fp16", "fp32", 'communication_data_type="fp16" but precision.reduce=fp32; write "fp32" or "auto"'),
        ("int8", "fp32", "must be one of fp32, fp16, bf16"),
    ],
)
def test_the_type_in_which_gradients_travel(
    tmp_path: Path, value: str | None, reduce: str, expected: str | None
) -> None:
    path, precision = write(tmp_path, {"communication_data_type": value}), PrecisionConfig("fp32", reduce=reduce)
    if expected is not None and len(expected) > 4:
        assert expected in refusal(path, precision=precision)
    else:
        assert settings_of(reconcile(config(path, precision=precision), 2))["communication_data_type"] == expected


def test_other_autos_are_filled_left_out_or_left_to_deepspeed(tmp_path: Path) -> None:
    auto = "auto"
    file = {
        "optimizer": {"type": "AdamW", "params": {"lr": auto, "betas": auto, "eps": auto, "weight_decay": auto}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": auto, "warmup_max_lr": auto, "warmup_num_steps": auto},
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": auto,
            "stage3_prefetch_bucket_size": auto,
            "stage3_param_persistence_threshold": 5,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "buffer_count": auto},
        },
        "steps_per_print": auto,
        "data_types": {"keep_in_fp32_modules": auto, "grad_accum_dtype": auto},
    }
    path = write(tmp_path, file)
    reconciled = reconcile(config(path, optimizer=OptimizerConfig(lr=3e-4)), 2)
    assert settings_of(reconciled) == {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-2},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-4}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 5,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
        },
        "data_types": {"keep_in_fp32_modules": auto},
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
    }
    (removed,) = [note for note in notes(reconciled) if "own default in" in note]
    for key in ("scheduler.params.warmup_num_steps", "zero_optimization.reduce_bucket_size", "steps_per_print"):
        assert key in removed
    assert "keep_in_fp32_modules" not in removed
    assert "optimizer.params.lr" not in removed


@pytest.mark.parametrize(
    ("file", "key"),
    [
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            "scheduler.params.total_num_steps",
        ),
        ({"zero_optimization": {"stage": 1}, "optimizer": {"type": "auto"}}, "optimizer.type"),
        ({"invented": "auto"}, "invented"),
        ({"wandb": {"tags": ["a", "auto"]}}, "wandb.tags[1]"),
    ],
)
def test_an_auto_that_nobody_can_fill_is_named(tmp_path: Path, file: dict[str, Any], key: str) -> None:
    assert refusal(write(tmp_path, file)).startswith(f'{key}="auto": nothing on the command line')


def test_everything_else_passes_untouched(tmp_path: Path) -> None:
    file = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "train_batch_size": 12,
        "gradient_clipping": 0.0,
        "prescale_gradients": True,
        "invented": {"deep": [1, {"er": None}], "a.b": "x"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, "zero_hpz_partition_size": 2},
    }
    assert settings_of(reconcile(config(write(tmp_path, file)), 2)) == file


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size=2: 2 ranks would share each sample, .* each of the 4 "),
        ({"tensor_parallel": {"tp": {"tp_size": 4}}}, "tensor_parallel.tp.tp_size=4: 4 ranks would share"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size=2: 2 ranks would share each sample"),
        ({"data_parallel_size": 2}, "data_parallel_size=2 but 4 ranks were started"),
        ({"pipeline": {"stages": 2}}, "pipeline: .* PipelineModule"),
        ({"autotuning": {"enabled": True}}, "autotuning.enabled=true: .* set it to false"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation=false: .* boundary"),
        ({"gradient_allreduce_op": "SUM"}, 'gradient_allreduce_op="sum": gradients would be 4 times'),
        ({"zero_optimization": {"stage": 2, "zenflow": {}}}, "zero_optimization.zenflow: .* take it out"),
        ({"elasticity": {"enabled": False}, "amp": {}}, "amp, elasticity: DeepSpeed 0.19 no longer has this"),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
            "zero_optimization.mics_shard_size: DeepSpeed 0.19",
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4: must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "auto"}}, 'zero_optimization.stage="auto": must be 0, 1, 2 or 3'),
        ({"zero_optimization": None}, "zero_optimization=null: DeepSpeed cannot read that; leave it out"),
        ({"optimizer": {"params": {"lr": 0.1}}}, 'optimizer: names no "type"; .* leave the section out'),
        ({"optimizer": {}}, 'optimizer: names no "type"'),
        ({"optimizer": None}, 'optimizer: names no "type"'),
        ({"optimizer": {"type": None}}, 'optimizer: names no "type"'),
    ],
)
def test_training_of_another_kind_is_refused(tmp_path: Path, file: dict[str, Any], words: str) -> None:
    message = refusal(write(tmp_path, file), world_size=4)
    assert re.search(words, message), message


def test_sizes_of_one_are_data_parallel(tmp_path: Path) -> None:
    file = {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1, "data_parallel_size": 2}
    assert reconcile(config(write(tmp_path, file)), 2)


def test_settings_come_from_the_file_alone(tmp_path: Path) -> None:
    strategy = DeepSpeedConfig(config=str(write(tmp_path, {})), settings={"gradient_clipping": 1.0})
    with pytest.raises(ValueError, match=r"strategy\.settings is filled in by the run"):
        reconcile(config(None, strategy=strategy), 2)


def test_a_plain_file_says_what_deepspeed_adds(tmp_path: Path) -> None:
    clipping, throughput = notes(reconcile(config(write(tmp_path, {})), 2))
    assert "clips at its default of 1.0" in clipping
    assert '"gradient_clipping": 0.0' in clipping
    assert "timers.throughput is on" in throughput


def test_a_file_that_says_everything_needs_no_note(tmp_path: Path) -> None:
    file = {
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
    }
    assert notes(reconcile(config(write(tmp_path, file)), 2)) == []


@pytest.mark.parametrize(
    ("file", "precision", "words"),
    [
        (
            {"bf16": {"enabled": True}},
            "bf16",
            "gradients travel in the model's type, bf16, and not in precision.reduce=fp32",
        ),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 100.0}},
            "fp32",
            "reduce_bucket_size=100 elements is tiny",
        ),
        ({"wall_clock_breakdown": True}, "fp32", "wall_clock_breakdown: DeepSpeed waits for the device in every phase"),
        ({"flops_profiler": {"enabled": True}}, "fp32", "flops_profiler.enabled: DeepSpeed waits"),
        (
            {"comms_logger": {"enabled": True}, "memory_breakdown": True},
            "fp32",
            "memory_breakdown, comms_logger.enabled: DeepSpeed waits for the device",
        ),
        (
            {"fp16": {"enabled": True}},
            "fp16",
            "every loss_scale_window=1000 good steps DeepSpeed doubles the scale before it divides by it",
        ),
        ({"fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 50}}, "fp16", "every loss_scale_window=50 "),
        ({"steps_per_print": 10}, "fp32", "steps_per_print=10"),
        ({"tensorboard": {"enabled": True}}, "fp32", "tensorboard: DeepSpeed writes"),
        (
            {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}},
            "fp32",
            r"DeepSpeed's Lamb\(lr=0.1\) from the file updates, not optimizer.name and optimizer.lr",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, "fp32", "scheduler: WarmupLR from the file changes the learning rate"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bf16"}, "zero_optimization": {"stage": 1}},
            "bf16",
            "gradients of the layers that it covers travel in bf16, whatever communication_data_type",
        ),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "fp32", "gradients travel quantized"),
    ],
)
def test_effects_on_training_and_timing_are_told(
    tmp_path: Path, file: dict[str, Any], precision: str, words: str
) -> None:
    lines = notes(reconcile(config(write(tmp_path, file), precision=PrecisionConfig(precision)), 2))
    assert any(re.search(words, line) for line in lines), lines
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize(
    ("fp16", "precision"), [({"enabled": True, "loss_scale": 128}, "fp16"), ({"enabled": False}, "fp32")]
)
def test_a_scale_that_stays_says_nothing(tmp_path: Path, fp16: dict[str, Any], precision: str) -> None:
    reconciled = reconcile(config(write(tmp_path, {"fp16": fp16}), precision=PrecisionConfig(precision)), 2)
    assert not any("scale" in line for line in notes(reconciled))


def test_profilers_that_are_off_say_nothing(tmp_path: Path) -> None:
    file = {"comms_logger": {"enabled": False}, "flops_profiler": {"enabled": False}, "wall_clock_breakdown": False}
    assert not any("in every phase" in line for line in notes(reconcile(config(write(tmp_path, file)), 2)))


def test_a_public_file_with_a_bucket_of_100_elements_is_told() -> None:  # C16
    reconciled = reconcile(config(FIXTURES / "d08_tiny_reduce_bucket.json"), 2)
    assert any("one reduction per parameter" in line for line in notes(reconciled))


def test_a_bucket_says_nothing_without_zero(tmp_path: Path) -> None:
    reconciled = reconcile(config(write(tmp_path, {"zero_optimization": {"stage": 0, "reduce_bucket_size": 100}})), 2)
    assert not any("reduce_bucket_size" in line for line in notes(reconciled))


@pytest.mark.parametrize(
    ("stage", "coalesced", "expected"), [(0, False, 1), (1, False, 1), (2, False, 8), (3, False, 8), (2, True, 1)]
)
def test_zero_2_and_3_reduce_after_every_backward(stage: int, coalesced: bool, expected: int) -> None:  # C16
    assert reductions_per_step(stage, 8, coalesced) == expected


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({}, 0),
        ({"zero_optimization": {}}, 0),
        ({"zero_optimization": {"stage": 3}}, 3),
        ({"zero_optimization": True}, 1),
    ],
)
def test_stage_of_a_file(settings: dict[str, Any], stage: int) -> None:
    assert settings_stage(settings) == stage


def test_reading_a_file_stays_light() -> None:
    heavy = "[m for m in ('torch', 'deepspeed', 'hjson') if m in sys.modules]"
    code = f"import sys; import scaling.deepspeed_file; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("zero_optimisation", "zero_optimisation: DeepSpeed has no such key, and would ignore it; did you mean zero"),
        ("gradient_acumulation_steps", "did you mean gradient_accumulation_steps?"),
        ("gradient_clip", "did you mean gradient_clipping?"),
        ("Optimizer", "did you mean optimizer?"),
    ],
)
def test_a_key_that_deepspeed_would_ignore_is_refused_where_it_looks_like_one(
    tmp_path: Path, key: str, words: str
) -> None:
    assert words in refusal(write(tmp_path, {key: 1}))


def test_a_key_that_looks_like_none_is_passed_on_and_named(tmp_path: Path) -> None:
    reconciled = reconcile(config(write(tmp_path, {"my_comment": "ours"})), 2)
    assert settings_of(reconciled)["my_comment"] == "ours"
    assert any("my_comment: DeepSpeed 0.19 has no such key" in note for note in notes(reconciled))


def test_every_key_that_the_fixtures_use_is_known(tmp_path: Path) -> None:
    known = ("optimizer", "scheduler", "timers", "comms_logger", "flops_profiler", "wandb", "torch_autocast", "aio")
    assert set(known) <= set(KNOWN)


@pytest.mark.parametrize(
    ("given", "params", "expected"),
    [
        (OptimizerConfig(), {"lr": 3e-4}, ("adam", 3e-4)),
        (OptimizerConfig(), {"lr": "auto"}, ("adam", 1e-4)),
        (OptimizerConfig(lr=1e-2), {"lr": "auto"}, ("adam", 1e-2)),
        (OptimizerConfig(lr=3e-4), {"lr": 3e-4}, ("adam", 3e-4)),
        (OptimizerConfig(), {}, ("adam", 1e-4)),
        (OptimizerConfig("sgd"), {"lr": 3e-4}, 'optimizer.type="Adam" in the file, but optimizer.name=sgd'),
        (OptimizerConfig(lr=1e-2), {"lr": 3e-4}, "optimizer.params.lr=0.0003 in the file, but optimizer.lr=0.01"),
    ],
)
def test_the_optimizer_of_the_file_is_the_one_that_the_record_names(
    tmp_path: Path, given: OptimizerConfig, params: dict[str, Any], expected: tuple[str, float] | str
) -> None:
    file = write(tmp_path, {"optimizer": {"type": "Adam", "params": params}})
    if isinstance(expected, str):
        assert expected in refusal(file, optimizer=given)
        return
    found = reconcile(config(file, optimizer=given), 2).optimizer
    assert (found.name, found.lr) == expected


@pytest.mark.parametrize(
    ("stage", "kind", "refused"), [(0, "fp32", True), (0, "bf16", False), (0, None, False), (1, "fp32", False)]
)
def test_accumulation_in_fp32_beside_half_weights_needs_zero(
    tmp_path: Path, stage: int, kind: str | None, refused: bool
) -> None:
    types = {} if kind is None else {"data_types": {"grad_accum_dtype": kind}}
    file = write(tmp_path, {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, **types})
    half = PrecisionConfig("bf16")
    if refused:
        words = 'data_types.grad_accum_dtype="fp32" with bf16 and no ZeRO: DeepSpeed has that from stage 1 on'
        assert words in refusal(file, precision=half)
    else:
        assert reconcile(config(file, precision=half), 2)

"""What a user should know about the effect of a DeepSpeed file on the training and on its timing."""

from __future__ import annotations

from typing import Any

from scaling.deepspeed_file.autos import autos, is_optional
from scaling.deepspeed_file.precision import trained_in
from scaling.deepspeed_file.sections import section, settings_stage, shown, switched_on, walk, zero_section
from scaling.deepspeed_file.spelling import unknown

DEFAULT_CLIP = 1.0  # GRADIENT_CLIPPING_DEFAULT of DeepSpeed 0.19
SMALL_BUCKET = 100_000  # elements; a fiftieth of a percent of DeepSpeed's 5e8
MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")


def describe(written: dict[str, Any], settings: dict[str, Any], reduce: str) -> list[str]:
    """One line each; `written` is the file as it stands, `settings` what came of it, `reduce` is precision.reduce."""
    return [
        *_clipping(settings),
        *_communication(settings, reduce),
        *_buckets(settings),
        *_optimizer(settings),
        *_waits(settings),
        *_growing_scale(settings),
        *_unknown(settings),
        *_removed(written, settings),
    ]


def _clipping(settings: dict[str, Any]) -> list[str]:
    if "gradient_clipping" in settings:
        return []
    return [
        f"gradient_clipping is left out: DeepSpeed clips at its default of {DEFAULT_CLIP}; "
        'write "gradient_clipping": 0.0 into the file to turn it off'
    ]


def _communication(settings: dict[str, Any], reduce: str) -> list[str]:
    lines = []
    zero = settings_stage(settings) > 0
    autocast = switched_on(settings, "torch_autocast")
    model_type = "fp32" if autocast else trained_in(settings)
    if zero and autocast:
        lines.append(
            f"torch_autocast: gradients of the layers that it covers travel in {trained_in(settings)}, "
            f"whatever communication_data_type and precision.reduce={reduce} say"
        )
    elif settings.get("communication_data_type") is None and model_type != reduce:
        lines.append(
            f"communication_data_type is left out: gradients travel in the model's type, {model_type}, and not in "
            f'precision.reduce={reduce}; write "communication_data_type": "auto" into the file to have that'
        )
    if zero and zero_section(settings).get("zero_quantized_gradients") is True:
        lines.append(f"zero_quantized_gradients: gradients travel quantized, and not in precision.reduce={reduce}")
    return lines


def _buckets(settings: dict[str, Any]) -> list[str]:
    size = zero_section(settings).get("reduce_bucket_size")
    if settings_stage(settings) == 0 or not isinstance(size, int | float) or size >= SMALL_BUCKET:
        return []
    return [
        f"zero_optimization.reduce_bucket_size={size:g} elements is tiny: about one reduction per parameter, "
        "each paying the latency of the link; DeepSpeed's default is 5e8"
    ]


def _optimizer(settings: dict[str, Any]) -> list[str]:
    lines = []
    if kind := section(settings, "optimizer").get("type"):
        params = ", ".join(f"{key}={shown(value)}" for key, value in section(settings, "optimizer.params").items())
        lines.append(
            f"optimizer: DeepSpeed's {kind}({params}) from the file updates, not optimizer.name and optimizer.lr"
        )
    if kind := section(settings, "scheduler").get("type"):
        lines.append(f"scheduler: {kind} from the file changes the learning rate at every step")
    return lines


def _waits(settings: dict[str, Any]) -> list[str]:
    """Settings that make the host wait for the device, or work, inside the measured window."""
    lines = []
    timing = [key for key in ("wall_clock_breakdown", "memory_breakdown") if settings.get(key) is True]
    timing += [f"{name}.enabled" for name in ("flops_profiler", "comms_logger") if switched_on(settings, name)]
    if timing:
        lines.append(
            f"{', '.join(timing)}: DeepSpeed waits for the device in every phase of a step; the step gets slower"
        )
    throughput = section(settings, "timers.throughput")
    if throughput.get("enabled", True) is not False and throughput.get("synchronized", True) is not False:
        lines.append(
            "timers.throughput is on, as by default: DeepSpeed waits for an accelerator at every forward and step; "
            'write "timers": {"throughput": {"enabled": false}} into the file to turn it off'
        )
    if (every := settings.get("steps_per_print")) is not None:
        lines.append(f"steps_per_print={shown(every)}: DeepSpeed's progress is put together inside the measured window")
    if monitors := [key for key in MONITORS if switched_on(settings, key)]:
        lines.append(f"{', '.join(monitors)}: DeepSpeed writes to it inside the measured window")
    return lines


def _growing_scale(settings: dict[str, Any]) -> list[str]:
    if not switched_on(settings, "fp16") or section(settings, "fp16").get("loss_scale", 0):
        return []
    window = section(settings, "fp16").get("loss_scale_window", 1000)
    return [
        f"fp16: every loss_scale_window={window} good steps DeepSpeed doubles the scale before it divides by it: "
        "that step moves half as far"
    ]


def _unknown(settings: dict[str, Any]) -> list[str]:
    keys = unknown(settings)
    return [f"{', '.join(keys)}: DeepSpeed 0.19 has no such key, and ignores it"] if keys else []


def _removed(written: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    kept = {path for path, _ in walk(settings)}
    removed = [path for path in autos(written) if path not in kept and is_optional(path)]
    if not removed:
        return []
    return [f'"auto" stands for DeepSpeed\'s own default in {", ".join(removed)}']

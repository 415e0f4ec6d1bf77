"""Values "auto" that remain: filled from the command line, left to DeepSpeed's defaults, or refused."""

from __future__ import annotations

from typing import Any

from scaling.deepspeed_file.sections import AUTO, join, walk

# Keys whose absence is DeepSpeed's default: sections that it reads key by key, and numbers and switches of the top.
OPTIONAL_SECTIONS = (
    "activation_checkpointing", "aio", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger", "compile",
    "csv_monitor", "data_types", "flops_profiler", "fp16", "hybrid_engine", "optimizer.params", "tensor_parallel",
    "tensorboard", "timers", "torch_autocast", "wandb", "zero_optimization",
)  # fmt: skip
OPTIONAL_KEYS = (
    "dataloader_drop_last", "disable_allgather", "dump_state", "gradient_allreduce_op", "gradient_predivide_factor",
    "log_level", "memory_breakdown", "optimizer.legacy_fusion", "prescale_gradients",
    "scheduler.params.warmup_num_steps", "scheduler.params.warmup_type", "seq_parallel_communication_data_type",
    "sequence_parallel_size", "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)  # fmt: skip
REQUIRED = ("zero_optimization.stage",)
# DeepSpeed itself knows what "auto" means here.
UNDERSTOOD = ("data_types.keep_in_fp32_modules", "expert_parallel.")


def fill_autos(settings: dict[str, Any], lr: float) -> None:
    """Replace or remove every "auto" that DeepSpeed does not understand. Raises ValueError for one nobody can fill."""
    ours: dict[str, Any] = {
        "optimizer.params.lr": lr,
        # torch.optim.AdamW's defaults
        "optimizer.params.betas": [0.9, 0.999],
        "optimizer.params.eps": 1e-8,
        "optimizer.params.weight_decay": 1e-2,
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": lr,
    }
    for path in autos(settings):
        if path not in ours and not is_optional(path):
            raise ValueError(f'{path}="auto": nothing on the command line says what it should be; write the value')
    _fill(settings, "", ours)


def _fill(holder: dict[str, Any], path: str, ours: dict[str, Any]) -> None:
    for key, value in list(holder.items()):
        inner = join(path, key)
        if isinstance(value, dict):
            _fill(value, inner, ours)
        elif inner in ours and value == AUTO:
            holder[key] = ours[inner]
        elif value == AUTO and not inner.startswith(UNDERSTOOD):
            del holder[key]


def autos(settings: dict[str, Any]) -> list[str]:
    """Dotted paths of the values "auto" that DeepSpeed does not understand."""
    return [path for path, value in walk(settings) if value == AUTO and not path.startswith(UNDERSTOOD)]


def is_optional(path: str) -> bool:
    """Whether leaving the key out leaves the choice to DeepSpeed. An element of a list cannot be left out."""
    if path in REQUIRED or "[" in path:
        return False
    return path in OPTIONAL_KEYS or path.startswith(tuple(f"{name}." for name in OPTIONAL_SECTIONS))

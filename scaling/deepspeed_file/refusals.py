"""What a DeepSpeed file may not ask for: training that is not data parallel over all ranks, or not steered by us."""

from __future__ import annotations

from typing import Any

from scaling.deepspeed_file.sections import section, settings_stage, shown, switched_on, zero_section

# DeepSpeed 0.19 stops at these, whatever they hold.
GONE = (
    "amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula",
    "progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients",
)  # fmt: skip
GONE_FROM_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")


def refuse_other_training(settings: dict[str, Any], world_size: int) -> None:
    """Raise ValueError for a setting under which the run would not be what its record says."""
    if "zero_optimization" in settings and settings["zero_optimization"] is None:
        raise ValueError("zero_optimization=null: DeepSpeed cannot read that; leave it out")
    settings_stage(settings)
    if "optimizer" in settings and not section(settings, "optimizer").get("type"):
        raise ValueError('optimizer: names no "type"; name one, or leave the section out for optimizer.name')
    _refuse_gone(settings)
    _refuse_other_ranks(settings, world_size)
    if section(settings, "pipeline"):
        raise ValueError("pipeline: DeepSpeed reads it for a PipelineModule only, which no model here is; take it out")
    if switched_on(settings, "autotuning"):
        raise ValueError(
            "autotuning.enabled=true: it ends the run after a few profiled steps to change its batch; set it to false"
        )
    if settings.get("managed_gradient_accumulation") is False:
        raise ValueError(
            "managed_gradient_accumulation=false: DeepSpeed then refuses the accumulation boundary that is set here "
            "for every micro-batch; leave it out"
        )
    if str(settings.get("gradient_allreduce_op")).lower() == "sum":
        raise ValueError(
            f'gradient_allreduce_op="sum": gradients would be {world_size} times those of every other strategy; '
            'write "mean", or leave it out'
        )
    if zero_section(settings).get("zenflow") is not None:
        raise ValueError(
            "zero_optimization.zenflow: ZenFlow decides itself when to update, so a step would not be an update; "
            "take it out"
        )


def _refuse_gone(settings: dict[str, Any]) -> None:
    zero = zero_section(settings)
    gone = [key for key in GONE if key in settings]
    gone += [f"zero_optimization.{key}" for key in GONE_FROM_ZERO if key in zero]
    if gone:
        raise ValueError(f"{', '.join(gone)}: DeepSpeed 0.19 no longer has this and refuses the file; take it out")


def _refuse_other_ranks(settings: dict[str, Any], world_size: int) -> None:
    """Every rank must train its own share of the batch."""
    sizes = {
        "tensor_parallel.autotp_size": section(settings, "tensor_parallel").get("autotp_size"),
        "tensor_parallel.tp.tp_size": section(settings, "tensor_parallel.tp").get("tp_size"),
        "sequence_parallel_size": settings.get("sequence_parallel_size"),
    }
    for key, size in sizes.items():
        if isinstance(size, int | float) and size > 1:
            raise ValueError(
                f"{key}={shown(size)}: {shown(size)} ranks would share each sample, but here each of the {world_size} "
                "is data parallel and trains its own; write 1, or leave it out"
            )
    if (size := settings.get("data_parallel_size")) not in (None, world_size):
        raise ValueError(f"data_parallel_size={shown(size)} but {world_size} ranks were started; leave it out")

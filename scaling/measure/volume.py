"""What a strategy should send in one optimizer step, computed from its settings, and what its textbook says."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from scaling.config import DDPConfig, FSDPConfig, SingleConfig, TrainConfig
from scaling.deepspeed_file import reductions_per_step, settings_stage
from scaling.deepspeed_file.sections import switched_on, zero_section
from scaling.engine import Engine
from scaling.engine.zero_config import coalesces
from scaling.measure.collectives import StepCount, busbw_factor
from scaling.measure.layout import Layout

# Settings of a user's DeepSpeed file that change what is sent in ways that are not computed here, and the values with
# which they do not.
OTHER_WAYS: dict[str, tuple[Any, ...]] = {
    "zero_quantized_weights": (False,),
    "zero_quantized_gradients": (False,),
    "zero_hpz_partition_size": (1,),
    "allgather_partitions": (True,),
    "use_multi_rank_bucket_allreduce": (True,),
    "reduce_scatter": (True,),
    "stage3_use_all_reduce_for_fetch_params": (False,),
    "stage3_model_persistence_threshold": (),
}
ONCE = "coalesce_grad_reduction: reduced once per step"
MIXED = "not computed: torch_autocast reduces some modules in one type and some in another"
ALIGNMENT = 2  # DeepSpeed's stages 1 and 2 pad their flat weights to a multiple of this x ranks


@dataclass(frozen=True)
class Volume:
    """Per rank and optimizer step; bytes are payload x busbw factor.

    `bytes` is None where it is not computed, and a kind's value is the least where `most` has another one. It is that
    of a step in which all trainable `elements` get a gradient.
    """

    syncs: int | None
    bytes: dict[str, float] | None
    most: dict[str, float] = field(default_factory=dict)
    textbook: float | None = None
    notes: list[str] = field(default_factory=list)
    elements: int | None = None

    def holds(self, count: StepCount) -> bool:
        """Whether what was counted is what was expected; single numbers, as norms are, do not count."""
        if self.unused(count):
            return True
        if self.syncs != count.syncs and self.syncs is not None:
            return False
        if self.bytes is None:
            return True
        sent = count.tensor_bytes
        for kind in {*self.bytes, *(kind for kind, total in sent.items() if total)}:
            least, counted = self.bytes.get(kind, 0.0), sent.get(kind, 0.0)
            most = self.most.get(kind, least)
            if not least * (1 - ROUNDING) <= counted <= most * (1 + ROUNDING):
                return False
        return True

    def unused(self, count: StepCount) -> int:
        """How many trainable elements got no gradient: what strategies do with these is not computed."""
        return 0 if self.elements is None or not count.gradient_elements else self.elements - count.gradient_elements


ROUNDING = 1e-9  # of a sum of products with (n-1)/n


def expected_volume(config: TrainConfig, engine: Engine, layout: Layout, ranks: int) -> Volume:
    """What a step of this engine should send."""
    return replace(_volume(config, engine, layout, ranks), elements=layout.elements)


def _volume(config: TrainConfig, engine: Engine, layout: Layout, ranks: int) -> Volume:
    strategy, accumulation = config.strategy, config.batch.sizes[1]
    if ranks == 1:
        return Volume(0 if isinstance(strategy, SingleConfig) else None, {}, textbook=0.0)
    reduced = (engine.reduce_dtype or torch.float32).itemsize
    gathered = (engine.gather_dtype or torch.float32).itemsize
    if isinstance(strategy, DDPConfig):
        return _replicated(layout, ranks, reduced)
    if isinstance(strategy, FSDPConfig):
        return _fsdp(strategy, layout, ranks, accumulation, (gathered, reduced))
    assert engine.settings is not None
    zero = engine.settings["zero_optimization"]
    number = settings_stage(engine.settings)
    if other := [key for key, usual in OTHER_WAYS.items() if key in zero and zero[key] not in usual]:
        return Volume(None, None, notes=[f"not computed for {', '.join(other)}"])
    if getattr(engine, "mixed_types", False):
        return Volume(None, None, notes=[MIXED])
    reductions = reductions_per_step(number, accumulation, coalesces(strategy))
    if number == 0:
        return _replicated(layout, ranks, reduced)
    if number < 3:
        textbook = reductions_per_step(number, accumulation)
        padded = number == 1 and _accumulates_flat(engine.settings)
        return _zero12(layout, ranks, (reductions, textbook), (gathered, reduced), padded_reduction=padded)
    times = (accumulation, reductions, config.checkpointing)
    return _zero3(zero, layout, ranks, times, (gathered, reduced))


def _replicated(layout: Layout, ranks: int, reduced: int) -> Volume:
    sent = layout.elements * reduced * busbw_factor("all_reduce", ranks)
    return Volume(1, {"all_reduce": sent}, textbook=sent)


def _fsdp(strategy: FSDPConfig, layout: Layout, ranks: int, accumulation: int, widths: tuple[int, int]) -> Volume:
    gathered, reduced = widths
    factor = busbw_factor("all_gather", ranks)
    reductions = reductions_per_step(3, accumulation, strategy.coalesce_grad_reduction)  # FSDP is ZeRO-3 in this
    blocks = sum(w.padded_rows(ranks) for w in layout.weights if w.block is not None)
    trained = sum(w.padded_rows(ranks) for w in layout.trained)
    rest = sum(w.padded_rows(ranks) for w in layout.weights if w.block is None)
    again = sum(w.padded_rows(ranks) * (2 * w.places - 1) for w in layout.weights if w.block is not None)
    gathers = blocks + rest + (again if strategy.reshard else 0)
    notes = []
    if strategy.reshard and rest:
        notes.append("what lies outside the blocks stays gathered from forward to backward")
    if not strategy.reshard:
        notes.append("reshard=false: weights stay gathered from forward to backward")
    if reductions != accumulation:
        notes.append(ONCE)
    if blocks + rest != layout.all_elements:
        notes.append("shards are padded to equal first dimensions")
    sent = {
        "all_gather": accumulation * gathers * gathered * factor,
        "reduce_scatter": reductions * trained * reduced * factor,
    }
    return Volume(reductions, sent, textbook=_textbook3(layout, ranks, accumulation, widths), notes=notes)


def _accumulates_flat(settings: dict[str, Any]) -> bool:
    """Whether this is DeepSpeed's optimizer for stage 1 with bfloat16 weights, which reduces its padded flat buffer."""
    accumulated = settings.get("data_types", {}).get("grad_accum_dtype")
    return (
        switched_on(settings, "bf16") and accumulated == "fp32" and not zero_section(settings).get("offload_optimizer")
    )


def _zero12(
    layout: Layout, ranks: int, times: tuple[int, int], widths: tuple[int, int], *, padded_reduction: bool = False
) -> Volume:
    reductions, by_the_book = times
    gathered, reduced = widths
    factor = busbw_factor("all_gather", ranks)
    multiple = ALIGNMENT * ranks
    padded = math.ceil(layout.elements / multiple) * multiple
    sent = {
        "all_reduce": reductions
        * (padded if padded_reduction else layout.elements)
        * reduced
        * busbw_factor("all_reduce", ranks),
        "all_gather": padded * gathered * factor,
    }
    textbook = layout.elements * (by_the_book * reduced + gathered) * factor
    notes = ["DeepSpeed all-reduces its buckets, where the textbook scatters: twice the bytes"]
    if reductions != by_the_book:
        notes.append(ONCE)
    if padded != layout.elements:
        notes.append(f"weights are padded to a multiple of {multiple} elements")
    return Volume(reductions, sent, textbook=textbook, notes=notes)


def _zero3(
    zero: dict[str, Any], layout: Layout, ranks: int, times: tuple[int, int, bool], widths: tuple[int, int]
) -> Volume:
    accumulation, reductions, recomputes = times
    gathered, reduced = widths
    factor = busbw_factor("all_gather", ranks)
    threshold = zero["stage3_param_persistence_threshold"]
    kept = [w for w in layout.weights if w.elements <= threshold]
    cut = [w for w in layout.weights if w.elements > threshold]
    stays = sum(w.padded(ranks) for w in kept)
    once = stays + accumulation * sum(w.padded(ranks) for w in cut)
    twice = stays + accumulation * sum(w.padded(ranks) * w.owners * (2 if w.trained else 1) for w in cut)
    again = accumulation * sum(w.padded(ranks) * w.owners for w in cut if w.block is not None) if recomputes else 0
    frees_all = zero["stage3_max_live_parameters"] == zero["stage3_max_reuse_distance"] == 0
    shared = accumulation * sum(w.padded(ranks) * max(0, w.uses - w.owners) * 2 for w in cut)
    frozen = accumulation * sum(w.padded(ranks) * w.owners for w in cut if not w.trained)
    upper = (twice + again + shared + frozen) * gathered * factor
    notes = []
    if kept:
        notes.append(
            f"{len(kept)} parameters of up to {threshold} elements stay gathered, and are gathered once per step"
        )
    if not frees_all and cut:
        notes.append(
            f"weights used again within max_reuse_distance stay gathered: all_gather up to {upper / 1e6:.4g} MB"
        )
    if frees_all and any(w.owners > 1 for w in cut):
        notes.append("a tied weight is gathered for each module that owns it")
    if frozen:
        notes.append("frozen weights are gathered for backward only where a gradient goes through them")
    if shared:
        notes.append("a module that is used in several places may gather for each")
    if again:
        notes.append("checkpointing runs forward again in backward, and may gather again for it")
    if reductions != accumulation:
        notes.append(ONCE)
    sent = {
        "all_gather": (twice if frees_all else once) * gathered * factor,
        "reduce_scatter": reductions * sum(w.padded(ranks) for w in layout.trained) * reduced * factor,
    }
    return Volume(reductions, sent, {"all_gather": upper}, _textbook3(layout, ranks, accumulation, widths), notes)


def _textbook3(layout: Layout, ranks: int, accumulation: int, widths: tuple[int, int]) -> float:
    """Weights gathered for forward and for backward, gradients scattered, in every micro-step: ZeRO, section 7.2.2."""
    gathered, reduced = widths
    moved = 2 * layout.all_elements * gathered + layout.elements * reduced
    return accumulation * moved * busbw_factor("all_gather", ranks)

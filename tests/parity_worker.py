"""One rank of a parity launch: trains every case of one world size from the same seed and saves what came out.

python tests/parity_worker.py RANK WORLD_SIZE STORE_FILE OUTPUT_FILE
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scaling.config import (
    BatchConfig,
    DDPConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    SingleConfig,
    TextConfig,
    TrackingConfig,
    TrainConfig,
    validate,
)
from scaling.engine import Engine, make_engine
from scaling.engine.ddp import DDPEngine
from scaling.measure.agreement import disagreeing, fingerprint
from scaling.measure.collectives import count_step
from scaling.ranks import Launch
from scaling.workload import Batch, build
from scaling.workload.checkpointing import checkpoint_blocks
from scaling.workload.loader import Place, open_source
from scaling.world import World

STEPS = 3
TEXT = Path(__file__).parent.parent / "LICENSE"
MODEL = ModelConfig(
    name="gpt_small",
    target="scaling.workload.transformer:gpt2",
    args={"layers": 2, "hidden_size": 32, "heads": 2, "vocabulary": 256},
    sequence_length=32,
)

BERT = ModelConfig(
    name="bert_small",
    target="scaling.workload.bert:bert",
    args={"layers": 2, "hidden_size": 32, "heads": 2, "mlp_size": 64, "vocabulary": 260, "positions": 32},
    sequence_length=32,
)
LLAMA = ModelConfig(
    name="llama_small",
    target="scaling.workload.transformer:llama",
    args={
        "layers": 2,
        "hidden_size": 32,
        "heads": 4,
        "key_value_heads": 2,
        "mlp_size": 64,
        "vocabulary": 256,
        "tied_embeddings": False,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
    },
    sequence_length=32,
)


class NeverReduces(DDPEngine):
    """Sabotage: every micro-step is taken for an inner one."""

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        return super().accumulate(batch, last=False)


class AlwaysReduces(DDPEngine):
    """Sabotage: every micro-step is taken for the last."""

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        return super().accumulate(batch, last=True)


class ForwardOutside(DDPEngine):
    """Sabotage: the forward left outside of no_sync, the commonest fault of hand-written loops."""

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        total, _ = self._loss(self._ddp, batch.tensors)
        share = total / batch.step_targets
        with nullcontext() if last else self._ddp.no_sync():
            (share * self._world_size).backward()
        return share.detach()


class Undivided(DDPEngine):
    """Sabotage: each micro-batch's mean, summed over micro-batches and not divided by their number."""

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        whole = Batch(batch.tensors, batch.samples, batch.targets, batch.targets * self._world_size)
        return super().accumulate(whole, last=last)


class PerMicroBatch(DDPEngine):
    """Sabotage: the mean of micro-batch means, which weighs short sequences more than long ones."""

    accumulation_steps = 4

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        own = Batch(
            batch.tensors, batch.samples, batch.targets, batch.targets * self.accumulation_steps * self._world_size
        )
        return super().accumulate(own, last=last)


SABOTAGED = {kind.__name__: kind for kind in (NeverReduces, AlwaysReduces, ForwardOutside, Undivided, PerMicroBatch)}


def case_config(world_size: int, micro: int, accumulation: int, lengths: str, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        model=changes.get("model", MODEL),
        checkpointing=changes.get("checkpointing", False),
        strategy=SingleConfig()
        if changes.get("strategy") == "single"
        else DDPConfig(overlap=changes.get("overlap", True)),
        precision=PrecisionConfig("fp32", changes.get("reduce", "fp32")),
        data=TextConfig(path=str(TEXT), lengths=lengths),
        tracking=TrackingConfig("off"),
        batch=BatchConfig(micro, accumulation),
        optimizer=OptimizerConfig("sgd", lr=0.5, clip=changes.get("clip")),
    )
    return validate(config, world_size)


def cases(world_size: int) -> dict[str, tuple[TrainConfig, str | None]]:
    """Name -> (config, sabotage)."""
    shapes = {1: [(8, 1), (2, 4)], 2: [(4, 1), (1, 4)], 4: [(1, 2)]}[world_size]
    found: dict[str, tuple[TrainConfig, str | None]] = {}
    for lengths in ("fixed", "mixed"):
        for micro, accumulation in shapes:
            found[f"{micro}x{accumulation}-{lengths}"] = (case_config(world_size, micro, accumulation, lengths), None)
        for name in SABOTAGED if world_size == 2 else ():
            found[f"{name}-{lengths}"] = (case_config(2, 1, 4, lengths), name)
    micro, accumulation = shapes[-1]
    found["deferred"] = (case_config(world_size, micro, accumulation, "mixed", overlap=False), None)
    found["clipped"] = (case_config(world_size, micro, accumulation, "mixed", clip=0.05), None)
    found["bf16-reduce"] = (case_config(world_size, micro, accumulation, "mixed", reduce="bf16"), None)
    found["checkpointed"] = (case_config(world_size, micro, accumulation, "mixed", checkpointing=True), None)
    for model in (BERT, LLAMA):
        shape = (8, 1) if world_size == 1 else (micro, accumulation)
        found[model.name] = (case_config(world_size, *shape, "mixed", model=model), None)
    if world_size == 1:
        found["single"] = (case_config(1, micro, accumulation, "mixed", strategy="single"), None)
        found["8x1-clipped"] = (case_config(1, 8, 1, "mixed", clip=0.05), None)
    return found


def train(config: TrainConfig, sabotage: str | None, world: World) -> dict[str, Any]:
    """Three steps, then what the checks of a run say of a fourth."""
    workload = build(config.model, world.device, config.seed)
    if config.checkpointing:
        checkpoint_blocks(workload)
    start = {name: p.detach().clone() for name, p in workload.module.named_parameters()}
    place = Place(world.rank, world.size, world.device, [])
    source = open_source(config.data, config.batch, workload, config.seed, place)
    make: Callable[..., Engine] = make_engine
    engine = make(config, workload, world.device, world.size)
    if sabotage is not None:
        engine.__class__ = SABOTAGED[sabotage]
    _, accumulation, _ = config.batch.sizes
    losses = []
    for _ in range(STEPS):
        loss = sum(
            engine.accumulate(next(source.batches), last=micro_step == accumulation - 1)
            for micro_step in range(accumulation)
        )
        engine.step()
        losses.append(float(sum(world.gather(loss))))
    kept = [p.grad.untyped_storage().data_ptr() for p in workload.module.parameters() if p.grad is not None]
    end = {name: p.detach().clone() for name, p in workload.module.named_parameters()}
    agree = not disagreeing(world.gather(fingerprint(workload.module)))
    count = count_step(engine, lambda: next(source.batches), accumulation, world.size)
    return {
        "start": start,
        "end": end,
        "losses": losses,
        "agree": agree,
        "gradient_storages": len(set(kept)),
        "syncs": count.syncs,
        "bytes": count.bytes,
        "host_syncs": count.host_syncs,
        "reduced": count.reduces((engine.reduce_dtype or torch.float32).itemsize),
        "parameters": workload.parameters,
    }


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    launch = Launch(rank, rank, world_size, world_size, nodes=1, torchrun=True)
    world = World.open(launch, {}, request="cpu", store=dist.FileStore(sys.argv[3], world_size), timeout_s=120)
    results = {name: train(config, sabotage, world) for name, (config, sabotage) in cases(world_size).items()}
    if rank == 0:
        torch.save(results, sys.argv[4])
    world.close()


if __name__ == "__main__":
    main()

"""One of two ranks that train odd models with every strategy: what was sent, and the losses, for the tests.

python tests/odd_worker.py RANK STORE_FILE OUTPUT_FILE
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from odd_models import MODELS
from parity_worker import cut, forget_deepspeed
from torch import Tensor

from scaling.config import (
    BatchConfig,
    DDPConfig,
    FSDPConfig,
    OptimizerConfig,
    PrecisionConfig,
    StrategyConfig,
    TrainConfig,
    Zero0Config,
    Zero1Config,
    Zero2Config,
)
from scaling.engine import make_engine
from scaling.engine.deepspeed_ready import prepare_environment
from scaling.measure.collectives import count_step
from scaling.measure.layout import Layout
from scaling.measure.volume import expected_volume
from scaling.ranks import Launch
from scaling.workload import Batch, Workload
from scaling.world import World

RANKS, ACCUMULATION, MICRO, STEPS = 2, 2, 4, 3
STRATEGIES: dict[str, StrategyConfig] = {
    "deferred": DDPConfig(overlap=False),  # DDP itself stops at parameters that are not used
    "fsdp": FSDPConfig(),
    "zero0": Zero0Config(),
    "zero1": Zero1Config(),
    "zero2": Zero2Config(),
    "zero3": cut(),
}
CASES = [(name, model, "fp32") for name in STRATEGIES for model in MODELS]
CASES += [("zero1", model, "bf16") for model in MODELS]  # another optimizer of DeepSpeed's


def train(strategy: StrategyConfig, workload: Workload, precision: str, world: World) -> dict[str, Any]:
    config = TrainConfig(
        strategy=strategy,
        precision=PrecisionConfig(precision),
        optimizer=OptimizerConfig("sgd", lr=0.1),
        batch=BatchConfig(MICRO, ACCUMULATION, MICRO * ACCUMULATION * RANKS),
    )
    layout = Layout.of(workload)
    drawn = torch.Generator().manual_seed(world.rank)

    def batch() -> Batch:
        return Batch(workload.synthetic(MICRO, drawn), MICRO, MICRO, config.batch.sizes[2])

    workload.module.eval()  # as the check of a user's loss does; here on what this rank alone sees
    with torch.no_grad():
        workload.loss(workload.module, batch().tensors)
    workload.module.train()
    own_buffer = seen_by(workload)
    fixed = {name: p.detach().clone() for name, p in workload.module.named_parameters() if not p.requires_grad}
    engine = make_engine(config, workload, world.device, world.size)
    buffer = seen_by(workload)
    losses = []
    for _ in range(STEPS):
        loss = sum(engine.accumulate(batch(), last=step == ACCUMULATION) for step in range(1, ACCUMULATION + 1))
        engine.step()
        losses.append(float(sum(world.gather(loss))))
    count = count_step(engine, batch, ACCUMULATION, world.size)
    volume = expected_volume(config, engine, layout, world.size)
    forget_deepspeed(engine)
    return {
        "losses": losses,
        "buffers": (own_buffer, buffer),
        "frozen": sum(value.numel() for value in fixed.values()),
        "volume": volume,
        "tensor_bytes": count.tensor_bytes,
        "syncs": count.syncs,
        "holds": volume.holds(count),
        "unused": volume.unused(count),
        "elements": (layout.elements, layout.all_elements),
    }


def seen_by(workload: Workload) -> Tensor:
    seen: Tensor = workload.module.get_buffer("seen").detach().clone()
    return seen


def main() -> None:
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    launch = Launch(rank, rank, RANKS, RANKS, nodes=1, torchrun=True)
    world = World.open(launch, {}, request="cpu", store=dist.FileStore(sys.argv[2], RANKS), timeout_s=60)
    prepare_environment(world.device)
    found = {}
    for name, model, precision in CASES:
        torch.manual_seed(0)
        found[name, model, precision] = train(STRATEGIES[name], MODELS[model](), precision, world)
    everyone = world.gather(found)
    if rank == 0:
        torch.save(everyone, sys.argv[3])
    world.close()


if __name__ == "__main__":
    main()

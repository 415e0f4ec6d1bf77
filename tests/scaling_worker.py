"""One of two ranks that train in fp16 with loss scaling, on a host: what each engine did is saved for the tests.

python tests/scaling_worker.py RANK STORE_FILE OUTPUT_FILE
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from parity_worker import forget_deepspeed, whole_weights
from torch import Tensor, nn

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
    Zero3Config,
)
from scaling.engine import Engine, make_engine
from scaling.engine.deepspeed_ready import import_deepspeed, prepare_environment
from scaling.engine.single import SingleEngine
from scaling.engine.zero import ZeroEngine
from scaling.ranks import Launch
from scaling.workload import Batch, Workload
from scaling.world import World

RANKS, ACCUMULATION, SIZE = 2, 4, 16
STRATEGIES: dict[str, StrategyConfig] = {
    "ddp": DDPConfig(),
    "deferred": DDPConfig(overlap=False),
    "fsdp": FSDPConfig(),
    "fsdp-coalesced": FSDPConfig(coalesce_grad_reduction=True),
    "zero0": Zero0Config(),
    "zero1": Zero1Config(),
    "zero2": Zero2Config(),
    "zero3": Zero3Config(param_persistence_threshold=0, max_live_parameters=0, max_reuse_distance=0),
}
# Of each element of the gradient, over all micro-batches and ranks: a norm of 0.5 x sqrt(16) = 2.
ELEMENT = 0.5


class Vector(nn.Module):
    """A weight of 16 elements; its gradient is the input. Over two ranks each has eight of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Watched:
    """An engine in fp16 at a learning rate of 1, its scale, and how often gradients were unscaled."""

    def __init__(
        self, strategy: StrategyConfig, world: World, clip: float | None = None, optimizer: str = "sgd"
    ) -> None:
        config = TrainConfig(
            strategy=strategy,
            precision=PrecisionConfig("fp16"),
            optimizer=OptimizerConfig(optimizer, lr=1.0, clip=clip),
            batch=BatchConfig(1, ACCUMULATION, ACCUMULATION * RANKS),
        )
        workload = Workload(Vector(), lambda m, tensors: (m(tensors["x"]).sum(), 1), lambda n, g: {}, ())
        self.rank = world.rank
        self.engine = make_engine(config, workload, world.device, world.size)
        self.unscaled = 0
        self.facts: dict[str, Any] = {"scales": [], "skipped": [], "weights": []}
        self._scaler: Any = None  # torch's, or DeepSpeed's optimizer that scales by itself
        self._zero: Any = None
        if isinstance(self.engine, ZeroEngine):
            self._scaler = self.engine._engine.torch_autocast_z0_gradscaler
            self._zero = self.engine._engine.optimizer
        else:
            assert isinstance(self.engine, SingleEngine)
            self._scaler = self.engine._scaler
        if self._scaler is not None:
            self._scaler.unscale_ = self._count(self._scaler.unscale_)
        else:
            self._zero.unscale_and_clip_grads = self._count(self._zero.unscale_and_clip_grads)

    def _count(self, function: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: Any, **named: Any) -> object:
            self.unscaled += 1
            return function(*arguments, **named)

        return counted

    @property
    def scale(self) -> float:
        return float(self._zero.loss_scaler.cur_scale if self._scaler is None else self._scaler.get_scale())

    def grow_after(self, steps: int) -> None:
        """Double the scale after so many good steps; DeepSpeed's own scaler is told never to."""
        self._scaler.set_growth_interval(steps)

    def step(self, element: float, infinite: tuple[int, int, int] | None = None) -> None:
        """One optimizer step; `infinite` is (micro-batch, rank, element of its gradient)."""
        for micro_batch in range(1, ACCUMULATION + 1):
            x = torch.full((SIZE,), element / ACCUMULATION / RANKS)
            if infinite is not None and infinite[:2] == (micro_batch, self.rank):
                x[infinite[2]] = float("inf")
            self.engine.accumulate(Batch({"x": x}, 1, 1, 1), last=micro_batch == ACCUMULATION)
            self.facts["scales"].append(self.scale)
        self.engine.step()
        self.facts["scales"].append(self.scale)
        self.facts["skipped"].append(int(self.engine.skipped))
        self.facts["weights"].append(weight_of(self.engine))

    def close(self) -> dict[str, Any]:
        forget_deepspeed(self.engine)
        return self.facts | {"unscaled": self.unscaled, "settings": self.engine.settings}


def weight_of(engine: Engine) -> Tensor:
    (weight,) = whole_weights(engine).values()
    return weight.float()


def clipped(strategy: StrategyConfig, world: World) -> dict[str, Any]:
    """C37: a true norm of 2.0 and a largest one of 1.0."""
    watched = Watched(strategy, world, clip=1.0)
    watched.step(ELEMENT)
    return watched.close()


def overflowing(rank: int, element: int, **options: Any) -> Callable[[StrategyConfig, World], dict[str, Any]]:
    """C37: an infinity in the second micro-batch of one rank, in one rank's shard of the gradient; then a good step."""

    def run(strategy: StrategyConfig, world: World) -> dict[str, Any]:
        watched = Watched(strategy, world, **options)
        watched.step(ELEMENT, infinite=(2, rank, element))
        watched.step(ELEMENT)
        return watched.close()

    return run


def growing(strategy: StrategyConfig, world: World) -> dict[str, Any]:
    """Five good steps, with a scale that grows after every second."""
    watched = Watched(strategy, world)
    watched.grow_after(2)
    for _ in range(5):
        watched.step(2.0**-8)
    return watched.close()


SCENARIOS = {
    "clipped": clipped,
    "first shard": overflowing(rank=1, element=0),
    "last shard, clipped": overflowing(rank=0, element=SIZE - 1, clip=1.0),
    "first shard, adamw": overflowing(rank=1, element=0, optimizer="adamw"),
    "growing": growing,
}
GROWS = ("ddp", "deferred", "fsdp", "fsdp-coalesced", "zero0")  # where torch's scaler scales
CASES = [(name, scenario) for name in STRATEGIES for scenario in SCENARIOS if scenario != "growing" or name in GROWS]


def main() -> None:
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    launch = Launch(rank, rank, RANKS, RANKS, nodes=1, torchrun=True)
    world = World.open(launch, {}, request="cpu", store=dist.FileStore(sys.argv[2], RANKS), timeout_s=60)
    prepare_environment(world.device)
    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed asks whether matrix products are fast in fp16; there are none here, and all else works.
    get_accelerator().is_fp16_supported = lambda: True
    found = {(name, scenario): SCENARIOS[scenario](STRATEGIES[name], world) for name, scenario in CASES}
    everyone = world.gather(found)
    if rank == 0:
        torch.save(everyone, sys.argv[3])
    world.close()


if __name__ == "__main__":
    main()

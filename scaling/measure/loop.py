"""One optimizer step of a measured run, and what is noted of it without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scaling.engine import Engine
from scaling.measure.clock import Clock
from scaling.workload import Batch


@dataclass(frozen=True, slots=True)
class Noted:
    """One step of this rank. `loss`, `skipped` and the marks stay on the device until the window is over.

    `waits` holds a mark before and after each micro-batch was asked for. Between the two a device does nothing but wait
    for data, or for its copy; while it is still busy with what was queued before, nothing lies between them.
    """

    waits: list[tuple[Any, Any]]
    samples: int
    targets: int
    loss: Tensor
    skipped: Tensor | int  # steps skipped so far


class Slots:
    """One number per step on the device, in chunks of memory that stay where they are.

    A tensor per step would outlive the large ones that were freed around it: on a host the heap then grows with every
    step, and each step pays for it in page faults.
    """

    def __init__(self, chunk: int = 1024) -> None:
        self._chunk = chunk
        self._used = 0
        self._memory: Tensor | None = None

    def next(self, like: Tensor) -> Tensor:
        """A scalar, not initialised, on the device and of the type of `like`, which is the same for all."""
        if self._memory is None or self._used == self._chunk:
            self._memory, self._used = torch.empty(self._chunk, dtype=like.dtype, device=like.device), 0
        self._used += 1
        return self._memory[self._used - 1]


class TrainingLoop:
    """Takes micro-batches from the loader and trains on them; the same object warms up and is measured."""

    def __init__(self, engine: Engine, batches: Iterator[Batch], accumulation_steps: int, clock: Clock) -> None:
        self.engine = engine
        self.noted: list[Noted] = []
        self.shapes: set[tuple[torch.Size, ...]] = set()
        self._batches = batches
        self._accumulation_steps = accumulation_steps
        self._clock = clock
        self._losses = Slots()

    def step(self) -> None:
        """`accumulation_steps` micro-batches and one update."""
        waits: list[tuple[Any, Any]] = []
        samples, targets = 0, 0
        loss: Tensor | None = None
        for micro_step in range(1, self._accumulation_steps + 1):
            asked = self._clock.mark()
            batch = next(self._batches)
            waits.append((asked, self._clock.mark()))
            samples += batch.samples
            targets += batch.targets
            self.shapes.add(tuple(tensor.shape for tensor in batch.tensors.values()))
            share = self.engine.accumulate(batch, last=micro_step == self._accumulation_steps)
            if loss is None:
                loss = self._losses.next(share).copy_(share)
            else:
                loss.add_(share)
        self.engine.step()
        assert loss is not None
        self.noted.append(Noted(waits, samples, targets, loss, self.engine.skipped))

"""The timed window: equal blocks that hold nothing but training steps."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from scaling.config import MeasureConfig
from scaling.measure.clock import Clock
from scaling.measure.statistics import half_width


class Ranks(Protocol):
    """What the window needs of the world."""

    @property
    def rank(self) -> int: ...

    def publish(self, key: str, value: str) -> None: ...

    def read(self, key: str) -> str: ...

    def barrier(self) -> None: ...


@dataclass
class Window:
    """The marks of every block: one at its start and one after each step."""

    clock: Clock
    block_steps: int
    blocks: list[list[Any]] = field(default_factory=list)
    idle_before: list[bool] = field(default_factory=list)  # per block after the first: the device had run dry
    _finished: list[float] = field(default_factory=list)

    def seconds(self) -> list[list[float]]:
        """Per block the seconds of each step, of this rank. The device must have passed every mark."""
        return [[self.clock.seconds(start, end) for start, end in itertools.pairwise(marks)] for marks in self.blocks]

    def block_seconds(self, block: int) -> float:
        marks = self.blocks[block]
        return self.clock.seconds(marks[0], marks[-1])

    def finished(self) -> list[float]:
        """Seconds of every block but the one in flight; events are asked once, however many blocks there are."""
        self._finished += [self.block_seconds(block) for block in range(len(self._finished), len(self.blocks) - 1)]
        return self._finished

    @property
    def host_bound(self) -> bool:
        return self.clock.contiguous and any(self.idle_before)


@dataclass(frozen=True)
class Plan:
    """How long the window may get. `max_blocks` follows from measure.max_steps, None without it."""

    block_steps: int
    min_blocks: int
    max_blocks: int | None
    max_seconds: float
    target_ci: float

    @classmethod
    def of(cls, config: MeasureConfig, step_s: float) -> Plan:
        """The plan for steps of about `step_s` seconds (infinite: unknown); blocks get shorter where few would fit."""
        block_steps = config.block_steps
        if step_s > 0:
            block_steps = min(block_steps, int(config.max_seconds / (config.min_blocks + 1) / step_s))
        if config.max_steps is not None:
            block_steps = min(block_steps, max(1, config.max_steps // config.min_blocks))
        block_steps = max(1, block_steps)
        max_blocks = None if config.max_steps is None else config.max_steps // block_steps
        return cls(block_steps, config.min_blocks, max_blocks, config.max_seconds, config.target_ci)

    def wants(self, block: int, finished: list[float]) -> bool:
        """Whether block `block` shall run, known from the seconds of finished blocks; the one between is in flight."""
        if self.max_blocks is not None and block >= self.max_blocks:
            return False
        if not finished:
            return block <= 1
        mean = float(np.mean(finished))
        if sum(finished) + 2 * mean > self.max_seconds:  # the block in flight and the one asked for
            return False
        half = half_width(finished)
        tight = half is not None and half < self.target_ci * mean
        return not (tight and len(finished) >= self.min_blocks)


def run_window(
    step: Callable[[], None],
    clock: Clock,
    plan: Plan,
    ranks: Ranks,
    *,
    name: str = "window",
    observer: AbstractContextManager[object] | None = None,
    progress: Callable[[Window], None] = lambda window: None,
) -> Window:
    """Run blocks of `step` until the plan has enough; rank 0 decides from finished blocks, one block ahead.

    The host waits for the device twice: before the first block and after the last. Between blocks it waits for
    the end of the block before the one in flight, so that the device never runs dry while it decides. Each window of
    one world has a `name` of its own, under which rank 0 publishes. `observer` is entered and left while the device
    has nothing to do, as close to the first and the last step as can be.
    """
    window = Window(clock, plan.block_steps)
    with _no_garbage_collection(), _idle_at_both_ends(clock, observer or nullcontext()):
        ranks.barrier()
        start = clock.mark()
        while True:
            marks = [start]
            for _ in range(plan.block_steps):
                step()
                marks.append(clock.mark())
            window.blocks.append(marks)
            if not _another(window, plan, ranks, name):
                break
            progress(window)
            if clock.contiguous:
                start = marks[-1]
                window.idle_before.append(clock.passed(start))
            else:
                ranks.barrier()  # what rank 0 did in the gap is no other rank's step time
                start = clock.mark()
    return window


@contextmanager
def _idle_at_both_ends(clock: Clock, observer: AbstractContextManager[object]) -> Iterator[None]:
    clock.synchronize()
    with observer:
        yield
        clock.synchronize()


def _another(window: Window, plan: Plan, ranks: Ranks, name: str) -> bool:
    """Whether one more block follows; on rank 0 the decision, elsewhere rank 0's."""
    issued = len(window.blocks)
    if issued > 1:
        window.clock.wait(window.blocks[-2][-1])
    if ranks.rank != 0:
        return ranks.read(f"{name}/{issued}") == "run"
    goes_on = plan.wants(issued, window.finished())
    ranks.publish(f"{name}/{issued}", "run" if goes_on else "stop")
    return goes_on


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

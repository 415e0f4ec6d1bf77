"""The timed window on a fake device: what is waited for, when it stops, and who decides."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from scaling.config import MeasureConfig
from scaling.measure.clock import HostClock
from scaling.measure.loop import TrainingLoop
from scaling.measure.summary import rank_steps
from scaling.measure.window import Plan, Window, run_window
from scaling.measurement import Observation
from scaling.workload import Batch


@dataclass
class FakeDevice:
    """Work is queued in no time of the host's own; the device works it off one after another."""

    host: float = 0.0
    busy_until: float = 0.0
    synchronized: int = 0
    waits: list[float] = field(default_factory=list)
    contiguous: bool = True

    def enqueue(self, host_s: float, device_s: float) -> None:
        self.host += host_s
        self.busy_until = max(self.busy_until, self.host) + device_s

    def mark(self) -> float:
        return max(self.busy_until, self.host)

    def wait(self, mark: float) -> None:
        self.waits.append(mark)
        self.host = max(self.host, mark)

    def passed(self, mark: float) -> bool:
        return mark <= self.host

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        self.synchronized += 1
        self.host = max(self.host, self.busy_until)


@dataclass
class Alone:
    rank: int = 0
    decisions: dict[str, str] = field(default_factory=dict)
    barriers: int = 0

    def publish(self, key: str, value: str) -> None:
        self.decisions[key] = value

    def read(self, key: str) -> str:
        return self.decisions[key]

    def barrier(self) -> None:
        self.barriers += 1


def plan(**changes: float) -> Plan:
    config = MeasureConfig(**{"block_steps": 10, "min_blocks": 5, "max_seconds": 60.0, **changes})  # type: ignore[arg-type]
    return Plan.of(config, step_s=0.0)


def test_asynchronous_work_is_timed_to_its_end() -> None:
    device = FakeDevice()  # C06: enqueue returns after 1 ms, the work takes 100 ms
    window = run_window(lambda: device.enqueue(0.001, 0.1), device, plan(max_steps=10), Alone())
    total = sum(window.block_seconds(b) for b in range(len(window.blocks)))
    assert total == pytest.approx(1.0, rel=0.01)
    assert not window.host_bound


def test_the_device_is_synchronized_twice_and_never_inside() -> None:
    device = FakeDevice()  # C31
    run_window(lambda: device.enqueue(0.001, 0.1), device, plan(max_steps=100), Alone())
    assert device.synchronized == 2


def test_the_host_waits_for_a_block_only_while_the_next_is_in_flight() -> None:
    device = FakeDevice()
    window = run_window(lambda: device.enqueue(0.001, 0.1), device, plan(max_steps=100), Alone())
    ends = [marks[-1] for marks in window.blocks]
    assert device.waits == ends[:-1]
    assert not any(window.idle_before)


@pytest.mark.parametrize(("gap_s", "dry"), [(0.5, False), (1.5, True)])
def test_a_device_that_runs_dry_between_blocks_is_host_bound(gap_s: float, dry: bool) -> None:
    device = FakeDevice()  # a block keeps the device busy for 1 s after the host has issued it

    def progress(window: Window) -> None:
        device.host += gap_s

    window = run_window(lambda: device.enqueue(0.0, 0.1), device, plan(max_steps=50), Alone(), progress=progress)
    assert window.host_bound is dry


def test_blocks_on_a_device_are_contiguous() -> None:
    device = FakeDevice()
    window = run_window(lambda: device.enqueue(0.001, 0.1), device, plan(max_steps=50), Alone())
    assert [marks[0] for marks in window.blocks[1:]] == [marks[-1] for marks in window.blocks[:-1]]


def test_what_a_host_does_between_blocks_is_in_no_block() -> None:
    device = FakeDevice(contiguous=False)

    def progress(window: Window) -> None:
        device.host += 5.0

    ranks = Alone()
    window = run_window(lambda: device.enqueue(0.1, 0.0), device, plan(max_steps=50), ranks, progress=progress)
    assert [window.block_seconds(b) for b in range(5)] == pytest.approx([1.0] * 5)
    assert ranks.barriers == 5  # all ranks start a block together


def test_per_step_seconds_add_up_to_the_block() -> None:
    window = run_window(lambda: None, HostClock(), plan(max_steps=50), Alone())
    for block, seconds in enumerate(window.seconds()):
        assert sum(seconds) == pytest.approx(window.block_seconds(block))
        assert len(seconds) == window.block_steps


def test_garbage_collection_is_off_inside_and_back_on_after() -> None:
    seen: set[bool] = set()
    run_window(lambda: seen.add(gc.isenabled()), HostClock(), plan(max_steps=5), Alone())
    assert seen == {False}
    assert gc.isenabled()


@pytest.mark.parametrize(("max_steps", "expected"), [(1, 1), (3, 3), (5, 5), (25, 25), (50, 50), (57, 50), (100, 100)])
def test_max_steps_is_never_exceeded_and_obeyed_below_the_minimum(max_steps: int, expected: int) -> None:
    steps: list[int] = []
    device = FakeDevice(contiguous=False)
    step = iter(range(1000))

    def one() -> None:
        steps.append(next(step))
        device.enqueue(1.0 + steps[-1] % 7, 0.0)

    run_window(one, device, plan(max_steps=max_steps, max_seconds=1e9), Alone())
    assert len(steps) == expected


def test_stops_when_the_interval_is_tight_one_block_later() -> None:
    device = FakeDevice(contiguous=False)
    window = run_window(lambda: device.enqueue(0.01, 0.0), device, plan(), Alone())
    assert len(window.blocks) == 6  # five finished blocks agree; the sixth was in flight when that was known


def test_stops_before_a_block_that_would_overrun_the_time_limit() -> None:
    device = FakeDevice(contiguous=False)
    durations = iter([0.1 + 0.05 * (i % 11) for i in range(10_000)])
    window = run_window(
        lambda: device.enqueue(next(durations), 0.0), device, plan(max_seconds=20.0, target_ci=1e-9), Alone()
    )
    total = sum(window.block_seconds(b) for b in range(len(window.blocks)))
    assert 14.0 < total < 21.0


def test_slow_steps_get_shorter_blocks() -> None:
    config = MeasureConfig(block_steps=10, min_blocks=5, max_seconds=60.0)
    assert Plan.of(config, step_s=0.05).block_steps == 10
    assert Plan.of(config, step_s=2.0).block_steps == 5  # one block more than the minimum fits
    assert Plan.of(config, step_s=100.0).block_steps == 1
    assert Plan.of(config, step_s=float("inf")).block_steps == 1  # no warm-up: nothing is known


def test_the_other_ranks_do_what_rank_0_decided() -> None:
    leader, device = Alone(), FakeDevice(contiguous=False)
    led = run_window(lambda: device.enqueue(0.01, 0.0), device, plan(), leader)
    follower = Alone(rank=1, decisions=dict(leader.decisions))
    noisy = FakeDevice(contiguous=False)
    durations = iter([0.01 * (1 + i % 13) for i in range(10_000)])
    followed = run_window(lambda: noisy.enqueue(next(durations), 0.0), noisy, plan(), follower)
    assert len(followed.blocks) == len(led.blocks)


def test_a_decision_rests_on_blocks_before_the_one_in_flight() -> None:
    few = plan(max_seconds=1e9)
    assert few.wants(1, [])
    assert few.wants(5, [1.0] * 4)  # four finished, one in flight: the minimum is five finished
    assert not few.wants(6, [1.0] * 5)
    assert few.wants(6, [1.0, 1.2, 0.8, 1.1, 0.9])  # ± 20 %


def test_an_observer_is_there_while_the_device_works_and_no_longer() -> None:
    device, seen = FakeDevice(), []

    class Observer:
        def __enter__(self) -> None:
            seen.append((device.busy_until <= device.host, ranks.barriers, steps))

        def __exit__(self, *_: object) -> None:
            seen.append((device.busy_until <= device.host, ranks.barriers, steps))

    ranks, steps = Alone(), 0

    def step() -> None:
        nonlocal steps
        steps += 1
        device.enqueue(0.001, 0.1)

    device.enqueue(0.001, 5.0)  # warm-up is still running
    run_window(
        step, device, Plan.of(MeasureConfig(max_steps=4, block_steps=2, min_blocks=2), 0.1), ranks, observer=Observer()
    )
    assert seen == [(True, 0, 0), (True, 1, 4)]  # entered before the ranks meet, left when all is done
    assert device.synchronized == 2


def test_an_observation_is_what_the_sampler_saw_between_start_and_stop() -> None:
    calls = []

    class Fake:
        def start(self) -> None:
            calls.append("start")

        def stop(self) -> str:
            calls.append("stop")
            return "seen"

    sampler: Any = Fake()
    observation = Observation(sampler, host=False)
    assert observation.telemetry is None
    with observation:
        assert calls == ["start"]
    assert calls == ["start", "stop"]
    assert str(observation.telemetry) == "seen"
    assert observation.shares is None
    with Observation(None, host=True) as nothing:
        assert nothing is None


def test_a_device_waits_for_data_only_when_it_has_nothing_left_to_do() -> None:
    device = FakeDevice()

    class Engine:
        skipped = 0

        def accumulate(self, batch: Batch, *, last: bool) -> torch.Tensor:
            device.enqueue(0.001, 0.100)
            return torch.tensor(1.0)

        def step(self) -> None: ...

    def batches(seconds: list[float]) -> Iterator[Batch]:
        for host_s in seconds:
            device.host += host_s  # the host waits for the loader
            yield Batch({"x": torch.zeros(1, 1)}, samples=1, targets=1, step_targets=1)

    engine, clock = cast(Any, Engine()), cast(Any, device)
    loop = TrainingLoop(engine, batches([0.5, 0.05, 0.05, 0.4]), 1, clock)
    for _ in range(4):
        loop.step()
    waits = [step.data_wait_s for step in rank_steps([1.0] * 4, loop.noted, clock)]
    # The first batch finds an idle device; the next two come while it is busy. Three steps keep it busy until 0.501
    # + 3 x 0.1 = 0.801 s; the fourth batch is there when the host has spent 0.5 + 0.05 + 0.05 + 0.4 + 3 x 0.001 s.
    assert waits == pytest.approx([0.5, 0.0, 0.0, 1.003 - 0.801])


def test_finished_blocks_are_asked_for_once() -> None:
    asked, sums = [], []

    class Clock(FakeDevice):
        def seconds(self, start: float, end: float) -> float:
            asked.append((start, end))
            return end - start

    clock = Clock()
    run_window(
        lambda: clock.enqueue(0.001, 0.1),
        clock,
        Plan.of(MeasureConfig(max_steps=40, block_steps=1, min_blocks=2, target_ci=1e-9), 0.1),
        Alone(),
        progress=lambda window: sums.append(sum(window.finished())),
    )
    assert len(asked) == 39  # not 39 x 38 / 2
    assert sums == pytest.approx([0.0] + [0.001 + 0.1 * block for block in range(1, 39)])

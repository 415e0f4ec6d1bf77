"""What the suite itself costs: its own work per step, and its loop against a bare DDP loop (`make bench`).

The bare loop and the suite's run in the same processes and take turns step by step, so that what the machine does
meanwhile hits both; a second bare loop beside them shows what this run cannot tell apart. The interval is the claim.
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import json
import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import hydra
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scaling.config import MeasureConfig, TrainConfig, conf_dir, register_schemas, validate
from scaling.engine import Engine, Held, make_engine
from scaling.hardware import cores
from scaling.measure.clock import HostClock
from scaling.measure.loop import TrainingLoop
from scaling.measure.window import Plan, Window, run_window
from scaling.measurement import show_block
from scaling.ranks import Launch
from scaling.reporting.progress import Progress
from scaling.workload import Loss, Workload, build
from scaling.workload.loader import Place, Source, open_source
from scaling.world import World

Seconds = NDArray[np.float64]

CONFIDENCE = 0.95
OWN_SHARE = 0.005  # the claim: the suite's own work is at most this part of a step
WARMUP_STEPS = 10
COMPARED_STEPS = 3  # in these every loop must have the same loss, to a relative
SAME_LOSS = 1e-5
FEWEST = 60  # rounds before the interval may end the comparison: it is looked at again and again
ARMS = ("suite", "bare", "bare again")
ROUNDS = math.factorial(len(ARMS))  # between two looks at the result: every order of the arms once


@dataclass(frozen=True)
class Estimate:
    """A median and its distribution-free interval; no ends where there are too few values for one."""

    median: float
    low: float | None
    high: float | None
    n: int

    @property
    def half_width(self) -> float:
        return math.inf if self.low is None or self.high is None else (self.high - self.low) / 2

    def holds(self, value: float) -> bool | None:
        """Whether the interval holds `value`; None without an interval."""
        return None if self.low is None or self.high is None else self.low <= value <= self.high


def estimate(values: Sequence[float] | Seconds) -> Estimate:
    """The interval from the order statistics x(l) and x(n+1-l), l the largest with P(Binomial(n, 1/2) < l) <= 2.5 %.

    Conover, Practical Nonparametric Statistics, 3rd edition, 3.2. Six values are the fewest that have one.
    """
    from scipy import stats

    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = len(ordered)
    rank = int(stats.binom.ppf((1 - CONFIDENCE) / 2, n, 0.5))  # from 1
    low, high = (float(ordered[rank - 1]), float(ordered[n - rank])) if rank else (None, None)
    return Estimate(float(np.median(ordered)), low, high, n)


def every_order(arms: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Every order of the arms once, shuffled: each arm comes equally often at each place and before each other one."""
    orders = list(itertools.permutations(range(arms)))
    rng.shuffle(orders)
    return orders


def slowest(ranks: Sequence[Sequence[Sequence[float]]]) -> Seconds:
    """[arms, rounds] from [ranks, arms, rounds]: a step lasts as long as its slowest rank."""
    steps: Seconds = np.asarray(ranks, dtype=np.float64).max(axis=0)
    return steps


class Nothing:
    """An engine whose step costs nothing: what is left is the suite's own."""

    parameter_dtype = weight_dtype = torch.float32
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    settings: dict[str, Any] | None = None

    def __init__(self) -> None:
        self.module: nn.Module = nn.Identity()
        self.loss: Loss = lambda module, tensors: (self._share, 1)
        self.skipped: Tensor | int = 0
        self._share = torch.zeros(())

    def accumulate(self, batch: object, *, last: bool) -> Tensor:
        del batch, last
        return self._share

    def step(self) -> None: ...

    def held(self) -> Held:
        return Held([], [], [], [])


class BareLoop:
    """The DDP loop that one writes by hand; nothing in it is the suite's but the model it is given."""

    def __init__(self, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], accumulation: int, lr: float):
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        self.batches = itertools.cycle(batches)
        self.accumulation = accumulation
        self.loss = torch.zeros(())  # of the last step, this rank's mean

    def step(self) -> None:
        self.loss.zero_()
        for micro_step in range(self.accumulation):
            inputs, targets = next(self.batches)
            with nullcontext() if micro_step == self.accumulation - 1 else self.ddp.no_sync():
                logits = self.ddp(input_ids=inputs).logits
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / self.accumulation
                loss.backward()
            self.loss += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class SuiteLoop:
    """The suite's loop, with the mark that the timed window sets after every step."""

    def __init__(self, loop: TrainingLoop) -> None:
        self.loop = loop
        self.clock = HostClock()
        self.marks = [self.clock.mark()]

    def step(self) -> None:
        self.loop.step()
        self.marks.append(self.clock.mark())


@dataclass(frozen=True)
class OwnWork:
    """Microseconds of the suite's own per step, and between two blocks, which is in no step's time."""

    accumulation_steps: int
    step_us: Estimate
    between_blocks_us: Estimate
    model_step_ms: Estimate
    share: float  # of the model's step


@dataclass(frozen=True)
class Result:
    """What one call of this program measured."""

    device_name: str
    torch: str
    load_before: float  # runnable tasks on this host in the minute before
    world_size: int
    own_work: list[OwnWork]
    between_blocks_us: Estimate  # of the whole world; those in `own_work` are of a world of one
    micro_batch_size: int
    accumulation_steps: int
    bare_step_ms: Estimate
    suite_to_bare: Estimate
    bare_to_bare: Estimate
    target: float
    seconds: float
    step_s: dict[str, list[float]]  # every step of each arm, in the order of the rounds


class Terminal(io.StringIO):
    """Takes the progress line as a terminal would, every time."""

    def isatty(self) -> bool:
        return True


def gpt_tiny(strategy: str, accumulation: int, world_size: int, micro_batch: int | None = None) -> TrainConfig:
    """The config of `model=gpt_tiny strategy=... batch.accumulation_steps=... batch.micro_batch_size=...`."""
    register_schemas()
    overrides = ["model=gpt_tiny", f"strategy={strategy}", f"batch.accumulation_steps={accumulation}", "device=cpu"]
    if micro_batch is not None:
        overrides.append(f"batch.micro_batch_size={micro_batch}")
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = OmegaConf.to_object(hydra.compose("train", overrides))
    assert isinstance(config, TrainConfig)
    return validate(config, world_size)


def make_source(config: TrainConfig, workload: Workload, world: World) -> Source:
    place = Place(world.rank, world.size, world.device, cores=[])
    return open_source(config.data, config.batch, workload, config.seed, place)


def window_of(engine: Engine, source: Source, accumulation: int, world: World, max_steps: int) -> Window:
    """A timed window as the suite runs it, progress line included."""
    loop = TrainingLoop(engine, source.batches, accumulation, HostClock())
    plan = Plan.of(MeasureConfig(max_steps=max_steps, target_ci=1e-12), step_s=0.0)
    progress = Progress(Terminal(), enabled=world.rank == 0)
    for _ in range(3):
        loop.step()
    return run_window(loop.step, HostClock(), plan, world, progress=lambda w: show_block(progress, w, plan, 1))


def per_step(window: Window, scale: float) -> Estimate:
    return estimate([scale * window.block_seconds(b) / window.block_steps for b in range(len(window.blocks))])


def between_blocks(window: Window) -> Estimate:
    """Microseconds from the last mark of a block to the first of the next: decision, progress line, barrier."""
    return estimate([1e6 * (after[0] - before[-1]) for before, after in itertools.pairwise(window.blocks)])


def measure_own_work(world: World, accumulation: int) -> OwnWork:
    """On one rank of a world of one, the others idle."""
    config = gpt_tiny("single", accumulation, world_size=1)
    workload = build(config.model, world.device, config.seed)
    source = make_source(config, workload, world)
    empty = window_of(Nothing(), source, accumulation, world, max_steps=1000)
    engine = make_engine(config, workload, world.device, world_size=1)
    real = window_of(engine, source, accumulation, world, max_steps=10)
    own, step = per_step(empty, 1e6), per_step(real, 1e3)
    return OwnWork(accumulation, own, between_blocks(empty), step, own.median / (step.median * 1e3))


def make_arms(world: World, accumulation: int, micro_batch: int | None) -> tuple[SuiteLoop, BareLoop, BareLoop]:
    """Three loops that train the same model on the same batches, each its own copy of the weights."""
    config = gpt_tiny("ddp", accumulation, world.size, micro_batch)
    workloads = [build(config.model, world.device, config.seed) for _ in ARMS]
    source = make_source(config, workloads[0], world)
    ours = make_engine(config, workloads[0], world.device, world.size)
    suite = SuiteLoop(TrainingLoop(ours, source.batches, accumulation, HostClock()))
    again = make_source(config, workloads[0], world).batches  # the same batches from their start
    tensors = [next(again).tensors for _ in range(config.data.batches)]  # type: ignore[attr-defined]
    pairs = [(t["inputs"], t["targets"]) for t in tensors]
    bare = [BareLoop(workload.module, pairs, accumulation, config.optimizer.lr) for workload in workloads[1:]]
    return suite, bare[0], bare[1]


def check_losses(suite: Sequence[float], bare: Sequence[float]) -> None:
    """Raise ValueError unless both loops had the same loss in each step."""
    for step, (ours, theirs) in enumerate(zip(suite, bare, strict=True)):
        if not abs(ours - theirs) <= SAME_LOSS * abs(theirs):
            raise ValueError(
                f"step {step}: the suite's loss is {ours:.7g}, the bare loop's {theirs:.7g}: "
                "they do not train the same, and their times are no comparison"
            )


def warm_up(world: World, arms: tuple[SuiteLoop, BareLoop, BareLoop]) -> None:
    suite, *bare = arms
    losses: list[list[float]] = [[] for _ in bare]
    for _ in range(WARMUP_STEPS):
        suite.step()
        for loop, seen in zip(bare, losses, strict=True):
            loop.step()
            seen.append(float(loop.loss))
    # The engine's loss is sum / step_targets: this rank's share of the job's mean.
    ours = [float(noted.loss) * world.size for noted in suite.loop.noted[:COMPARED_STEPS]]
    for seen in losses:
        check_losses(ours, seen[:COMPARED_STEPS])


def take_turns(
    world: World, steps: Sequence[Callable[[], None]], goes_on: Callable[[Seconds, float], bool], seed: int
) -> tuple[Seconds, float]:
    """Seconds of the slowest rank, [arms, rounds], and of the whole; `goes_on` sees them after every `ROUNDS` rounds.

    The ranks meet before every step, outside its time: a rank that is late out of one arm's step must not make the
    other rank wait in another arm's.
    """
    rng = random.Random(seed)  # the same order on every rank
    times: Seconds = np.empty((len(steps), 0))
    gc.collect()
    gc.disable()  # as in the suite's window; a collection would hit whichever arm comes next
    started = perf_counter()
    while True:
        new: list[list[float]] = [[] for _ in steps]
        for order in every_order(len(steps), rng):
            for arm in order:
                step = steps[arm]
                world.barrier()
                start = perf_counter()
                step()
                end = perf_counter()
                new[arm].append(end - start)
        clocks, ranks = zip(*world.gather((perf_counter() - started, new)), strict=True)
        times = np.concatenate([times, slowest(ranks)], axis=1)
        if not goes_on(times, clocks[0]):
            gc.enable()
            return times, clocks[0]


def compare(world: World, options: argparse.Namespace, progress: Progress) -> tuple[Seconds, float]:
    """Let the arms take turns until the interval of suite / bare is narrow enough, or time or steps are over."""
    arms = make_arms(world, options.accumulation, options.micro_batch)
    warm_up(world, arms)

    def goes_on(times: Seconds, elapsed: float) -> bool:
        suite, bare, _ = times
        ratio = estimate(suite / bare)
        progress.update(
            f"{ratio.n} steps of each loop  suite/bare {ratio.median:.4f} ±{ratio.half_width:.2%} "
            f"(target {options.target:.2%})  {elapsed:.0f} of at most {options.limit:.0f} s"
        )
        narrow = ratio.n >= FEWEST and ratio.half_width < options.target
        full = options.steps is not None and ratio.n >= options.steps
        return not (narrow or full or elapsed >= options.limit)

    return take_turns(world, [arm.step for arm in arms], goes_on, options.seed)


def measure(world: World, options: argparse.Namespace, load_before: float) -> Result:
    """Everything, on every rank; the result is the same on all but for what rank 0 measured alone."""
    progress = Progress(enabled=world.rank == 0)
    own = []
    if world.rank == 0:
        alone = World(Launch(0, 0, 1, 1, 1, False), world.device, world.members[:1], dist.HashStore())
        for accumulation in (1, 4):
            progress.update(f"the suite's own work per step, accumulation {accumulation}")
            own.append(measure_own_work(alone, accumulation))
    world.barrier()
    config = gpt_tiny("ddp", 1, world.size)
    source = make_source(config, build(config.model, world.device, config.seed), world)
    together = window_of(Nothing(), source, 1, world, max_steps=1000)
    times, seconds = compare(world, options, progress)
    suite, bare, again = times
    progress.clear()
    return Result(
        device_name=str(world.members[0].device_name),
        torch=torch.__version__,
        load_before=load_before,
        world_size=world.size,
        own_work=own,
        between_blocks_us=between_blocks(together),
        micro_batch_size=gpt_tiny("ddp", options.accumulation, world.size, options.micro_batch).batch.sizes[0],
        accumulation_steps=options.accumulation,
        bare_step_ms=estimate(1e3 * bare),
        suite_to_bare=estimate(suite / bare),
        bare_to_bare=estimate(again / bare),
        target=options.target,
        seconds=seconds,
        step_s=dict(zip(ARMS, times.tolist(), strict=True)),
    )


def describe(result: Result) -> str:
    """The result as people read it."""
    world = f"{result.world_size} rank{'s' if result.world_size > 1 else ''}"
    lines = [
        f"gpt_tiny on {world} of {result.device_name}, a core and a thread each, torch {result.torch}; "
        f"load before: {result.load_before:.2f}",
        "",
        "(a) The suite's own work per step, with an engine whose step costs nothing, in a world of one",
        "    accumulation   own work us [95 % interval]   gpt_tiny step ms     share   between blocks us",
    ]
    for own in result.own_work:
        lines.append(
            f"    {own.accumulation_steps:<12}   {_interval(own.step_us, '.2f'):<27}   {own.model_step_ms.median:16.2f}"
            f"   {own.share:7.4%}   {_interval(own.between_blocks_us, '.0f')}"
        )
    most = max(own.share for own in result.own_work)
    lines += [
        f"    Between blocks means decision, progress line and barrier: in no step's time. In a world of "
        f"{result.world_size}: {_interval(result.between_blocks_us, '.0f')} us.",
        f"    Claimed: at most {OWN_SHARE:.1%} of a step. Measured: {most:.4%}, {_holds(most <= OWN_SHARE)}.",
        "",
        f"(b) A step of the suite's loop against a bare DDP loop's, taking turns; slowest of {world}, "
        f"micro-batch {result.micro_batch_size}, accumulation {result.accumulation_steps}",
        "    pair           median ratio [95 % interval]   half-width      n",
    ]
    pairs = {"suite / bare": result.suite_to_bare, "bare / bare": result.bare_to_bare}
    for name, ratio in pairs.items():
        lines.append(f"    {name:<12}   {_interval(ratio, '.4f'):<28}   {ratio.half_width:10.2%}   {ratio.n:4}")
    lines.append(f"    A bare step: {_interval(result.bare_step_ms, '.2f')} ms. {_ended(result)}")
    lines += [f"    {_verdict(name, ratio)}" for name, ratio in pairs.items()]
    return "\n".join(lines)


def _interval(value: Estimate, form: str) -> str:
    ends = "no interval" if value.low is None else f"{value.low:{form}}, {value.high:{form}}"
    return f"{value.median:{form}} [{ends}]"


def _holds(claim: bool) -> str:
    return "the claim holds" if claim else "the claim does NOT hold"


def _ended(result: Result) -> str:
    reached = result.suite_to_bare.half_width < result.target
    how = "reached" if reached else "NOT reached: the time or the steps were over first"
    return f"Took {result.seconds:.0f} s; the target of ±{result.target:.2%} was {how}."


def _verdict(pair: str, ratio: Estimate) -> str:
    holds = ratio.holds(1.0)
    if holds is None:
        return f"{pair}: too few steps for an interval."
    if holds:
        return f"{pair}: the interval holds 1.00; a difference above {_farthest(ratio):.2%} is ruled out."
    return f"{pair}: the interval does NOT hold 1.00; the difference is {ratio.median - 1:+.2%}."


def _farthest(ratio: Estimate) -> float:
    assert ratio.low is not None and ratio.high is not None
    return max(1 - ratio.low, ratio.high - 1)


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    def positive(text: str) -> float:
        value = float(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: must be greater than 0")
        return value

    def count(text: str) -> int:
        value = int(text)
        if value < 1:
            raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
        return value

    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="overhead.py", description=lines[0], epilog=" ".join(lines[2:]))
    parser.add_argument("--nproc", type=count, default=2, help="ranks on this host, a core each (2)")
    parser.add_argument("--limit", type=positive, default=300.0, help="seconds that the loops may take turns (300)")
    parser.add_argument("--target", type=positive, default=0.005, help="half-width of the interval to stop at (0.005)")
    parser.add_argument("--steps", type=count, help=f"stop after so many steps of each loop, in {ROUNDS}s (no limit)")
    parser.add_argument("--accumulation", type=count, default=1, help="micro-steps per step of the two loops (1)")
    parser.add_argument("--micro-batch", type=count, help="samples per micro-step of the two loops (the model's own)")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which the loops take turns (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here, too")
    options = parser.parse_args(argv)
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"--json {options.json}: no such folder")
    return options


def main(argv: Sequence[str]) -> int:
    """Start this file under torchrun; there, measure. Returns 0 whenever it measured, whatever came out."""
    options = parse_options(argv)
    launch = Launch.from_env(os.environ)
    if not launch.torchrun:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.nproc}"]
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # what each rank sets itself; torchrun warns without
        os.execv(sys.executable, [*torchrun, "--", __file__, *argv])  # it takes prefixes of its flags for its own
    load_before = os.getloadavg()[0]
    _, crowded = cores.bind(launch.local_rank, launch.local_world_size, threads=1, own_cores=True)
    settings = {name: str(value) for name, value in vars(options).items()}
    world = World.open(launch, settings, request="cpu")
    result = measure(world, options, load_before)
    if world.rank == 0:
        print(describe(result))
        if crowded:
            print(f"    There are fewer cores than {world.size}: the ranks took turns, and times say little.")
        if options.json is not None:
            options.json.write_text(json.dumps(asdict(result), indent=2, allow_nan=False) + "\n")
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""TFLOPS, MFU, HFU and the share of the measured rate, by hand; trap C20."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import model

from scaling import measurement
from scaling.config import BatchConfig, DDPConfig, SingleConfig, TrainConfig
from scaling.measure import agreement
from scaling.measure.collectives import Collective, StepCount
from scaling.measure.layout import Layout, Weight
from scaling.measure.matmul import Rate
from scaling.measure.statistics import summarise
from scaling.measure.summary import Facts, Limits, compose
from scaling.measure.volume import Volume, expected_volume
from scaling.results.record import Memory, Step, Summary, Telemetry
from scaling.workload import build

H100 = "NVIDIA H100 80GB HBM3"


def telemetry(energy_j: float | None, sm_clock_mhz: float | None, device: str = "GPU-a") -> Telemetry:
    return Telemetry(device, 4, energy_j, sm_clock_mhz, None, None, None, None, None, None, None, None)


def composed(limits: Limits, watched: list[Telemetry | None], **changes: Any) -> Summary:
    """Two devices, four steps of half a second on average, a PFLOP (1e15) per step of the whole job."""
    config = TrainConfig(model=model("resnet_tiny"), strategy=SingleConfig(), batch=BatchConfig(1, 1, 2))
    config.precision.name, config.tracking.name, config.data.name = "bf16", "off", "synthetic"
    steps = [
        Step(i, False, i // 2, [seconds, 0.3], [0.0, 0.0], samples=2, target_tokens=None, loss=1.0, skipped=False)
        for i, seconds in enumerate((0.4, 0.4, 0.4, 0.8))  # a median would say 0.4
    ]
    facts = Facts(
        run_id="run",
        data="synthetic",
        block_steps=2,
        flops_per_step=10**15,
        hardware_flops_per_step=10**15,
        limits=limits,
        telemetry=watched,
        disturbed_s=0.25,
        peak_memory=Memory(1.0, 2.0, "device"),
        count=StepCount(2, [[], []]),
        volume=Volume(1, {}),
        memory_terms=None,
        textbook={},
        gradients_reduced=None,
        parameters_agree=None,
        threads=1,
        cores_per_rank=None,
        flags=[],
    )
    world: Any = type("W", (), {"size": 2, "members": [type("M", (), {"device_name": H100})], "launch": None})
    world.launch = type("L", (), {"nodes": 1})
    workload = build(config.model, "meta", 0)
    types = {"parameter_dtype": torch.float32, "gather_dtype": None, "reduce_dtype": torch.float32}
    engine: Any = type("E", (), {"module": workload.module, "settings": None, "skipped": 0, **types})
    timing = summarise(steps, None)
    return compose(config, world, workload, engine, parameters=7, timing=timing, facts=replace(facts, **changes))


def test_utilisation_by_hand() -> None:
    s = composed(Limits.of({H100}, "bf16", matmul=2e15), [None, None], hardware_flops_per_step=1_200_000_000_000_000)
    assert s.tflops_per_device == pytest.approx(1000)  # 1e15 / 0.5 s / 2 devices / 1e12
    assert s.mfu == pytest.approx(1000 / 989)  # above 1, and flagged by the report
    assert s.hfu == pytest.approx(1200 / 989)
    assert s.peak_tflops == 989
    assert (s.peak_source or "").startswith("https://")
    assert s.matmul_tflops == 2000
    assert s.matmul_share == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("names", "precision"),
    [
        ({"NVIDIA H100"}, "bf16"),  # C20: half a name is no name
        ({"Some Card 9000"}, "bf16"),
        ({"NVIDIA A100-SXM4-80GB MIG 1g.10gb"}, "bf16"),
        ({"Tesla V100-SXM2-16GB"}, "tf32"),
        ({H100, "NVIDIA H100 PCIe"}, "bf16"),  # a mixed host: neither card's peak is the job's
        ({""}, "bf16"),
    ],
)
def test_without_one_known_device_there_is_no_mfu(names: set[str], precision: str) -> None:
    limits = Limits.of(names, precision, matmul=None)
    assert limits == Limits(None, None, None)
    s = composed(limits, [None, None])
    assert s.tflops_per_device == pytest.approx(1000)
    assert [s.mfu, s.hfu, s.peak_tflops, s.peak_source, s.matmul_tflops, s.matmul_share] == [None] * 6


def test_flops_that_are_not_known_have_no_rate() -> None:
    s = composed(Limits.of({H100}, "bf16", 1e15), [None, None], flops_per_step=None, hardware_flops_per_step=None)
    assert [s.tflops_per_device, s.mfu, s.hfu, s.matmul_share] == [None] * 4
    assert s.peak_tflops == 989  # what it would be divided by is known all the same


def test_energy_is_of_all_devices_and_the_clock_of_the_slowest() -> None:
    limits = Limits(None, None, None)
    s = composed(limits, [telemetry(100.0, 1900.0), telemetry(150.0, 1700.0, "GPU-b")])
    assert (s.energy_j, s.clock_mhz) == (250.0, 1700.0)
    assert s.telemetry is not None and len(s.telemetry) == 2
    missing = composed(limits, [telemetry(100.0, 1900.0), None])
    assert (missing.energy_j, missing.clock_mhz) == (None, None)
    assert missing.telemetry is not None and missing.telemetry[1] is None
    assert composed(limits, [None, None]).telemetry is None


@pytest.mark.parametrize(
    ("rates", "least"), [([3e12, 1e12, 2e12], 1e12), ([3e12, None, 2e12], None), ([None, None, None], None)]
)
def test_the_slowest_device_is_what_a_job_is_held_to(
    rates: list[float | None], least: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def rate(*arguments: Any) -> Rate:
        asked.append(arguments[-1])
        return Rate(3e12, 1024, "2026-11-30")

    monkeypatch.setattr(measurement, "matmul_rate", rate)
    config = TrainConfig()
    config.precision.name = "bf16"
    member = SimpleNamespace(device_name=H100)
    world = SimpleNamespace(device=torch.device("cpu"), members=[member] * 3, gather=lambda mine: rates)
    setup: Any = SimpleNamespace(config=config, world=world, progress=SimpleNamespace(update=lambda text: None))
    job: Any = SimpleNamespace(clock=None)
    capped = replace(telemetry(1.0, 1.0), power_limit_w=350.0)
    limits = measurement._limits(setup, job, capped)
    assert (limits.matmul, limits.peak) == (least, 989e12)
    assert asked[0]["power_limit_w"] == 350.0 and "driver" in asked[0]
    config.measure.matmul_rate = False
    measurement._limits(setup, job, None)
    assert len(asked) == 1


def test_a_counted_step_that_does_not_fit_loses_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> StepCount:
        raise torch.OutOfMemoryError("uncompiled it does not fit")

    monkeypatch.setattr(measurement, "count_step", full)
    monkeypatch.setattr(measurement, "memory_terms", full)
    config = TrainConfig(strategy=DDPConfig(), batch=BatchConfig(1, 1, 1))
    engine = SimpleNamespace(reduce_dtype=None, gather_dtype=None, module=torch.nn.Linear(1, 1))
    job: Any = SimpleNamespace(engine=engine, layout=Layout([]), source=SimpleNamespace(batches=iter(())))
    for size in (1, 2):
        world: Any = SimpleNamespace(size=size, device=None, gather=lambda mine, size=size: [mine] * size)
        checked = measurement._check(job, config, world)
        assert (checked.count, checked.memory, checked.gradients_reduced) == (None, None, None)
        assert checked.parameters_agree is (None if size == 1 else True)
    s = composed(Limits(None, None, None), [None, None], count=None)
    assert [s.syncs_per_step, s.comm_bytes_per_step, s.host_syncs_per_step] == [None] * 3


def test_parameters_without_gradient_are_noted_beside_what_was_expected() -> None:
    engine: Any = SimpleNamespace(reduce_dtype=torch.float32, gather_dtype=None, settings=None)
    layout = Layout([Weight(5, 5, 1, None), Weight(2, 2, 1, None)])
    config = TrainConfig(strategy=DDPConfig(), batch=BatchConfig(1, 1, 2))
    facts: dict[str, Any] = {"volume": replace(expected_volume(config, engine, layout, 2), notes=["it is small"])}
    nothing = Limits(None, None, None)
    for gradients, said in {5: ["2 parameters got no gradient: what is sent for these is not computed"], 7: []}.items():
        count = StepCount(2, [[], []], gradient_elements=gradients)
        assert composed(nothing, [None, None], count=count, **facts).comm_notes == ["it is small", *said]
    assert composed(nothing, [None, None], count=None, **facts).comm_notes == ["it is small"]
    assert composed(nothing, [None, None], volume=Volume(1, {})).comm_notes is None


@pytest.mark.parametrize(
    ("settings", "raised"),
    [
        (None, []),  # of a strategy that is not DeepSpeed's
        ({}, []),
        ({"wall_clock_breakdown": True}, ["sync_each_step"]),
        ({"memory_breakdown": True}, ["sync_each_step"]),
        ({"comms_logger": {"enabled": True}}, ["sync_each_step"]),
        ({"flops_profiler": {"enabled": True}}, ["profiled"]),
        ({"comms_logger": {"enabled": False}, "flops_profiler": {}, "wall_clock_breakdown": False}, []),
        ({"comms_logger": {"enabled": True}, "flops_profiler": {"enabled": True}}, ["sync_each_step", "profiled"]),
    ],
)
def test_what_a_users_file_does_to_the_window_raises_a_flag(settings: dict[str, Any] | None, raised: list[str]) -> None:
    engine = SimpleNamespace(settings=settings)
    job: Any = SimpleNamespace(engine=engine, oversubscribed=False, loop=SimpleNamespace(shapes=set()))
    world: Any = SimpleNamespace(gather=lambda mine: [mine], members=[SimpleNamespace(device_name=H100)])
    window: Any = SimpleNamespace(host_bound=False)
    checked = measurement.Checked(Volume(0, {}), StepCount(1, [[], []]), None, None, None)
    assert measurement._flags(job, TrainConfig(), world, window, checked) == raised


@pytest.mark.parametrize(
    ("elements", "raised"), [(100, []), (101, ["unexpected_communication"]), (0, ["unexpected_communication"])]
)
def test_what_is_not_sent_as_computed_raises_a_flag(elements: int, raised: list[str]) -> None:
    job: Any = SimpleNamespace(
        engine=SimpleNamespace(settings=None), oversubscribed=False, loop=SimpleNamespace(shapes=set())
    )
    world: Any = SimpleNamespace(gather=lambda mine: [mine], members=[SimpleNamespace(device_name=H100)])
    window: Any = SimpleNamespace(host_bound=False)
    sent = [Collective("all_reduce", 4 * elements, elements)] if elements else []
    volume = Volume(1, {"all_reduce": 400.0})  # 100 x 4 bytes, once, between 2 ranks
    checked = measurement.Checked(volume, StepCount(2, [sent, []]), None, True, True)
    assert measurement._flags(job, TrainConfig(), world, window, checked) == raised


def test_a_rank_that_sends_less_than_the_others_is_the_one_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def sending(elements: int) -> StepCount:
        return StepCount(2, [[Collective("all_reduce", 4 * elements, elements)], []], gradient_elements=100)

    monkeypatch.setattr(measurement, "count_step", lambda *_: sending(100))
    monkeypatch.setattr(measurement, "memory_terms", lambda *_: None)
    monkeypatch.setattr(measurement, "expected_volume", lambda *_: Volume(1, {"all_reduce": 400.0}))
    monkeypatch.setattr(agreement, "disagreeing", lambda _: [])
    engine = SimpleNamespace(reduce_dtype=None, gather_dtype=None, module=torch.nn.Linear(1, 1))
    job: Any = SimpleNamespace(engine=engine, layout=Layout([]), source=SimpleNamespace(batches=iter(())))
    for other in (100, 60):

        def gather(mine: Any, other: int = other) -> list[Any]:
            return [mine, sending(other) if isinstance(mine, StepCount) else mine]

        world: Any = SimpleNamespace(size=2, device=None, gather=gather)
        checked = measurement._check(job, TrainConfig(strategy=DDPConfig(), batch=BatchConfig(1, 1, 1)), world)
        assert checked.count is not None and checked.count.bytes == {"all_reduce": 4.0 * other}
        assert checked.volume.holds(checked.count) is (other == 100)

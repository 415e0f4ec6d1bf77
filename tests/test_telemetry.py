"""What a device's driver tells about the window, against a fake NVML with the real names and exceptions."""

# ruff: noqa: N802 (NVML's names)

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from scaling.hardware import telemetry
from scaling.hardware.telemetry import Sampler, flags, lowest_clock, open_telemetry, total_energy
from scaling.results.record import Telemetry

pynvml: Any = importlib.import_module("pynvml")
UUID = "3f1c9a52-0d7e-4b6a-9c11-5a2b7c8d9e0f"
OTHER = "aaaaaaaa-0d7e-4b6a-9c11-5a2b7c8d9e0f"
CUDA = torch.device("cuda", 0)
IDLE, POWER_CAP, HW_SLOWDOWN, HW_THERMAL = 0x1, 0x4, 0x8, 0x40


class Card:
    """Each quantity is a list of answers, of which the last one stays; an exception is raised."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers: dict[str, list[Any]] = {
            "energy": [1_000_000, 1_005_000],
            "limit": [300_000],
            "management_limit": [300_000],
            "default": [300_000],
            "reasons": [0],
            "sm": [1400],
            "memory": [1600],
            "power": [250_000],
            "temperature": [60],
            "mig": [pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)],
        } | answers

    def answer(self, name: str) -> Any:
        left = self.answers[name]
        value = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(value, Exception):
            raise value
        return value


class FakeNvml:
    """Constants and exceptions are pynvml's; a handle is the UUID. The order of `cards` is NVML's order of indices."""

    def __init__(self, cards: dict[str, Card], init: Exception | None = None) -> None:
        self.cards, self.init = cards, init
        self.calls: list[str] = []
        self.users = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML_", "NVMLError")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        if self.init:
            raise self.init
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.cards:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def ask(self, handle: str, name: str) -> Any:
        self.calls.append(name)
        return self.cards[handle].answer(name)

    def nvmlDeviceGetMigMode(self, handle: str) -> Any:
        return self.ask(handle, "mig")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> Any:
        return self.ask(handle, "energy")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> Any:
        return self.ask(handle, "limit")

    def nvmlDeviceGetPowerManagementLimit(self, handle: str) -> Any:
        return self.ask(handle, "management_limit")

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: str) -> Any:
        return self.ask(handle, "default")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> Any:
        return self.ask(handle, "reasons")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> Any:
        return self.ask(handle, "reasons")

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> Any:
        return self.ask(handle, {pynvml.NVML_CLOCK_SM: "sm", pynvml.NVML_CLOCK_MEM: "memory"}[kind])

    def nvmlDeviceGetPowerUsage(self, handle: str) -> Any:
        return self.ask(handle, "power")

    def nvmlDeviceGetTemperatureV(self, handle: str, sensor: int) -> Any:
        return self.nvmlDeviceGetTemperature(handle, sensor)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> Any:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self.ask(handle, "temperature")


def error(code: str) -> Exception:
    made = pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))
    assert isinstance(made, Exception)
    return made


@pytest.fixture(autouse=True)
def torch_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "device_uuid", lambda device: UUID)


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)


def opened(nvml: FakeNvml) -> Sampler:
    sampler = open_telemetry(CUDA, nvml)
    assert sampler is not None
    return sampler


def window(card: Card, samples: int = 4) -> Telemetry:
    """A window in which the sampler takes exactly so many samples; wants `no_thread`."""
    nvml = FakeNvml({f"GPU-{UUID}": card})
    sampler = opened(nvml)
    sampler.start()
    for _ in range(samples):
        sampler.sample()
    seen = sampler.stop()
    assert nvml.users == 0
    assert seen is sampler.stop()
    assert nvml.users == 0
    return seen


def told(device: str = f"GPU-{UUID}", **fields: Any) -> Telemetry:
    base = Telemetry(device, 4, 5.0, 1400.0, 0.0, 1600.0, 250.0, 300.0, 300.0, 60.0, {}, None)
    return replace(base, **fields)


def test_names_and_bits_are_those_of_the_installed_nvml() -> None:
    for bit, name in enumerate(telemetry.REASONS, 1):
        camel = "".join(word.capitalize() for word in name.split("_")).replace("DisplayClocks", "DisplayClock")
        assert getattr(pynvml, f"nvmlClocksEventReason{camel}") == 1 << bit, name
    assert pynvml.nvmlClocksEventReasonGpuIdle == telemetry.GPU_IDLE
    for _, constant, functions in telemetry.QUANTITIES.values():
        assert constant is None or hasattr(pynvml, constant)
        assert all(hasattr(pynvml, f"nvmlDeviceGet{function}") for function in functions)
    assert all(hasattr(pynvml, f"NVMLError_{kind}") for kind in telemetry.GONE)
    assert {
        "hw_slowdown",
        "hw_thermal_slowdown",
        "sw_thermal_slowdown",
        "hw_power_brake_slowdown",
    } == telemetry.SLOWDOWNS


@pytest.mark.usefixtures("no_thread")
def test_a_window() -> None:
    card = Card(
        sm=[1400, 1410, 1390, 1420, 1300],
        memory=[1600, 1600, 1600, 1500],
        power=[100_000, 300_000, 300_500, 299_500],
        temperature=[60, 71, 70, 65],
        reasons=[POWER_CAP, POWER_CAP | HW_THERMAL | HW_SLOWDOWN, 0, POWER_CAP],
    )
    seen = window(card)
    assert seen.sm_clock_change == pytest.approx(0.0)  # (1390 + 1420) / (1400 + 1410) - 1
    assert replace(seen, sm_clock_change=None) == Telemetry(
        device=f"GPU-{UUID}",
        samples=4,
        energy_j=5.0,  # (1,005,000 - 1,000,000) mJ
        sm_clock_mhz=1405.0,  # 5620 / 4
        sm_clock_change=None,
        memory_clock_mhz=1575.0,
        power_w=250.0,
        power_limit_w=300.0,
        default_power_limit_w=300.0,
        temperature_c=71.0,
        throttle_reasons={"sw_power_cap": 0.75, "hw_slowdown": 0.25, "hw_thermal_slowdown": 0.25},
        problem=None,
    )
    assert flags([seen]) == ["throttled"]


@pytest.mark.usefixtures("no_thread")
def test_the_energy_counter_is_the_only_read_of_start_and_the_first_of_stop() -> None:
    nvml = FakeNvml({f"GPU-{UUID}": Card()})
    sampler = opened(nvml)
    nvml.calls.clear()
    sampler.start()
    assert nvml.calls == ["energy"]
    sampler.stop()
    assert nvml.calls == ["energy", "energy"]


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize(
    ("answer", "name", "fields"),
    [
        ("energy", "energy", ["energy_j"]),
        ("default", "default power limit", ["default_power_limit_w"]),
        ("reasons", "clock reasons", ["throttle_reasons"]),
        ("sm", "SM clock", ["sm_clock_mhz", "sm_clock_change"]),
        ("memory", "memory clock", ["memory_clock_mhz"]),
        ("power", "power", ["power_w"]),
        ("temperature", "temperature", ["temperature_c"]),
    ],
)
def test_each_quantity_can_be_unsupported(answer: str, name: str, fields: list[str]) -> None:
    card, whole = Card(**{answer: [error("NOT_SUPPORTED")]}), window(Card())
    expected: dict[str, Any] = dict.fromkeys(fields) | {"problem": f"{name} not supported"}
    assert window(card) == replace(whole, **expected)


@pytest.mark.usefixtures("no_thread")
def test_power_limit_falls_back_to_the_management_limit() -> None:
    no: list[Any] = [error("NOT_SUPPORTED")]
    assert window(Card(limit=no, management_limit=[150_000])).power_limit_w == 150.0
    seen = window(Card(limit=no, management_limit=no))
    assert (seen.power_limit_w, seen.problem) == (None, "power limit not supported")


@pytest.mark.usefixtures("no_thread")
def test_what_is_not_supported_is_named_once_and_not_asked_again() -> None:
    nvml = FakeNvml({f"GPU-{UUID}": Card(energy=[error("NOT_SUPPORTED")], power=[error("NOT_SUPPORTED")])})
    sampler = opened(nvml)
    sampler.start()
    sampler.sample()
    sampler.sample()
    assert sampler.stop().problem == "energy, power not supported"
    assert nvml.calls.count("energy") == nvml.calls.count("power") == 1


@pytest.mark.usefixtures("no_thread")
def test_a_passing_error_costs_one_answer() -> None:
    seen = window(Card(power=[100_000, error("TIMEOUT"), 300_000, 200_000]))
    assert (seen.samples, seen.power_w, seen.problem) == (4, 200.0, "power: Timeout")


@pytest.mark.usefixtures("no_thread")
def test_a_device_that_tells_nothing() -> None:
    nothing = {name: [error("NOT_SUPPORTED")] for name in Card().answers}
    seen = window(Card(**nothing))
    assert (seen.samples, seen.throttle_reasons, seen.energy_j) == (0, None, None)
    assert seen.problem is not None
    assert seen.problem.startswith("no samples; power limit, default power limit, energy")


@pytest.mark.parametrize("missing", [error("FUNCTION_NOT_FOUND"), AttributeError("no such function")])
def test_older_names_of_an_older_driver_or_binding(missing: Exception) -> None:
    class Older(FakeNvml):
        def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> Any:
            raise missing

        def nvmlDeviceGetTemperatureV(self, handle: str, sensor: int) -> Any:
            raise missing

    sampler = opened(Older({f"GPU-{UUID}": Card(reasons=[POWER_CAP])}))
    sampler.sample()
    seen = sampler.stop()
    assert (seen.throttle_reasons, seen.temperature_c, seen.problem) == ({"sw_power_cap": 1.0}, 60.0, None)


@pytest.mark.parametrize("device", ["cpu", "xpu", "mps", "meta"])
def test_devices_that_nvml_does_not_know(device: str) -> None:
    nvml = FakeNvml({f"GPU-{UUID}": Card()})
    assert open_telemetry(torch.device(device), nvml) is None
    assert nvml.users == 0


def test_rocm_calls_its_devices_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert open_telemetry(CUDA, FakeNvml({f"GPU-{UUID}": Card()})) is None


def test_no_library_no_driver_no_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {f"GPU-{UUID}": Card()}
    assert open_telemetry(CUDA, FakeNvml(cards, init=error("LIBRARY_NOT_FOUND"))) is None
    assert open_telemetry(CUDA, FakeNvml(cards, init=error("DRIVER_NOT_LOADED"))) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_telemetry(CUDA) is None


def test_the_default_is_the_imported_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml({f"GPU-{UUID}": Card()})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sampler = open_telemetry(CUDA)
    assert sampler is not None
    assert sampler.stop().problem == "no samples"  # never started
    assert nvml.users == 0


def test_a_device_that_nvml_does_not_list_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml({f"GPU-{OTHER}": Card()})
    assert open_telemetry(CUDA, nvml) is None
    assert nvml.users == 0

    def refuse(device: torch.device) -> str:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(telemetry, "device_uuid", refuse)
    assert open_telemetry(CUDA, nvml) is None
    assert nvml.users == 0


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize(
    ("code", "said"), [("GPU_IS_LOST", "GPU is lost"), ("UNKNOWN", "Unknown Error"), ("RESET_REQUIRED", "restart")]
)
def test_a_device_that_vanishes_in_the_window(code: str, said: str) -> None:
    lost = error(code)
    card = Card(sm=[1400, 1300, lost], power=[200_000, 300_000, lost], energy=[1_000_000, lost])
    seen = window(card, samples=5)
    assert (seen.samples, seen.sm_clock_mhz, seen.power_w, seen.energy_j) == (2, 1350.0, 250.0, None)
    assert seen.problem is not None
    assert seen.problem.startswith("the device stopped answering after 2 sample(s): ")
    assert said in seen.problem


@pytest.mark.usefixtures("no_thread")
def test_a_device_that_is_lost_at_the_last_read_has_no_energy() -> None:
    seen = window(Card(energy=[1_000_000, error("GPU_IS_LOST")]), samples=3)
    assert (seen.samples, seen.energy_j) == (3, None)
    assert seen.problem == "the device stopped answering after 3 sample(s): GPU is lost"


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize(("end_mj", "why"), [(4_000, "went backwards"), (1_000_000, "did not move")])
def test_a_counter_that_does_not_count(end_mj: int, why: str) -> None:
    seen = window(Card(energy=[1_000_000, end_mj]))
    assert (seen.energy_j, seen.problem, seen.samples) == (None, f"energy: counter {why}", 4)


@pytest.mark.usefixtures("no_thread")
def test_idle_samples_do_not_count_for_clocks_and_reasons() -> None:
    card = Card(reasons=[IDLE | 0x2, POWER_CAP, 0, IDLE], sm=[210, 1400, 1300, 345], memory=[405, 1600, 1600, 405])
    seen = window(card)
    assert (seen.samples, seen.sm_clock_mhz, seen.memory_clock_mhz) == (4, 1350.0, 1600.0)
    assert seen.throttle_reasons == {"sw_power_cap": 0.5}
    assert seen.sm_clock_change is None  # two busy samples


@pytest.mark.usefixtures("no_thread")
def test_where_all_samples_are_idle_they_are_all_there_is() -> None:
    seen = window(Card(reasons=[IDLE], sm=[210, 210, 230, 230]))
    assert (seen.sm_clock_mhz, seen.throttle_reasons) == (220.0, {})
    assert seen.sm_clock_change == pytest.approx(20 / 210)


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize(
    ("clocks", "change"),
    [([1400, 1400, 1300], None), ([1400, 1400, 1330, 1330], -0.05), ([1000, 1000, 1300, 1000, 1000], 0.1)],
)
def test_clock_change_is_second_half_over_first(clocks: list[int], change: float | None) -> None:
    seen = window(Card(sm=list(clocks)), samples=len(clocks))
    assert seen.sm_clock_change == (None if change is None else pytest.approx(change))
    assert flags([seen]) == ([] if change is None else ["clock_changed"])


@pytest.mark.parametrize("torch_says", ["the slice", "the card"])
def test_a_mig_slice_is_not_booked_its_card(torch_says: str) -> None:
    divided = Card(mig=[[1, 1]])
    name = f"MIG-{UUID}" if torch_says == "the slice" else f"GPU-{UUID}"
    nvml = FakeNvml({name: divided})
    sampler = opened(nvml)
    sampler.start()
    seen = sampler.stop()
    assert (seen.device, seen.samples, seen.problem) == (name, 0, "MIG slice: NVML knows only the whole card")
    assert [value for value in vars(seen).values() if value is not None] == [name, 0, seen.problem]
    assert set(nvml.calls) <= {"mig"}
    assert nvml.users == 0
    assert total_energy([seen]) is None
    assert flags([seen]) == []


@pytest.mark.usefixtures("no_thread")
def test_a_card_that_could_be_divided_and_is_not() -> None:
    assert window(Card(mig=[[0, 1]])).energy_j == 5.0  # divided only after the next reset


@pytest.mark.usefixtures("no_thread")
def test_renumbered_devices_are_found_by_uuid() -> None:
    """CUDA_VISIBLE_DEVICES=3: CUDA's device 0 is NVML's last."""
    cards = {f"GPU-{digit * 8}{UUID[8:]}": Card(sm=[100], energy=[0, 1]) for digit in "abc"}
    sampler = opened(FakeNvml(cards | {f"GPU-{UUID}": Card(sm=[1755])}))
    sampler.start()
    sampler.sample()
    seen = sampler.stop()
    assert (seen.device, seen.sm_clock_mhz, seen.energy_j) == (f"GPU-{UUID}", 1755.0, 5.0)


def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never held")


def test_the_thread_samples_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "INTERVAL_S", 0.01)
    nvml = FakeNvml({f"GPU-{UUID}": Card()})
    sampler = opened(nvml)
    sampler.start()
    (thread,) = [each for each in threading.enumerate() if each.name == "scaling-telemetry"]
    assert thread.daemon
    until(lambda: nvml.calls.count("temperature") >= 3)
    seen = sampler.stop()
    assert not thread.is_alive()
    assert seen.samples == nvml.calls.count("temperature") >= 4
    assert (seen.energy_j, seen.problem, nvml.users) == (5.0, None, 0)


def test_a_window_shorter_than_the_interval_has_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "INTERVAL_S", 60.0)
    sampler = opened(FakeNvml({f"GPU-{UUID}": Card()}))
    sampler.start()
    assert sampler.stop().samples == 2


def test_the_thread_ends_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "INTERVAL_S", 0.01)
    nvml = FakeNvml({f"GPU-{UUID}": Card(sm=[1400, error("GPU_IS_LOST")])})
    sampler = opened(nvml)
    sampler.start()
    until(lambda: all(each.name != "scaling-telemetry" for each in threading.enumerate()))
    seen = sampler.stop()
    assert (seen.samples, seen.energy_j, nvml.users) == (1, None, 0)
    assert seen.problem == "the device stopped answering after 1 sample(s): GPU is lost"


def test_a_driver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "JOIN_S", 0.05)
    entered, release = threading.Event(), threading.Event()

    class Hanging(FakeNvml):
        def nvmlDeviceGetPowerUsage(self, handle: str) -> Any:
            entered.set()
            release.wait(60)
            return self.ask(handle, "power")

    nvml = Hanging({f"GPU-{UUID}": Card()})
    sampler = opened(nvml)
    sampler.start()
    assert entered.wait(60)
    seen = sampler.stop()
    assert (seen.samples, seen.energy_j, nvml.users) == (0, 5.0, 1)  # NVML stays open under the thread
    assert seen.problem == "the driver took over 0 s for a sample"
    release.set()
    until(lambda: all(each.name != "scaling-telemetry" for each in threading.enumerate()))
    assert sampler.stop() is seen


def test_a_thread_that_cannot_start_costs_the_samples_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    sampler = opened(FakeNvml({f"GPU-{UUID}": Card()}))
    sampler.start()
    seen = sampler.stop()
    assert (seen.samples, seen.energy_j, seen.problem) == (0, 5.0, "no samples")


@pytest.mark.parametrize("reason", sorted(telemetry.SLOWDOWNS))
def test_a_slowdown_on_any_device_is_flagged(reason: str) -> None:
    slowed = told(throttle_reasons={reason: 0.01, "sw_power_cap": 1.0})
    assert flags([told(), None, slowed]) == ["throttled"]


def test_what_is_no_slowdown_raises_no_flag() -> None:
    usual = {"sw_power_cap": 1.0, "sync_boost": 1.0, "applications_clocks_setting": 1.0, "display_clocks_setting": 1.0}
    assert flags([told(throttle_reasons=usual), told(throttle_reasons=None)]) == []


def test_one_capped_card_of_four() -> None:
    ranks = [told(f"GPU-{rank}") for rank in range(4)]
    assert flags(ranks) == []
    ranks[2] = replace(ranks[2], power_limit_w=150.0)
    assert flags(ranks) == ["power_limited"]
    assert flags([told(power_limit_w=350.0), told(power_limit_w=None), told(default_power_limit_w=None)]) == []


def test_clock_change_is_flagged_over_two_percent() -> None:
    assert flags([told(sm_clock_change=0.02), told(sm_clock_change=-0.02), told(sm_clock_change=None)]) == []
    assert flags([told(), told(sm_clock_change=-0.021)]) == flags([told(sm_clock_change=0.021)]) == ["clock_changed"]


def test_all_flags_and_none() -> None:
    worst = told(throttle_reasons={"hw_slowdown": 1.0}, sm_clock_change=-0.5, power_limit_w=100.0)
    assert flags([worst]) == ["throttled", "clock_changed", "power_limited"]
    assert flags([]) == flags([None, None]) == []


def test_energy_is_that_of_distinct_devices() -> None:
    assert total_energy([told("GPU-a"), told("GPU-b", energy_j=7.0)]) == 12.0
    assert total_energy([told("GPU-a", energy_j=5.5), told("GPU-a"), told("GPU-b", energy_j=7.0)]) == 12.5
    assert total_energy([told("GPU-a"), told("GPU-b", energy_j=None)]) is None
    assert total_energy([told("GPU-a"), None]) is None
    assert total_energy([]) is None


def test_lowest_clock_is_over_all_ranks_or_none() -> None:
    assert lowest_clock([told(), told(sm_clock_mhz=1380.0), told(sm_clock_mhz=1395.0)]) == 1380.0
    assert lowest_clock([told(), told(sm_clock_mhz=None)]) is None
    assert lowest_clock([told(), None]) is None
    assert lowest_clock([]) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="needs an NVIDIA GPU")
def test_a_real_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real UUID
    sampler = open_telemetry(CUDA)
    assert sampler is not None
    matrix = torch.randn(4096, 4096, device=CUDA)
    sampler.start()
    for _ in range(300):
        matrix = torch.nn.functional.normalize(matrix @ matrix)
    torch.cuda.synchronize()
    seen = sampler.stop()
    assert seen.device.endswith(str(torch.cuda.get_device_properties(CUDA).uuid))
    if not (seen.problem or "").startswith("MIG slice"):
        assert seen.samples >= 2
        assert seen.sm_clock_mhz is None or seen.sm_clock_mhz > 100

"""What an NVIDIA device did over the window, as its driver tells it (NVML API Reference), sampled by a thread."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from scaling.results.record import Telemetry

INTERVAL_S, JOIN_S = 0.25, 5.0  # a driver that takes longer than JOIN_S for one sample is stuck
# Per quantity: what divides the answer (mJ since the driver was loaded, mW), the constant to ask with, and the
# functions, newest first. Most cards since Ampere tell power as a mean over the last second.
QUANTITIES: dict[str, tuple[int, str | None, tuple[str, ...]]] = {
    "energy": (1000, None, ("TotalEnergyConsumption",)),
    "power limit": (1000, None, ("EnforcedPowerLimit", "PowerManagementLimit")),
    "default power limit": (1000, None, ("PowerManagementDefaultLimit",)),
    "clock reasons": (1, None, ("CurrentClocksEventReasons", "CurrentClocksThrottleReasons")),
    "SM clock": (1, "NVML_CLOCK_SM", ("ClockInfo",)),
    "memory clock": (1, "NVML_CLOCK_MEM", ("ClockInfo",)),
    "power": (1000, None, ("PowerUsage",)),
    "temperature": (1, "NVML_TEMPERATURE_GPU", ("TemperatureV", "Temperature")),
}
SAMPLED = ("clock reasons", "SM clock", "memory clock", "power", "temperature")
GPU_IDLE = 0x1
# From bit 0x2 on. nvml.h fixes the bits; the constants' names changed from ThrottleReason to EventReason.
REASONS = (
    "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown",
    "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clocks_setting",
)  # fmt: skip
SLOWDOWNS = {name for name in REASONS if name.endswith("_slowdown")}  # sw_power_cap is usual for a card at full load
UNSUPPORTED = ("NotSupported", "FunctionNotFound", "AttributeError")  # by device, driver, binding
GONE = ("GpuIsLost", "Unknown", "ResetRequired", "Uninitialized", "DriverNotLoaded", "GpuNotFound")


def device_uuid(device: torch.device) -> str:
    """CUDA's UUID of the device, without a prefix; for a MIG slice the slice's (cuDeviceGetUuid_v2) or its card's."""
    return str(torch.cuda.get_device_properties(device).uuid)


def open_telemetry(device: torch.device, nvml: Any = None) -> Sampler | None:
    """A sampler for this device; None for one that NVML does not know, or without pynvml, library or driver."""
    if device.type == "cuda" and torch.version.hip is None:
        with suppress(Exception):  # whatever is missing, the training does not need it
            nvml = nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
            with suppress(Exception):  # no such UUID
                return Sampler(nvml, *_find(nvml, device_uuid(device)))
            nvml.nvmlShutdown()
    return None


def _find(nvml: Any, uuid: str) -> tuple[str, Any]:
    """The full UUID and NVML's handle, None for a MIG slice. Raises NVMLError for a UUID that is not there."""
    # Never by index: CUDA_VISIBLE_DEVICES and batch systems renumber CUDA's devices, and NVML ignores them. A slice
    # gets no handle because NVML answers some questions about a slice with what holds for the whole card.
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        return f"MIG-{uuid}", None
    with suppress(Exception):  # not supported: a card without MIG
        if nvml.nvmlDeviceGetMigMode(handle)[0]:  # then all that computes on it is a slice
            return f"GPU-{uuid}", None
    return f"GPU-{uuid}", handle


class Sampler:
    """Samples one device from `start` to `stop`, and raises nothing. Both threads replace values whole: no lock."""

    def __init__(self, nvml: Any, device: str, handle: Any) -> None:
        self._nvml, self._device, self._handle = nvml, device, handle
        self._samples: list[dict[str, float | None]] = []
        self._missing: dict[str, str] = {}  # what, and why; "" for a quantity that is not supported
        self._lost = "" if handle is not None else "MIG slice: NVML knows only the whole card"  # why no more is asked
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scaling-telemetry", daemon=True)
        self._start_j: float | None = None
        self._result: Telemetry | None = None
        self._limits = self._read("power limit"), self._read("default power limit")

    def start(self) -> None:
        """Read the energy counter and let the thread sample; call right before the window's first barrier."""
        self._start_j = self._read("energy")
        with suppress(RuntimeError):  # no more threads; then there are no samples
            self._thread.start()

    def stop(self) -> Telemetry:
        """Read the energy counter first, then end the thread; call after the window's last synchronise."""
        if self._result is None:
            end_j = self._read("energy")
            self._ended.set()
            if self._thread.ident is not None:  # it was started
                self._thread.join(JOIN_S)
            if self._thread.is_alive():  # inside NVML, which must not be shut down under it
                self._lost = f"the driver took over {JOIN_S:.0f} s for a sample"
            else:
                with suppress(Exception):  # a lost device
                    self._nvml.nvmlShutdown()  # counted: other users in this process keep NVML
            self._result = self._summarise(end_j, list(self._samples))
        return self._result

    def sample(self) -> None:
        """Ask for each quantity once; a sample in which the device vanishes, or nothing answers, is none."""
        sample = {name: self._read(name) for name in SAMPLED}
        if not self._lost and any(value is not None for value in sample.values()):
            self._samples.append(sample)

    def _run(self) -> None:
        self.sample()
        while not self._lost and not self._ended.wait(INTERVAL_S):
            self.sample()
        self.sample()  # so that a window shorter than the interval has two

    def _read(self, name: str) -> float | None:
        if self._lost or self._missing.get(name) == "":
            return None
        try:
            return _ask(self._nvml, self._handle, name)
        except Exception as error:
            kind = type(error).__name__.removeprefix("NVMLError_")
            if kind in GONE:
                self._lost = f"the device stopped answering after {len(self._samples)} sample(s): {error}"
            else:
                self._missing[name] = "" if kind in UNSUPPORTED else str(error) or kind
            return None

    def _summarise(self, end_j: float | None, samples: list[dict[str, float | None]]) -> Telemetry:
        used_j = None if end_j is None or self._start_j is None else end_j - self._start_j
        if used_j is not None and used_j <= 0:  # a new driver, or a window shorter than the counter's steps
            self._missing["energy"], used_j = f"counter {'went backwards' if used_j < 0 else 'did not move'}", None
        # A sample at either edge of the window can meet the device before its first or after its last kernel. Its
        # clocks are those of waiting, not of training; only where all samples are idle there is nothing else to tell.
        busy = [each for each in samples if not int(each["clock reasons"] or 0) & GPU_IDLE] or samples
        clocks, masks = _known(busy, "SM clock"), [int(mask) for mask in _known(busy, "clock reasons")]
        first, second = _mean(clocks[: len(clocks) // 2]), _mean(clocks[len(clocks) // 2 :])
        shares = {name: _mean([mask >> bit & 1 for mask in masks]) for bit, name in enumerate(REASONS, 1)}
        unsupported = ", ".join(name for name, why in list(self._missing.items()) if not why)
        problems = [self._lost or ("" if samples else "no samples"), unsupported and f"{unsupported} not supported"]
        problems += [f"{name}: {why}" for name, why in list(self._missing.items()) if why]
        return Telemetry(
            device=self._device,
            samples=len(samples),
            energy_j=used_j,
            sm_clock_mhz=_mean(clocks),
            sm_clock_change=second / first - 1 if first and second is not None and len(clocks) >= 4 else None,
            memory_clock_mhz=_mean(_known(busy, "memory clock")),
            power_w=_mean(_known(samples, "power")),
            power_limit_w=self._limits[0],
            default_power_limit_w=self._limits[1],
            temperature_c=max(_known(samples, "temperature"), default=None),
            throttle_reasons={name: share for name, share in shares.items() if share} if masks else None,
            problem="; ".join(filter(None, problems)) or None,
        )


def _ask(nvml: Any, handle: Any, name: str) -> float:
    """The driver's answer. Raises what the last function raised: NVMLError, or AttributeError in an older binding."""
    divisor, constant, (*newer, oldest) = QUANTITIES[name]
    arguments = [handle] if constant is None else [handle, getattr(nvml, constant)]
    for function in newer:
        with suppress(AttributeError, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotSupported):
            return float(getattr(nvml, f"nvmlDeviceGet{function}")(*arguments)) / divisor
    return float(getattr(nvml, f"nvmlDeviceGet{oldest}")(*arguments)) / divisor


def _known(samples: Sequence[dict[str, float | None]], name: str) -> list[float]:
    return [value for sample in samples if (value := sample[name]) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def flags(telemetry: Sequence[Telemetry | None]) -> list[str]:
    """`throttled`, `clock_changed`, `power_limited`, each where it holds for any device; a silent rank raises none."""
    known = [each for each in telemetry if each is not None]
    raised = {
        "throttled": any(SLOWDOWNS & set(each.throttle_reasons or ()) for each in known),
        "clock_changed": any(abs(each.sm_clock_change or 0) > 0.02 for each in known),
        "power_limited": any(0 < (each.power_limit_w or 0) < (each.default_power_limit_w or 0) for each in known),
    }
    return [flag for flag, is_raised in raised.items() if is_raised]


def total_energy(telemetry: Sequence[Telemetry | None]) -> float | None:
    """Joules of all devices, None unless every rank has it; a device that ranks share counts once, with its largest."""
    known = [(each.device, each.energy_j) for each in telemetry if each is not None and each.energy_j is not None]
    return sum(dict(sorted(known)).values()) if known and len(known) == len(telemetry) else None


def lowest_clock(telemetry: Sequence[Telemetry | None]) -> float | None:
    """MHz: the lowest mean SM clock over ranks; None unless every rank has it."""
    known = [each.sm_clock_mhz for each in telemetry if each is not None and each.sm_clock_mhz is not None]
    return min(known) if known and len(known) == len(telemetry) else None

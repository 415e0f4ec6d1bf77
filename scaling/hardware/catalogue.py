"""What a device can do at most, by its vendor's documents: `devices.yaml`, looked up by the driver's exact name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Link:
    """The links of one device to others, added, one-way in GB/s; None where the vendor gives no sum."""

    kind: str
    gb_per_s: float | None


@dataclass(frozen=True)
class Pcie:
    """The slot of one device; GB/s are one-way and nominal."""

    generation: int
    lanes: int
    gb_per_s: float


@dataclass(frozen=True)
class DeviceEntry:
    """One device as torch sees it: dense TFLOP/s by precision, GB and GB/s; None is what the vendor does not state."""

    names: tuple[str, ...]
    vendor: str
    peak_tflops: dict[str, float]
    memory_gb: float | None
    memory_gb_per_s: float | None
    link: Link | None
    pcie: Pcie | None
    source: tuple[str, ...]
    note: str | None


def look_up(name: str) -> DeviceEntry | None:
    """The entry of exactly this name, or None: a MIG slice, a prefix or another spelling is another device."""
    return _catalogue().get(name)


def dense_peak(name: str, precision: str) -> float | None:
    """Dense FLOP/s at `fp32`, `tf32`, `bf16` or `fp16`; None for an unknown device or a precision without a figure."""
    entry = look_up(name)
    tflops = entry.peak_tflops.get(precision) if entry else None
    return None if tflops is None else tflops * 1e12


def read(path: Path) -> dict[str, DeviceEntry]:
    """The entries of a file by name. A name in two entries is an AssertionError, a wrong key a Key- or TypeError."""
    found: dict[str, DeviceEntry] = {}
    for raw in yaml.safe_load(path.read_text(encoding="utf-8")):
        link, pcie, source = raw.get("link"), raw.get("pcie"), raw["source"]
        shaped = {
            "names": tuple(raw["names"]),
            "link": Link(**link) if link else None,
            "pcie": Pcie(**pcie) if pcie else None,
            "source": (source,) if isinstance(source, str) else tuple(source),
        }
        entry = DeviceEntry(**{"note": None, **raw, **shaped})
        for name in entry.names:
            assert name not in found, f"{path.name}: {name} stands in two entries"
            found[name] = entry
    return found


@cache
def _catalogue() -> dict[str, DeviceEntry]:
    return read(Path(__file__).with_name("devices.yaml"))

"""The largest matrix-product rate of a device, measured on itself: beside the vendor's peak, what a model is held to.

A few square shapes, growing until the rate no longer does; seconds on an accelerator, where it is kept per device.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from scaling.engine.precision import AUTOCAST, Precision
from scaling.hardware.device import device_name
from scaling.measure.clock import Clock

SIZES = {"cpu": (512, 1024)}
DEVICE_SIZES = (2048, 4096, 8192, 16384)
ROUND_S = 0.05  # one timed round of back-to-back products lasts at least so long
ROUNDS = 4  # the best of which counts: a rate is an upper end, and disturbances only lower it
LONGEST_S = 1.0  # of one product: larger shapes are left out


@dataclass(frozen=True)
class Rate:
    """FLOP/s of an n x n x n product, and the day it was measured."""

    flops_per_s: float
    size: int
    measured: str


def matmul_rate(
    precision: Precision,
    device: torch.device,
    clock: Clock,
    cache: Path | None = None,
    conditions: Mapping[str, Any] | None = None,
) -> Rate | None:
    """The device's largest rate at this precision; None where not even the smallest shape runs.

    An accelerator that has a name of its own (UUID) is measured once and then looked up in `cache`, a folder, until
    torch, its libraries or one of the `conditions` (driver, power limit) change.
    """
    uuid = device_uuid(device)
    if uuid is None or cache is None:
        return _measure(precision, device, clock)[0]
    stack = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    key = {"device": device_name(device), "uuid": uuid, "precision": precision.name, **stack, **(conditions or {})}
    file = cache / f"matmul-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
    if (known := _read(file, key)) is not None:
        return known
    rate, whole = _measure(precision, device, clock)
    if rate is not None and whole:
        _write(file, key, rate)
    return rate


def cache_folder(env: Mapping[str, str] = os.environ) -> Path | None:
    """Where rates are kept, by the XDG base directory specification; None for a user without a home."""
    try:
        return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "scaling"
    except RuntimeError:
        return None


def device_uuid(device: torch.device) -> str | None:
    """The device's own name, None where torch does not tell it; a host has none."""
    if device.type == "cpu":
        return None
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = getattr(properties(device), "uuid", None) if properties else None
    return None if uuid is None else str(uuid)


def _measure(precision: Precision, device: torch.device, clock: Clock) -> tuple[Rate | None, bool]:
    """The largest rate, and whether no shape was left out for want of memory."""
    precision.apply()
    best: Rate | None = None
    for size in SIZES.get(device.type, DEVICE_SIZES):
        try:
            seconds = _seconds(size, AUTOCAST.get(precision.name, torch.float32), device, clock)
        except (RuntimeError, MemoryError):  # the model still holds most of the memory
            return best, False
        flops_per_s = 2 * size**3 / seconds
        if best is None or flops_per_s > best.flops_per_s:
            best = Rate(flops_per_s, size, date.today().isoformat())
        if 8 * seconds > LONGEST_S:
            break
    return best, True


@torch.no_grad()
def _seconds(size: int, dtype: torch.dtype, device: torch.device, clock: Clock) -> float:
    """Seconds of one product, the least mean over a few rounds; the second factor as it is, or transposed as in a
    linear layer.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def time(second: torch.Tensor, products: int) -> float:
        start = clock.mark()
        for _ in range(products):
            torch.mm(a, second, out=out)
        end = clock.mark()
        clock.wait(end)
        return float(clock.seconds(start, end)) / products

    best = math.inf
    for second in (b, b.t()):
        time(second, 2)  # libraries choose their kernels
        products = max(1, round(ROUND_S / time(second, 1)))
        best = min(best, *(time(second, products) for _ in range(ROUNDS)))
    return best


def _read(file: Path, key: dict[str, Any]) -> Rate | None:
    try:
        content = json.loads(file.read_text())
        rate = Rate(
            float(content["rate"]["flops_per_s"]), int(content["rate"]["size"]), str(content["rate"]["measured"])
        )
        return rate if content["key"] == key and 0 < rate.flops_per_s < math.inf else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, key: dict[str, Any], rate: Rate) -> None:
    """Keep the rate, whole or not at all; a cache that cannot be written is none."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            whole = Path(folder, file.name)
            whole.write_text(json.dumps({"key": key, "rate": asdict(rate)}))
            whole.replace(file)
    except OSError:
        return

"""The device's own matrix-product rate: what is timed, kept, and looked up again."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scaling.engine.precision import Precision
from scaling.measure import matmul
from scaling.measure.clock import HostClock
from scaling.measure.matmul import Rate, cache_folder, device_uuid, matmul_rate

CPU = torch.device("cpu")
FP32 = Precision("fp32", "cpu", torch.float32)


class CountingClock(HostClock):
    """Every product takes as long as `cost` says: seconds for n x n x n."""

    def __init__(self, cost: dict[int, float]) -> None:
        self.cost = cost
        self.now = 0.0

    def mark(self) -> float:
        return self.now


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> tuple[CountingClock, list[int]]:
    """A clock that only products move, and the sizes of these."""
    clock, sizes = CountingClock({512: 0.002, 1024: 0.01}), []
    multiply = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        sizes.append(a.shape[0])
        clock.now += clock.cost[a.shape[0]]
        return out if a.shape[0] > 64 else multiply(a, b, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    return clock, sizes


def test_the_rate_is_that_of_the_best_shape(products: Any) -> None:
    clock, sizes = products
    rate = matmul_rate(FP32, CPU, clock)
    assert rate is not None
    assert rate.size == 1024
    assert rate.flops_per_s == pytest.approx(2 * 1024**3 / 0.01)  # 215 GFLOP/s against 134
    assert sorted(set(sizes)) == [512, 1024]
    clock.cost[1024] = 0.1
    slower = matmul_rate(FP32, CPU, clock)
    assert slower is not None
    assert slower.size == 512
    assert slower.flops_per_s == pytest.approx(2 * 512**3 / 0.002)


def test_a_shape_that_would_take_too_long_is_left_out(products: Any) -> None:
    clock, sizes = products
    clock.cost[512] = 0.2
    matmul_rate(FP32, CPU, clock)
    assert set(sizes) == {512}


def test_memory_that_is_full_ends_the_search_with_what_is_known(products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, _ = products
    plain = torch.randn

    def randn(*shape: Any, **kwargs: Any) -> torch.Tensor:
        if shape[0] > 512:
            raise torch.OutOfMemoryError("full")
        return plain(*shape, **kwargs)

    monkeypatch.setattr(torch, "randn", randn)
    rate = matmul_rate(FP32, CPU, clock)
    assert rate is not None and rate.size == 512
    monkeypatch.setattr(torch, "randn", lambda *shape, **kwargs: randn(1024))
    assert matmul_rate(FP32, CPU, clock) is None


def test_a_host_has_no_uuid_and_is_measured_each_time(products: Any, tmp_path: Path) -> None:
    clock, sizes = products
    assert device_uuid(CPU) is None
    matmul_rate(FP32, CPU, clock, tmp_path)
    before = len(sizes)
    matmul_rate(FP32, CPU, clock, tmp_path)
    assert len(sizes) == 2 * before
    assert list(tmp_path.iterdir()) == []


def test_an_accelerator_is_measured_once_per_device_and_precision(
    products: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sizes = products
    uuid = "aaaa"
    monkeypatch.setattr(matmul, "device_uuid", lambda device: uuid)
    first = matmul_rate(FP32, CPU, clock, tmp_path / "new")
    before = len(sizes)
    assert matmul_rate(FP32, CPU, clock, tmp_path / "new") == first
    assert len(sizes) == before
    matmul_rate(Precision("bf16", "cpu", torch.float32), CPU, clock, tmp_path / "new")
    assert len(sizes) > before
    before = len(sizes)
    uuid = "bbbb"  # another card of the same model
    matmul_rate(FP32, CPU, clock, tmp_path / "new")
    assert len(sizes) > before
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_the_best_round_counts(products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, _ = products
    quick, disturbed = torch.mm, itertools.count()

    def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        clock.now += 0.5 * (next(disturbed) % 5 == 0)  # something else runs now and then
        return quick(a, b, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(matmul, "ROUND_S", 0.0)  # rounds of one product
    rate = matmul_rate(FP32, CPU, clock)
    assert rate is not None and rate.flops_per_s == pytest.approx(2 * 1024**3 / 0.01)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_the_factors_have_the_type_of_the_precision(
    name: str, dtype: torch.dtype, products: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, _ = products
    quick, seen = torch.mm, set()

    def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        seen.add((a.dtype, b.dtype, b.is_contiguous(), torch.backends.cudnn.allow_tf32))
        return quick(a, b, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    matmul_rate(Precision(name, "cpu", torch.float32), CPU, clock)
    assert seen == {(dtype, dtype, whole, name == "tf32") for whole in (True, False)}  # plain, and as a linear layer
    FP32.apply()


def test_a_rate_that_memory_cut_short_is_not_kept(
    products: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, _ = products
    monkeypatch.setattr(matmul, "device_uuid", lambda device: "aaaa")
    plain = torch.randn

    def randn(*shape: Any, **kwargs: Any) -> torch.Tensor:
        if shape[0] > 512:
            raise torch.OutOfMemoryError("full")
        return plain(*shape, **kwargs)

    with monkeypatch.context() as full:
        full.setattr(torch, "randn", randn)
        short = matmul_rate(FP32, CPU, clock, tmp_path)
    whole = matmul_rate(FP32, CPU, clock, tmp_path)
    assert short is not None and whole is not None
    assert (short.size, whole.size) == (512, 1024)


@pytest.mark.parametrize("change", ["driver", "power_limit_w", "torch"])
def test_another_driver_limit_or_torch_is_measured_again(
    change: str, products: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sizes = products
    monkeypatch.setattr(matmul, "device_uuid", lambda device: "aaaa")
    conditions = {"driver": "550", "power_limit_w": 700.0}
    matmul_rate(FP32, CPU, clock, tmp_path, conditions)
    before = len(sizes)
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    else:
        conditions = conditions | {change: 350.0}
    matmul_rate(FP32, CPU, clock, tmp_path, conditions)
    assert len(sizes) > before


@pytest.mark.parametrize("rate", ['"abc"', "0", "NaN", "-5.0", "Infinity", "null"])
def test_a_rate_in_the_cache_that_is_none_is_measured_again(
    rate: str, products: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, _ = products
    monkeypatch.setattr(matmul, "device_uuid", lambda device: "aaaa")
    first = matmul_rate(FP32, CPU, clock, tmp_path)
    assert first is not None
    file = next(tmp_path.iterdir())
    file.write_text(file.read_text().replace(f'"flops_per_s": {first.flops_per_s}', f'"flops_per_s": {rate}'))
    again = matmul_rate(FP32, CPU, clock, tmp_path)
    assert again is not None and again.flops_per_s == pytest.approx(first.flops_per_s)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"key": {}, "rate": {"flops_per_s": 1}}'])
def test_a_cache_that_is_not_ours_is_measured_again(
    content: str, products: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sizes = products
    monkeypatch.setattr(matmul, "device_uuid", lambda device: "aaaa")
    first = matmul_rate(FP32, CPU, clock, tmp_path)
    file = next(tmp_path.iterdir())
    kept = json.loads(file.read_text())
    assert Rate(**kept["rate"]) == first
    file.write_text(content)
    before = len(sizes)
    again = matmul_rate(FP32, CPU, clock, tmp_path)
    assert len(sizes) > before
    assert again is not None and first is not None
    assert again.flops_per_s == pytest.approx(first.flops_per_s)
    assert json.loads(file.read_text())["key"] == kept["key"]


def test_a_cache_that_cannot_be_written_is_none(products: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "device_uuid", lambda device: "aaaa")
    (tmp_path / "file").touch()
    assert matmul_rate(FP32, CPU, products[0], tmp_path / "file" / "below") is not None


def test_the_cache_follows_xdg() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/scaling")
    assert cache_folder({}) == Path("~/.cache/scaling").expanduser()


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    assert cache_folder({}) is None

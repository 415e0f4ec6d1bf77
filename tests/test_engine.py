"""Loss scaling, clipping and precision on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scaling.config import OptimizerConfig, PrecisionConfig
from scaling.engine import make_optimizer
from scaling.engine.ddp import split_into_buckets
from scaling.engine.precision import Precision, check_precision
from scaling.engine.single import SingleEngine
from scaling.workload import Batch, Workload

CPU = torch.device("cpu")


class Scalar(nn.Module):
    """One weight; its gradient is the sum of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def scalar_engine(precision: str, clip: float | None = None, lr: float = 1.0) -> SingleEngine:
    module = Scalar()
    workload = Workload(
        module=module,
        loss=lambda m, tensors: (m(tensors["x"]).sum(), tensors["x"].numel()),
        synthetic=lambda n, generator: {"x": torch.rand(n, generator=generator)},
        block_types=(),
    )
    optimizer = make_optimizer(module, OptimizerConfig("sgd", lr=lr), CPU)
    return SingleEngine(workload, optimizer, Precision.of(PrecisionConfig(precision), CPU), clip=clip)


def batch(gradient: float, step_targets: int = 1) -> Batch:
    return Batch({"x": torch.tensor([gradient])}, samples=1, targets=1, step_targets=step_targets)


def run(engine: SingleEngine, gradients: list[float]) -> float:
    """One optimizer step over micro-batches with these gradients; the weight afterwards."""
    for index, gradient in enumerate(gradients, 1):
        engine.accumulate(batch(gradient), last=index == len(gradients))
    engine.step()
    weight: Any = engine.module.weight
    return float(weight.detach())


def test_ten_micro_batches_of_gradient_one_update_by_one() -> None:
    engine = scalar_engine("fp32")  # C36: normalised by the step's own targets, whatever their number
    for _ in range(10):
        engine.accumulate(batch(1.0, step_targets=10), last=False)
    engine.step()
    assert float(engine._parameters[0].detach()) == pytest.approx(-1.0)


def test_fp16_unscales_and_clips_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scalar_engine("fp16", clip=1.0)  # C37: scale 65536, four micro-batches, true norm 2.0, largest norm 1.0
    assert engine._scaler.get_scale() == 65536
    unscaled: list[float] = []
    original = engine._scaler.unscale_

    def unscale(optimizer: torch.optim.Optimizer) -> None:
        assert engine._parameters[0].grad is not None
        unscaled.append(float(engine._parameters[0].grad) / 65536)
        original(optimizer)

    monkeypatch.setattr(engine._scaler, "unscale_", unscale)
    assert run(engine, [0.5, 0.5, 0.5, 0.5]) == pytest.approx(-1.0)  # 2.0 clipped to 1.0
    assert unscaled == [pytest.approx(2.0)]
    assert engine._scaler.get_scale() == 65536


def test_an_infinity_in_one_micro_batch_skips_the_whole_step_once() -> None:
    engine = scalar_engine("fp16")
    assert run(engine, [1.0, float("inf"), 1.0, 1.0]) == 0.0
    assert int(engine.skipped) == 1
    assert engine._scaler.get_scale() == 32768
    assert run(engine, [0.25, 0.25]) == pytest.approx(-0.5)
    assert int(engine.skipped) == 1


def test_the_loss_is_the_share_of_the_whole_step() -> None:
    engine = scalar_engine("fp32")
    with torch.no_grad():
        engine._parameters[0].fill_(3.0)
    shares = [engine.accumulate(batch(2.0, step_targets=4), last=i == 3) for i in range(4)]
    assert [float(share) for share in shares] == [1.5] * 4  # 3 x 2 / 4
    assert not any(share.requires_grad for share in shares)


def test_gradients_are_gone_after_the_step() -> None:
    engine = scalar_engine("fp32")
    run(engine, [1.0])
    assert engine._parameters[0].grad is None


def test_bf16_computes_in_bf16_and_keeps_its_weights_in_fp32() -> None:
    seen: list[torch.dtype] = []
    module = nn.Linear(4, 4)

    def loss(m: nn.Module, tensors: Any) -> tuple[Tensor, int]:
        output = m(tensors["x"])
        seen.append(output.dtype)
        return output.float().sum(), 1

    workload = Workload(module, loss, lambda n, g: {}, ())
    optimizer = make_optimizer(module, OptimizerConfig("sgd"), CPU)
    engine = SingleEngine(workload, optimizer, Precision.of(PrecisionConfig("bf16"), CPU))
    engine.accumulate(Batch({"x": torch.ones(2, 4)}, 2, 1, 1), last=True)
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert module.weight.grad is not None and module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("name", ["fp16", "tf32"])
def test_a_precision_that_the_device_cannot_do_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"precision={name}: cpu .* it does fp32, bf16"):
        check_precision(name, CPU)


def test_tf32_that_the_driver_would_run_as_fp32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    with pytest.raises(ValueError, match="NVIDIA_TF32_OVERRIDE=0 makes it run as fp32"):
        check_precision("tf32", torch.device("cuda"))


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_precision_that_the_device_can_do_is_not(name: str) -> None:
    check_precision(name, CPU)


@pytest.mark.parametrize(("name", "allowed"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_only_tf32_lets_matrix_products_run_as_tf32(name: str, allowed: bool) -> None:
    try:
        Precision(name, "cuda", torch.float32).apply()
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
        assert torch.backends.cudnn.allow_tf32 is allowed
    finally:
        Precision("fp32", "cuda", torch.float32).apply()


def test_buckets_close_when_they_are_full() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (10, 10, 10, 100, 1)]
    sizes = [[p.numel() for p in bucket] for bucket in split_into_buckets(parameters, limit_bytes=80)]
    assert sizes == [[10, 10], [10, 100], [1]]
    mixed = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float16))]
    assert len(split_into_buckets(mixed, limit_bytes=1000)) == 2


def test_the_types_of_an_engine_are_those_of_the_weights_that_train() -> None:
    """What is frozen may be of any type, as the embedding of a model that is only tuned."""
    module = nn.Sequential(nn.Linear(2, 2).to(torch.bfloat16).requires_grad_(False), nn.Linear(2, 1))
    workload = Workload(module, lambda m, tensors: (m(tensors["x"]).sum(), 1), lambda n, generator: {}, ())
    engine = SingleEngine(
        workload, make_optimizer(module, OptimizerConfig(), CPU), Precision("fp32", "cpu", torch.float32)
    )
    assert (engine.parameter_dtype, engine.weight_dtype) == (torch.float32, torch.float32)

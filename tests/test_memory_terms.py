"""What memory is used for, by hand: shared storages once, a small model's activations, and the textbook's numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from scaling.config import (
    DDPConfig,
    DeepSpeedConfig,
    FSDPConfig,
    OptimizerConfig,
    PrecisionConfig,
    SingleConfig,
    StrategyConfig,
    TrainConfig,
    Zero0Config,
    Zero1Config,
    Zero2Config,
    Zero3Config,
)
from scaling.engine import Engine, Held, make_optimizer
from scaling.engine.precision import Precision
from scaling.engine.single import SingleEngine
from scaling.measure import memory_terms as terms
from scaling.measure.layout import Layout, Weight
from scaling.measure.memory_terms import ForwardWatch, largest_terms, memory_terms, storages, textbook_bytes
from scaling.results.record import MemoryTerms
from scaling.workload import Batch, Loss, Tensors, Workload

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 2**30


# Storages


def test_views_of_one_memory_count_once_and_whole() -> None:
    flat = torch.zeros(100)
    found = storages([flat[10:20], flat[20:].view(8, 10), flat, torch.zeros(3)], CPU)
    assert sorted(found.values()) == [12, 400]
    assert found[flat.data_ptr()] == 400


def test_what_is_empty_or_elsewhere_does_not_count() -> None:
    assert storages([torch.zeros(0), torch.zeros(5, device="meta")], CPU) == {}
    assert storages([torch.zeros(5)], GPU) == {}
    assert storages([nn.Parameter(torch.zeros(5))], CPU)


# One optimizer step


def squared(module: nn.Module, tensors: Tensors) -> tuple[Tensor, int]:
    return (module(tensors["x"]) - tensors["y"]).pow(2).sum(), 2


def batch() -> Batch:
    return Batch({"x": torch.ones(2, 3), "y": torch.zeros(2, 1)}, samples=2, targets=2, step_targets=4)


def mlp_engine(optimizer: str = "adamw", precision: str = "fp32", loss: Loss = squared) -> SingleEngine:
    """3 -> 4 -> 1: 21 parameters in 4 tensors, and a buffer of 7 numbers."""
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.5)  # no ReLU is shut: every weight moves
    module.register_buffer("mean", torch.zeros(7))
    workload = Workload(module, loss, lambda n, g: {}, ())
    optimiser = make_optimizer(module, OptimizerConfig(optimizer, lr=0.1), CPU)
    return SingleEngine(workload, optimiser, Precision.of(PrecisionConfig(precision), CPU))


def train(engine: SingleEngine, accumulation: int = 2) -> None:
    for micro_step in range(1, accumulation + 1):
        engine.accumulate(batch(), last=micro_step == accumulation)
    engine.step()


def in_bytes(found: MemoryTerms) -> dict[str, float]:
    return {name: value * GIB for name, value in vars(found).items() if value is not None}


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [("adamw", 2 * 84 + 4 * 4), ("sgd", 0)],  # two moments, and a step count of 4 bytes per tensor
)
def test_a_small_model_term_by_term(optimizer: str, state: int) -> None:
    engine = mlp_engine(optimizer)
    train(engine)
    before = [p.detach().clone() for p in engine.module.parameters()]
    found = in_bytes(memory_terms(engine, batch, 2, CPU))
    assert found == {
        "model": 84 + 28,  # 21 weights, 7 numbers
        "gradients": 84,
        "optimizer": state,
        "buffers": 0,
        # for backward: the input, 2 x 3; what ReLU gave, 2 x 4, for itself and the next layer; the difference, 2 x 1
        "activations": 24 + 32 + 8,
        "gathered": 0,
    }
    after = list(engine.module.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "it was a whole step"
    assert engine.loss is squared, "the watch is gone"
    assert all(p.grad is None for p in after)


def test_autocast_saves_weights_in_its_own_type_until_backward() -> None:
    engine = mlp_engine(precision="bf16")
    train(engine)
    # 6 + 8 numbers of 2 bytes and the difference in fp32; and the last 4 weights as bf16 computes with them, which the
    # first 12 need not be: nobody asks for the gradient of the input
    assert in_bytes(memory_terms(engine, batch, 1, CPU))["activations"] == 12 + 16 + 8 + 8


@dataclass
class Keeps:
    """An engine whose gradients grow from micro-step to micro-step, and are gone after the last."""

    module: nn.Module = field(default_factory=lambda: nn.Linear(2, 2))
    loss: Any = None
    kept: list[Tensor] = field(default_factory=list)

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        self.kept = [] if last else [*self.kept, torch.zeros(25)]
        return torch.zeros(())

    def step(self) -> None:
        self.kept = [torch.zeros(1000)]

    def held(self) -> Held:
        flat = torch.zeros(10)
        return Held(list(self.module.parameters()), self.kept, [flat, flat[:5]], [flat, torch.zeros(2)])


def test_the_most_between_micro_steps_is_told_and_what_two_terms_hold_is_the_firsts() -> None:
    found = in_bytes(memory_terms(cast(Engine, Keeps()), batch, 4, CPU))
    assert found["gradients"] == 3 * 100  # in the third of four, and not what lies there after the update
    assert (found["optimizer"], found["buffers"]) == (40, 8)
    assert "activations" not in found  # no forward was seen
    assert found["model"] == 24


def test_the_watch_is_gone_when_forward_fails() -> None:
    def broken(module: nn.Module, tensors: Tensors) -> tuple[Tensor, int]:
        raise RuntimeError("a shape does not fit")

    engine = mlp_engine(loss=broken)
    with pytest.raises(RuntimeError, match="does not fit"):
        memory_terms(engine, batch, 1, CPU)
    assert engine.loss is broken


# One forward


def gathering(module: nn.Module, tensors: Tensors) -> tuple[Tensor, int]:
    """Gathers the first layer, 48 bytes, and leaves it so."""
    assert isinstance(module, nn.Sequential)
    module[0].weight.data = torch.zeros(4, 3)
    return squared(module, tensors)


def watched(engine: SingleEngine, device: torch.device = CPU) -> ForwardWatch:
    at_rest = storages(engine.held().model, device)
    watch = ForwardWatch(engine, at_rest, device)
    with watch:
        engine.accumulate(batch(), last=True)
    return watch


def test_weights_that_a_forward_gathered_are_no_activations() -> None:
    watch = watched(mlp_engine(loss=gathering))
    assert (watch.activations, watch.gathered) == (64, 48)


def test_a_device_is_asked_before_and_after_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    handed_out = iter([1000, 1600])

    def memory_allocated(device: torch.device) -> int:
        assert device == GPU
        order.append("asked")
        return next(handed_out)

    def loss(module: nn.Module, tensors: Tensors) -> tuple[Tensor, int]:
        order.append("forward")
        return squared(module, tensors)

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(memory_allocated=memory_allocated))
    watch = watched(mlp_engine(loss=loss), GPU)
    assert (watch.activations, watch.gathered) == (600, 0)
    assert order == ["asked", "forward", "asked"]


def test_what_a_device_gathered_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_out = iter([1000, 1600])
    monkeypatch.setattr(terms, "allocated", lambda device: next(handed_out))
    watch = watched(mlp_engine(loss=gathering))
    assert (watch.activations, watch.gathered) == (552, 48)


def test_a_device_without_statistics_is_looked_at_as_a_host_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    watch = watched(mlp_engine(), GPU)
    assert (watch.activations, watch.gathered) == (0, 0)  # all of this model lies on the host


def test_the_largest_over_ranks_is_taken_term_by_term() -> None:
    ranks = [MemoryTerms(1.0, 2.0, 3.0, 0.0, None, 0.0), MemoryTerms(2.0, 1.0, 4.0, 0.5, 7.0, 0.0)]
    assert largest_terms(ranks) == MemoryTerms(2.0, 2.0, 4.0, 0.5, None, 0.0)


# The textbook


TRAINED = Layout([Weight(12, 4, 1, 0)])


def textbook(
    strategy: StrategyConfig,
    ranks: int,
    *,
    optimizer: str = "adamw",
    weights: torch.dtype = torch.float32,
    layout: Layout = TRAINED,
    settings: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Of an engine that keeps weights of this type between steps, and updates float32 weights."""
    config = TrainConfig(strategy=strategy, optimizer=OptimizerConfig(optimizer))
    engine = SimpleNamespace(parameter_dtype=torch.float32, weight_dtype=weights, settings=settings)
    return textbook_bytes(config, cast(Engine, engine), layout, ranks)


@pytest.mark.parametrize(
    ("strategy", "adamw", "sgd"),
    [
        (SingleConfig(), (4, 4, 8), (4, 4, 0)),
        (DDPConfig(), (4, 4, 8), (4, 4, 0)),
        (Zero0Config(), (4, 4, 8), (4, 4, 0)),
        (Zero1Config(), (4, 4, 2), (4, 4, 0)),
        (Zero2Config(), (4, 1, 2), (4, 1, 0)),
        (Zero3Config(), (1, 1, 2), (1, 1, 0)),
        (FSDPConfig(), (1, 1, 2), (1, 1, 0)),
    ],
)
def test_bytes_per_parameter_in_fp32_on_four_ranks(
    strategy: StrategyConfig, adamw: tuple[float, ...], sgd: tuple[float, ...]
) -> None:
    for name, expected in {"adamw": adamw, "sgd": sgd}.items():
        found = textbook(strategy, 4, optimizer=name)
        assert found == dict(zip(("model", "gradients", "optimizer"), expected, strict=True))


@pytest.mark.parametrize(
    ("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)]
)  # ZeRO (2019), figure 1: 7.5e9 parameters, mixed precision with Adam, 64 ranks
def test_half_precision_is_figure_1_of_the_paper(stage: int, gigabytes: float) -> None:
    strategy = {0: Zero0Config(), 1: Zero1Config(), 2: Zero2Config(), 3: Zero3Config()}[stage]
    half = {"data_types": {"grad_accum_dtype": "bf16"}}
    # Our stage 0 keeps float32 weights and gradients, and no masters: as many bytes.
    found = textbook(strategy, 64, weights=torch.bfloat16, settings=half) if stage else textbook(strategy, 64)
    assert sum(found.values()) * 7.5 == pytest.approx(gigabytes, abs=0.05)


def test_gradients_kept_in_fp32_beside_half_weights() -> None:
    settings = {"data_types": {"grad_accum_dtype": "fp32"}}
    found = textbook(Zero2Config(), 2, weights=torch.bfloat16, settings=settings)
    assert found == {"model": 2, "gradients": 2, "optimizer": 6}  # two moments and the master, halved


def test_fsdp_keeps_no_half_weights_between_steps() -> None:
    # It gathers bfloat16; what it keeps is what the optimizer updates.
    config = TrainConfig(strategy=FSDPConfig())
    types = {"parameter_dtype": torch.float32, "weight_dtype": torch.float32, "gather_dtype": torch.bfloat16}
    engine = SimpleNamespace(**types, settings=None)
    found = textbook_bytes(config, cast(Engine, engine), TRAINED, 2)
    assert found == {"model": 2, "gradients": 2, "optimizer": 4}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (SingleConfig(), (10, 4, 8)),  # 30 elements x 4 bytes for 12 that train; gradients and moments of these alone
        (DDPConfig(), (10, 4, 8)),
        (Zero1Config(), (10, 4, 4)),
        (Zero2Config(), (10, 2, 4)),
        (Zero3Config(), (5, 2, 4)),
        (FSDPConfig(), (5, 2, 4)),
    ],
)
def test_frozen_parameters_are_model_and_nothing_else(strategy: StrategyConfig, expected: tuple[float, ...]) -> None:
    layout = Layout([Weight(12, 4, 1, 0), Weight(18, 6, 1, None, trained=False)])
    found = textbook(strategy, 2, layout=layout)
    assert found == dict(zip(("model", "gradients", "optimizer"), expected, strict=True))


def test_half_weights_of_a_users_file_without_zero_have_masters_too() -> None:
    settings = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    found = textbook(DeepSpeedConfig(settings=settings), 2, weights=torch.bfloat16, settings=settings)
    assert found == {"model": 2, "gradients": 2, "optimizer": 12}  # 16 bytes, as in the paper; a run holds as many


def test_nothing_is_said_of_the_optimizer_of_a_users_file() -> None:
    strategy = DeepSpeedConfig(settings={"zero_optimization": {"stage": 2}})
    found = textbook(strategy, 2, optimizer="lamb", settings={"optimizer": {"type": "Lamb"}})
    assert found == {"model": 4, "gradients": 2}
    assert textbook(strategy, 2, settings={})["optimizer"] == 4

"""What is done around DeepSpeed's engine: types that travel, streams that wait, mistakes in one line; with fakes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scaling.engine import deepspeed_streams, zero
from scaling.engine.deepspeed_streams import bound_waits, keep_until_reduced, let_gathers_wait
from scaling.engine.zero import ZeroEngine

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def engine_around(fake: Any, stage: int = 2, module: nn.Module | None = None) -> ZeroEngine:
    """An engine of ours around a fake of DeepSpeed's."""
    engine = ZeroEngine.__new__(ZeroEngine)
    engine._engine, engine.stage = fake, stage
    engine.module = nn.Linear(2, 2) if module is None else module
    engine.weight_dtype, engine.mixed_types = FP32, False
    engine._skipped = 0
    return engine


# Types


def autocast(stage: int, *travels: torch.dtype, frozen: torch.dtype | None = None) -> ZeroEngine:
    """Under torch_autocast, where DeepSpeed marks each parameter with the type in which it travels."""
    module = nn.Module()
    for number, dtype in enumerate((*travels, frozen)):
        if dtype is not None:
            parameter = nn.Parameter(torch.zeros(1), requires_grad=number < len(travels))
            vars(parameter)["comm_dtype"] = dtype
            module.register_parameter(f"p{number}", parameter)
    fake = SimpleNamespace(communication_data_type=FP32, torch_autocast_enabled=lambda: True)
    return engine_around(fake, stage, module)


@pytest.mark.parametrize(
    ("engine", "expected", "mixed"),
    [
        # reduced in one type whatever the modules are marked with, and nothing is gathered
        (autocast(0, BF16, FP32), (FP32, None), False),
        (autocast(1, BF16, BF16), (BF16, FP32), False),
        (autocast(2, FP32), (FP32, FP32), False),
        (autocast(3, BF16, BF16), (BF16, BF16), False),
        (autocast(2, FP32, BF16), (BF16, FP32), True),
        (autocast(3, FP16, FP32), (FP16, FP16), True),
        (autocast(3, BF16, frozen=FP32), (BF16, BF16), False),  # what is not trained is not reduced
    ],
)
def test_under_autocast_modules_say_what_travels(
    engine: ZeroEngine, expected: tuple[torch.dtype, torch.dtype | None], mixed: bool
) -> None:
    assert engine._travels_as() == expected
    assert engine.mixed_types is mixed


@pytest.mark.parametrize(("stage", "expected"), [(0, (FP16, None)), (1, (FP16, BF16)), (3, (FP16, BF16))])
def test_without_autocast_the_settings_do(stage: int, expected: tuple[torch.dtype, torch.dtype | None]) -> None:
    fake = SimpleNamespace(communication_data_type=FP16, torch_autocast_enabled=lambda: False)
    engine = engine_around(fake, stage)
    engine.weight_dtype = BF16
    assert engine._travels_as() == expected
    assert engine.mixed_types is False


# Memory


def test_gradients_of_the_masters_are_gradients() -> None:
    """An update on the host leaves them there; nothing else names them."""
    master = nn.Parameter(torch.zeros(6))
    master.grad = torch.ones(6)
    basic = SimpleNamespace(state={master: {"exp_avg": torch.zeros(6)}}, param_groups=[{"params": [master]}])
    wrapper = SimpleNamespace(averaged_gradients={0: [torch.zeros(3)]}, ipg_buckets=[torch.zeros(4)])
    held = engine_around(SimpleNamespace(optimizer=wrapper, basic_optimizer=basic)).held()
    assert [gradient.numel() for gradient in held.gradients] == [6, 3]
    assert held.gradients[0] is master.grad
    assert [tensor.numel() for tensor in held.optimizer] == [6, 6]
    assert [tensor.numel() for tensor in held.buffers] == [4]


# Streams


class Gradient:
    """Notes on which stream its memory is kept."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def record_stream(self, stream: str) -> None:
        self._events.append(f"kept for {stream}")


class Optimizer:
    """As DeepSpeed's of stages 1 and 2."""

    reduction_stream = "the reducing stream"

    def __init__(self, *, overlap: bool = True, gradient: bool = True) -> None:
        self.overlap_comm = overlap
        self.events: list[str] = []
        self._gradient = Gradient(self.events) if gradient else None

    def get_gradient_for_reduction(self, parameter: Tensor) -> Gradient | None:
        return self._gradient

    def clear_grad_attribute(self, parameter: Tensor) -> None:
        self.events.append(f"cleared {parameter.numel()}")


def test_a_gradient_is_kept_for_the_stream_that_reduces_it_before_deepspeed_drops_it() -> None:
    optimizer = Optimizer()
    keep_until_reduced(optimizer)
    optimizer.clear_grad_attribute(torch.zeros(3))
    assert optimizer.events == ["kept for the reducing stream", "cleared 3"]


def test_a_parameter_without_gradient_is_cleared_all_the_same() -> None:
    optimizer = Optimizer(gradient=False)
    keep_until_reduced(optimizer)
    optimizer.clear_grad_attribute(torch.zeros(3))
    assert optimizer.events == ["cleared 3"]


def test_without_a_stream_of_its_own_nothing_is_kept() -> None:
    optimizer = Optimizer(overlap=False)
    keep_until_reduced(optimizer)
    optimizer.clear_grad_attribute(torch.zeros(3))
    assert optimizer.events == ["cleared 3"]
    for other in (None, SimpleNamespace(overlap_comm=True), SimpleNamespace(reduction_stream="s", overlap_comm=True)):
        keep_until_reduced(other)  # stages 0 and 3 have neither


class Stream:
    def __init__(self) -> None:
        self.waits_for: list[str] = []

    def wait_stream(self, stream: str) -> None:
        self.waits_for.append(stream)


def test_gathers_wait_for_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(current_stream=lambda: "the update"))
    gathers = Stream()
    offload = SimpleNamespace(**{"_DeepSpeedZeRoOffload__allgather_stream": gathers})
    let_gathers_wait(SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=offload), device="cuda"))
    assert gathers.waits_for == ["the update"]
    for optimizer in (None, SimpleNamespace(), SimpleNamespace(parameter_offload=SimpleNamespace())):
        let_gathers_wait(SimpleNamespace(optimizer=optimizer, device="cuda"))


@pytest.mark.parametrize(("device", "expected"), [("cuda", ["step", "wait"]), ("cpu", ["step"])])
def test_a_step_is_followed_by_the_wait_on_devices(
    device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(zero, "let_gathers_wait", lambda engine: order.append("wait"))
    fake = SimpleNamespace(
        device=torch.device(device), step=lambda: order.append("step"), torch_autocast_z0_gradscaler=None
    )
    engine_around(fake).step()
    assert order == expected


def test_groups_of_deepspeed_end_a_wait_when_the_world_does(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded: list[tuple[timedelta, str]] = []
    monkeypatch.setattr(deepspeed_streams, "_set_pg_timeout", lambda limit, group: bounded.append((limit, group)))
    bound_waits(SimpleNamespace(data_parallel_group="copy", seq_data_parallel_group="copy"), 7.5)
    assert bounded == [(timedelta(seconds=7.5), "copy")]
    bounded.clear()
    bound_waits(SimpleNamespace(data_parallel_group="copy", seq_data_parallel_group="other"), 1)
    assert sorted(group for _, group in bounded) == ["copy", "other"]
    bound_waits(SimpleNamespace(data_parallel_group=None, seq_data_parallel_group=None), 1)
    assert len(bounded) == 2


# Mistakes in a user's file


class DeepSpeedConfigError(Exception):
    pass


class ZeRORuntimeException(Exception):
    pass


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception, bool], Any]:
    """Builds an engine with a DeepSpeed that raises this, for the settings of a user's file or for ours."""
    for name, kind in {"config": DeepSpeedConfigError, "zero.utils": ZeRORuntimeException}.items():
        module = ModuleType(name)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, f"deepspeed.runtime.{name}", module)

    def build(error: Exception, own_file: bool) -> Any:
        def initialize(**_: Any) -> None:
            raise error

        monkeypatch.setattr(zero, "import_deepspeed", lambda: SimpleNamespace(initialize=initialize))
        return zero._initialize(nn.Linear(1, 1), None, {}, own_file=own_file)

    return build


IN_FILES_ONLY = (AssertionError, TypeError, AttributeError, KeyError, ZeRORuntimeException)


@pytest.mark.parametrize("kind", [ValueError, DeepSpeedConfigError, *IN_FILES_ONLY])
def test_whatever_deepspeed_says_of_a_users_file_is_one_line(
    kind: type[Exception], raising: Callable[[Exception, bool], Any]
) -> None:
    with pytest.raises(ValueError, match="DeepSpeed does not take these settings: ") as error:
        raising(kind("two\n  lines"), True)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("lines") or kind is KeyError  # which quotes what it is given
    with pytest.raises(ValueError, match=f"these settings: {kind.__name__}$"):  # it says nothing at all
        raising(kind(), True)


@pytest.mark.parametrize("kind", IN_FILES_ONLY)
def test_the_same_from_our_own_settings_is_a_fault_of_ours(
    kind: type[Exception], raising: Callable[[Exception, bool], Any]
) -> None:
    with pytest.raises(kind):
        raising(kind("a fault"), False)


@pytest.mark.parametrize("own_file", [True, False])
def test_what_is_no_mistake_passes_through(own_file: bool, raising: Callable[[Exception, bool], Any]) -> None:
    with pytest.raises(RuntimeError, match="the device is gone"):
        raising(RuntimeError("the device is gone"), own_file)

"""Strategies and models that do not go together, how a model is compiled under one, and what is said beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from odd_models import Layer, frozen, plain, scalar
from torch import nn

from scaling.config import (
    DDPConfig,
    DeepSpeedConfig,
    FSDPConfig,
    PrecisionConfig,
    SingleConfig,
    StrategyConfig,
    TrainConfig,
    Zero0Config,
    Zero1Config,
    Zero2Config,
    Zero3Config,
)
from scaling.engine import _compile, check_pair
from scaling.engine.notes import notes
from scaling.measure.layout import Layout, Weight
from scaling.workload import Workload

SHARING = (FSDPConfig(), Zero1Config(), Zero2Config(), Zero3Config())
WHOLE = (SingleConfig(), DDPConfig(), Zero0Config())
HALF_FILE = DeepSpeedConfig(settings={"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})


def a_config(strategy: StrategyConfig, precision: str = "fp32", gather: str = "auto", **changes: Any) -> TrainConfig:
    return TrainConfig(strategy=strategy, precision=PrecisionConfig(precision, gather=gather), **changes)


def a_file(**sections: Any) -> DeepSpeedConfig:
    return DeepSpeedConfig(config="ds.json", settings=sections)


def images() -> Workload:
    """Without batch normalisation, which is refused for another reason."""
    return Workload(nn.Conv2d(3, 1, 1), lambda m, t: (m(t["images"]).sum(), 1), lambda n, g: {}, (), image_size=8)


def normalised() -> Workload:
    return Workload(nn.BatchNorm1d(3), lambda m, t: (m(t["x"]).sum(), 1), lambda n, g: {}, ())


def refusal(config: TrainConfig, workload: Workload) -> str:
    with pytest.raises(ValueError, match="strategy=") as error:
        check_pair(config, workload)
    assert "\n" not in str(error.value)
    return str(error.value)


# Refused


@pytest.mark.parametrize("strategy", WHOLE)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_type_to_gather_in_is_refused_where_nothing_is_gathered(strategy: StrategyConfig, precision: str) -> None:
    message = refusal(a_config(strategy, precision, gather="compute"), plain())
    assert message == (
        f"precision.gather=compute: strategy={strategy.name} gathers no weights; leave precision.gather=auto"
    )
    for gather in ("auto", "fp32"):
        check_pair(a_config(strategy, precision, gather=gather), plain())


@pytest.mark.parametrize("strategy", SHARING)
def test_strategies_that_gather_take_a_type(strategy: StrategyConfig) -> None:
    check_pair(a_config(strategy, "bf16", gather="compute"), plain())


@pytest.mark.parametrize("strategy", SHARING)
def test_a_parameter_without_dimensions_cannot_be_shared_out(strategy: StrategyConfig) -> None:
    message = refusal(a_config(strategy), scalar())
    assert message == (
        f"strategy={strategy.name}: parameter gain has no dimensions and cannot be shared out; give it one, [1]"
    )
    for whole in (SingleConfig(), DDPConfig()):
        check_pair(a_config(whole), scalar())


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "fp16"])
def test_half_weights_of_a_users_file_do_not_take_images(name: str) -> None:
    strategy = a_file(**{name: {"enabled": True}})
    precision = "fp16" if name == "fp16" else "bf16"
    message = refusal(a_config(strategy, precision), images())
    assert '"torch_autocast": {"enabled": true, "dtype": "bfloat16"}' in message
    check_pair(a_config(strategy, precision), plain())
    check_pair(a_config(a_file(torch_autocast={"enabled": True, "dtype": "bfloat16"}), "bf16"), images())
    check_pair(a_config(a_file(**{name: {"enabled": False}})), images())


AUTOCAST16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}


@pytest.mark.parametrize(
    ("strategy", "gather", "refused"),
    [
        (Zero1Config(), "fp32", True),
        (Zero2Config(), "fp32", True),
        (Zero3Config(), "fp32", True),
        (Zero2Config(), "auto", False),
        (Zero0Config(), "auto", False),
        (DDPConfig(), "auto", False),
        (FSDPConfig(), "fp32", False),
        (a_file(**AUTOCAST16, zero_optimization={"stage": 1}), "auto", True),
        (a_file(**AUTOCAST16, zero_optimization={"stage": 3}), "auto", True),
        (a_file(**AUTOCAST16), "auto", False),
        (a_file(fp16={"enabled": True}, zero_optimization={"stage": 2}), "auto", False),
    ],
)
def test_fp16_with_float32_weights_is_refused_above_stage_0(
    strategy: StrategyConfig, gather: str, refused: bool
) -> None:
    """Deepspeed would never lower the scale: after the first overflow every step would be left out."""
    config = a_config(strategy, "fp16", gather=gather)
    if not refused:
        check_pair(config, plain())
        return
    message = refusal(config, plain())
    assert "precision=fp16 and float32 weights" in message
    assert "use precision=bf16, or strategy=zero0, ddp or fsdp" in message


def test_batch_normalisation_means_float32_weights_and_so_no_fp16_with_zero() -> None:
    assert "precision=fp16 and float32 weights" in refusal(a_config(Zero2Config(), "fp16"), normalised())
    check_pair(a_config(Zero2Config(), "bf16"), normalised())


# Compiled


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that were compiled."""
    found: list[nn.Module] = []

    def note(module: nn.Module) -> None:
        found.append(module)

    monkeypatch.setattr(nn.Module, "compile", note)
    return found


@pytest.mark.parametrize(
    ("strategy", "whole"),
    [
        *((strategy, True) for strategy in WHOLE),
        *((strategy, False) for strategy in SHARING),
        (HALF_FILE, False),
    ],
)
def test_blocks_are_compiled_one_by_one_where_a_strategy_acts_between_them(
    strategy: StrategyConfig, whole: bool, compiled: list[nn.Module]
) -> None:
    workload = plain()
    _compile(a_config(strategy), workload)
    assert compiled == ([workload.module] if whole else workload.blocks)


def test_a_model_without_blocks_is_compiled_whole(compiled: list[nn.Module]) -> None:
    workload = normalised()
    _compile(a_config(FSDPConfig()), workload)
    assert compiled == [workload.module]


# Said


@pytest.fixture(autouse=True)
def _no_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


def said(config: TrainConfig, workload: Workload | None = None, layout: Layout | None = None) -> list[str]:
    workload = workload or plain()
    return notes(config, workload, layout or Layout.of(workload))


@pytest.mark.parametrize("strategy", [*WHOLE, FSDPConfig(), Zero1Config(), Zero2Config()])
def test_a_strategy_that_does_what_it_says_needs_no_note(strategy: StrategyConfig) -> None:
    assert said(a_config(strategy)) == []


def test_fsdp_without_blocks_gathers_everything_at_once() -> None:
    (note,) = said(a_config(FSDPConfig()), normalised())
    assert note == "fsdp: the model names no block_types, so that all its parameters are gathered at once"


# 400 elements in three parameters, of which 300 are in one
SIZES = Layout([Weight(300, 300, 1, 0), Weight(60, 60, 1, 0), Weight(40, 40, 1, None)])


@pytest.mark.parametrize(
    ("threshold", "share"),
    [(None, "100%"), (300, "100%"), (299, None), (40, None), (0, None)],  # under a half is not worth a word
)
def test_zero_3_says_what_it_keeps_on_every_rank(threshold: int | None, share: str | None) -> None:
    found = said(a_config(Zero3Config(param_persistence_threshold=threshold)), layout=SIZES)
    if share is None:
        assert found == []
        return
    (note,) = found
    named = "100,000" if threshold is None else "300"
    assert f"parameters of up to {named} elements, {share} of this model, stay gathered" in note
    assert "strategy.param_persistence_threshold=0" in note


def test_zero_3_keeps_no_more_than_the_whole_of_a_model_that_is_mostly_frozen() -> None:
    (note,) = said(a_config(Zero3Config()), frozen())  # 199 parameters, 49 of which train
    assert ", 100% of this model, stay gathered" in note


@pytest.mark.parametrize(
    ("strategy", "precision", "idle"),
    [
        (Zero1Config(), "bf16", True),
        (Zero1Config(), "fp32", False),
        (Zero1Config(), "fp16", False),
        (Zero1Config(overlap=False), "bf16", False),
        (Zero1Config(offload_optimizer=True), "bf16", False),
        (Zero2Config(), "bf16", False),
    ],
)
def test_deepspeeds_optimizer_for_bf16_overlaps_nothing(strategy: StrategyConfig, precision: str, idle: bool) -> None:
    found = [note for note in said(a_config(strategy, precision)) if note.startswith("zero1")]
    expected = "zero1 with bf16: DeepSpeed reduces after backward, in one bucket; overlap and bucket_mb are idle"
    assert found == [expected] * idle


def test_float32_weights_under_autocast_overlap() -> None:
    assert said(a_config(Zero1Config(), "bf16", gather="fp32")) == []
    assert said(a_config(Zero1Config(), "bf16"), normalised()) == []


@pytest.mark.parametrize("strategy", [Zero1Config(offload_optimizer=True), Zero2Config(offload_optimizer=True)])
def test_an_update_on_one_thread_of_the_host_is_said(strategy: StrategyConfig) -> None:
    (note,) = said(a_config(strategy))
    assert note.startswith("offload: the update runs on threads=1 of the host")
    assert said(a_config(strategy, threads=4)) == []


def test_compiled_zero_3_says_that_its_graphs_break() -> None:
    cut = Zero3Config(param_persistence_threshold=0)
    (note,) = said(a_config(cut, compile=True))
    assert note.startswith("zero3 with compile: DeepSpeed's hooks break the graph")
    assert said(a_config(Zero2Config(), compile=True)) == []


@pytest.mark.parametrize(
    ("strategy", "asked"), [(Zero0Config(), True), (Zero2Config(), True), (DDPConfig(), False), (FSDPConfig(), False)]
)
def test_the_lock_of_a_compilation_is_said_before_a_run_waits_for_it(
    strategy: StrategyConfig, asked: bool, tmp_path: Path
) -> None:
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    found = said(a_config(strategy))
    assert len(found) == asked
    assert not asked or f"if nobody does, remove {lock}" in found[0]


# Blocks


def test_a_block_in_two_places_is_one_block() -> None:
    first, second = Layer(), Layer()
    module = nn.Sequential(first, second, first)
    workload = Workload(module, lambda m, t: (torch.zeros(()), 1), lambda n, g: {}, (Layer,))
    assert workload.blocks == [first, second]


def test_a_block_with_nothing_to_train_is_none() -> None:
    workload = frozen()
    assert workload.blocks == [workload.module.get_submodule("layers.1")]

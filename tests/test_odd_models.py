"""Models as users bring them, over two ranks: every strategy trains them alike, and sends what was expected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_models import MODELS
from odd_worker import CASES, STRATEGIES

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("deepspeed_compiled")]

WORKER = Path(__file__).with_name("odd_worker.py")
Case = tuple[str, str, str]
Facts = dict[str, Any]
FP32 = [case for case in CASES if case[2] == "fp32"]


@pytest.fixture(scope="module")
def everyone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Case, Facts]]:
    """What both ranks saw of every model under every strategy."""
    folder = tmp_path_factory.mktemp("odd")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder / "store"), str(folder / "out.pt")],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    failures = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(failures)
    found: list[dict[Case, Facts]] = torch.load(folder / "out.pt", weights_only=False)
    return found


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_what_is_sent_is_what_was_expected(everyone: list[dict[Case, Facts]], case: Case) -> None:
    for rank in everyone:
        facts = rank[case]
        assert facts["holds"], (facts["tensor_bytes"], facts["syncs"], facts["volume"])


@pytest.mark.parametrize("case", FP32, ids="-".join)
def test_every_strategy_sees_the_same_losses(everyone: list[dict[Case, Facts]], case: Case) -> None:
    _, model, precision = case
    reference = everyone[0]["deferred", model, precision]["losses"]
    assert len(set(reference)) == len(reference), "it trains"
    assert [rank[case]["losses"] for rank in everyone] == [pytest.approx(reference, rel=1e-5)] * 2


@pytest.mark.parametrize("name", STRATEGIES)
def test_buffers_that_differed_before_are_those_of_rank_0(everyone: list[dict[Case, Facts]], name: str) -> None:
    (first, after_first), (second, after_second) = (rank[name, "plain", "fp32"]["buffers"] for rank in everyone)
    assert not torch.equal(first, second), "each rank had evaluated its own samples"
    assert torch.equal(after_first, first) and torch.equal(after_second, first)


@pytest.mark.parametrize(
    ("model", "elements"),
    [("plain", (199, 199)), ("frozen", (49, 199)), ("unused", (241, 241)), ("shared", (115, 115))],
)
def test_what_trains_is_told_from_what_is_there(
    everyone: list[dict[Case, Facts]], model: str, elements: tuple[int, int]
) -> None:
    for name in STRATEGIES:
        assert everyone[0][name, model, "fp32"]["elements"] == elements


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "zero0"])
def test_parameters_without_gradient_are_counted(everyone: list[dict[Case, Facts]], name: str) -> None:
    assert {model: everyone[0][name, model, "fp32"]["unused"] for model in MODELS} == {
        "plain": 0,
        "frozen": 0,  # these have none to get
        "unused": 42,
        "shared": 0,
    }


def test_deepspeed_without_zero_reduces_zeros_for_parameters_without_gradient(
    everyone: list[dict[Case, Facts]],
) -> None:
    facts = everyone[0]["zero0", "unused", "fp32"]
    assert facts["unused"] == 0
    assert facts["tensor_bytes"] == {"all_reduce": 241 * 4.0}


def test_frozen_parameters_are_never_reduced(everyone: list[dict[Case, Facts]]) -> None:
    """49 train: 42 and 6 divide by two ranks, and the 1 is padded to 2."""
    sent = {name: everyone[0][name, "frozen", "fp32"]["tensor_bytes"] for name in STRATEGIES}
    reduced = {name: sum(size for kind, size in found.items() if "reduce" in kind) for name, found in sent.items()}
    once = dict.fromkeys(("deferred", "zero0", "zero1"), 49 * 4.0)
    # Scattered twice, at half the bytes; FSDP cuts rows, so that the head's single row of 6 is padded to 2.
    assert reduced == once | {"zero2": 2 * 49 * 4.0, "zero3": 2 * 50 * 2.0, "fsdp": 2 * 56 * 2.0}

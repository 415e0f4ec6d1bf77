"""Loss scaling over two ranks: the whole step is unscaled and clipped once, or left out once, on all ranks (C37)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scaling_worker import CASES, GROWS, STRATEGIES

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("deepspeed_compiled")]

WORKER = Path(__file__).with_name("scaling_worker.py")
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def everyone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Facts]]:
    """What both ranks saw of every strategy in every scenario."""
    folder = tmp_path_factory.mktemp("scaling")
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
    found: list[dict[tuple[str, str], Facts]] = torch.load(folder / "out.pt")
    return found


@pytest.fixture(params=STRATEGIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def all_ranks(everyone: list[dict[tuple[str, str], Facts]], name: str, scenario: str) -> list[Facts]:
    return [rank[name, scenario] for rank in everyone]


def scales(steps: list[float], before: float = 2.0**16) -> list[float]:
    """Four micro-steps under the scale that the step before left, and then what the step made of it."""
    expected = []
    for after in steps:
        expected += [before] * 4 + [after]
        before = after
    return expected


def test_a_step_is_unscaled_and_clipped_once(everyone: list[dict[tuple[str, str], Facts]], name: str) -> None:
    for facts in all_ranks(everyone, name, "clipped"):
        (weight,) = facts["weights"]
        assert float(weight.norm()) == pytest.approx(1.0, rel=1e-3)  # of a true norm of 2.0
        assert torch.allclose(weight, torch.full((16,), -0.25), rtol=1e-3)
        assert facts["unscaled"] == 1
        assert facts["skipped"] == [0]
        assert facts["scales"] == scales([2.0**16])


@pytest.mark.parametrize(
    ("scenario", "element"),
    [
        ("first shard", 0.5),
        ("last shard, clipped", 0.25),
        ("first shard, adamw", 1.0),  # its very first step, whatever was skipped before
    ],
)
def test_an_infinity_of_one_rank_in_one_shard_skips_the_step_of_all_once(
    everyone: list[dict[tuple[str, str], Facts]], name: str, scenario: str, element: float
) -> None:
    for facts in all_ranks(everyone, name, scenario):
        after, good = facts["weights"]
        assert torch.equal(after, torch.zeros(16)), "nothing moved"
        assert facts["skipped"] == [1, 1]
        assert facts["scales"] == scales([2.0**15, 2.0**15])
        assert torch.allclose(good, torch.full((16,), -element), rtol=1e-3), "and nothing was left over"


@pytest.mark.parametrize("grows", GROWS)
def test_a_scale_that_grows_changes_after_a_step_that_is_as_any_other(
    everyone: list[dict[tuple[str, str], Facts]], grows: str
) -> None:
    for facts in all_ranks(everyone, grows, "growing"):
        assert facts["scales"] == scales([2.0**power for power in (16, 17, 17, 18, 18)])
        assert facts["skipped"] == [0] * 5
        moved = [float(weight[0]) for weight in facts["weights"]]
        assert moved == pytest.approx([-number * 2.0**-8 for number in (1, 2, 3, 4, 5)], rel=1e-3)


def test_every_scenario_was_run_by_both(everyone: list[dict[tuple[str, str], Facts]]) -> None:
    assert [set(rank) for rank in everyone] == [set(CASES)] * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_own_scale_never_grows(everyone: list[dict[tuple[str, str], Facts]], stage: int) -> None:
    """DeepSpeed 0.19 would double it first, and divide the gradients of that step by the doubled one."""
    settings = everyone[0][f"zero{stage}", "clipped"]["settings"]
    given = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2**31 - 1, "hysteresis": 1}
    assert settings["fp16"] == {"enabled": True, **given, "min_loss_scale": 1}
    assert f"zero{stage}" in STRATEGIES and f"zero{stage}" not in GROWS

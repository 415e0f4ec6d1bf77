"""Every way to reach one global batch trains the same; every sabotaged engine is caught. One launch per world size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.ranks

WORKER = Path(__file__).with_name("parity_worker.py")
Case = dict[str, Any]


def launch(world_size: int, folder: Path) -> dict[str, Case]:
    output = folder / f"{world_size}.pt"
    command = [sys.executable, str(WORKER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(folder / f"store{world_size}"), str(output)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    failures = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(failures)
    results: dict[str, Case] = torch.load(output)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Case]]:
    folder = tmp_path_factory.mktemp("parity")
    return {world_size: launch(world_size, folder) for world_size in (1, 2, 4)}


def worst(case: Case, reference: Case) -> float:
    """The largest distance over tensors, as a multiple of what MEASURING.md ("Same training") allows.

    A bias of keys adds the same to all scores of a query: its gradient is zero, and rounding is all that moves it.
    """
    ratios = []
    for name, expected in reference["end"].items():
        if name.endswith("key.bias"):
            assert max(float(end[name].norm()) for end in (case["end"], reference["end"])) < 1e-9
            continue
        distance = (case["end"][name] - expected).norm()
        allowed = 1e-5 * (expected - reference["start"][name]).norm() + 1e-7 * expected.norm()
        ratios.append(float(distance / allowed))
    return max(ratios)


def test_the_reference_moves_its_weights_far_enough_to_tell(results: dict[int, dict[str, Case]]) -> None:
    for lengths in ("fixed", "mixed"):
        reference = results[1][f"8x1-{lengths}"]
        moved = sum(float((reference["end"][n] - p).norm() ** 2) for n, p in reference["start"].items()) ** 0.5
        size = sum(float(p.norm() ** 2) for p in reference["start"].values()) ** 0.5
        assert moved > 1e-3 * size


@pytest.mark.parametrize("lengths", ["fixed", "mixed"])
@pytest.mark.parametrize(("world_size", "shape"), [(1, "2x4"), (2, "4x1"), (2, "1x4"), (4, "1x2")])
def test_trains_the_same(results: dict[int, dict[str, Case]], world_size: int, shape: str, lengths: str) -> None:
    reference, case = results[1][f"8x1-{lengths}"], results[world_size][f"{shape}-{lengths}"]
    assert worst(case, reference) <= 1
    assert case["losses"] == pytest.approx(reference["losses"], rel=1e-5)


def test_single_is_ddp_on_one_device_to_the_bit(results: dict[int, dict[str, Case]]) -> None:
    single, ddp = results[1]["single"], results[1]["2x4-mixed"]
    assert all(torch.equal(single["end"][name], ddp["end"][name]) for name in ddp["end"])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_without_overlap_trains_the_same(results: dict[int, dict[str, Case]], world_size: int) -> None:
    case = results[world_size]["deferred"]
    assert worst(case, results[1]["8x1-mixed"]) <= 1
    assert case["syncs"] == (1 if world_size > 1 else case["syncs"])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_checkpointing_trains_the_same(results: dict[int, dict[str, Case]], world_size: int) -> None:
    assert worst(results[world_size]["checkpointed"], results[1]["8x1-mixed"]) <= 1


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("model", ["bert_small", "llama_small"])
def test_other_models_train_the_same(results: dict[int, dict[str, Case]], model: str, world_size: int) -> None:
    reference, case = results[1][model], results[world_size][model]  # with padding, and masks from the sample's index
    assert worst(case, reference) <= 1
    assert case["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert case["reduced"] and case["agree"] and case["syncs"] == 1


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_clips_the_norm_of_the_whole_step(results: dict[int, dict[str, Case]], world_size: int) -> None:
    assert worst(results[world_size]["clipped"], results[1]["8x1-clipped"]) <= 1
    assert worst(results[world_size]["clipped"], results[1]["8x1-mixed"]) > 1


@pytest.mark.parametrize("world_size", [2, 4])
def test_reducing_in_bf16_halves_the_bytes_and_stays_close(
    results: dict[int, dict[str, Case]], world_size: int
) -> None:
    case, full = results[world_size]["bf16-reduce"], results[world_size]["clipped"]
    assert case["bytes"]["all_reduce"] == full["bytes"]["all_reduce"] / 2
    assert case["agree"] and case["reduced"]
    reference = results[1]["8x1-mixed"]
    assert case["losses"] == pytest.approx(reference["losses"], rel=1e-2)
    assert worst(case, reference) > 1  # bf16 is not fp32


@pytest.mark.parametrize(("world_size", "shape"), [(2, "4x1"), (2, "1x4"), (4, "1x2")])
def test_ddp_reduces_every_gradient_once_per_step(
    results: dict[int, dict[str, Case]], world_size: int, shape: str
) -> None:
    case = results[world_size][f"{shape}-fixed"]
    n = world_size
    assert case["syncs"] == 1
    assert case["bytes"] == {"all_reduce": 2 * (n - 1) / n * 4 * case["parameters"]}
    assert case["reduced"] and case["agree"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_accumulating_ddp_keeps_its_gradients_in_the_buckets(
    results: dict[int, dict[str, Case]], world_size: int
) -> None:
    accumulating, at_once = ("2x4-fixed", "8x1-fixed") if world_size == 1 else ("1x4-fixed", "4x1-fixed")
    assert results[world_size][accumulating]["gradient_storages"] == 1  # all in the one bucket of so small a model
    assert results[world_size][at_once]["gradient_storages"] == 0  # dropped: nothing to add to


def test_nothing_in_a_step_makes_the_host_wait(results: dict[int, dict[str, Case]]) -> None:
    for cases in results.values():
        for name, case in cases.items():
            assert case["host_syncs"] == 0, name


@pytest.mark.parametrize("lengths", ["fixed", "mixed"])
def test_an_engine_that_never_reduces_is_caught(results: dict[int, dict[str, Case]], lengths: str) -> None:
    case = results[2][f"NeverReduces-{lengths}"]
    assert not case["reduced"] and not case["agree"] and case["syncs"] == 0
    assert worst(case, results[1][f"8x1-{lengths}"]) > 100


@pytest.mark.parametrize("sabotage", ["AlwaysReduces", "ForwardOutside"])
def test_an_engine_that_reduces_at_every_micro_step_is_caught(
    results: dict[int, dict[str, Case]], sabotage: str
) -> None:
    assert results[2][f"{sabotage}-fixed"]["syncs"] == 4
    honest = results[2]["1x4-fixed"]["bytes"]["all_reduce"]
    assert results[2][f"{sabotage}-fixed"]["bytes"]["all_reduce"] == 4 * honest


@pytest.mark.parametrize("lengths", ["fixed", "mixed"])
def test_a_loss_that_is_not_divided_is_caught(results: dict[int, dict[str, Case]], lengths: str) -> None:
    assert worst(results[2][f"Undivided-{lengths}"], results[1][f"8x1-{lengths}"]) > 100


def test_a_loss_normalised_per_micro_batch_is_caught_by_mixed_lengths(results: dict[int, dict[str, Case]]) -> None:
    assert worst(results[2]["PerMicroBatch-mixed"], results[1]["8x1-mixed"]) > 100
    assert worst(results[2]["PerMicroBatch-fixed"], results[1]["8x1-fixed"]) <= 1  # why fixed lengths do not suffice

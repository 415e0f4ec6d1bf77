"""Every way to reach one global batch trains the same; every sabotaged engine is caught. One launch per world size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.ranks

WORKER = Path(__file__).with_name("parity_worker.py")
Case = dict[str, Any]


SHARDED = ("fsdp", "zero0", "zero1", "zero2", "zero3")
VARIANTS = (
    *("fsdp-kept", "fsdp-coalesced", "zero2-deepspeed", "zero2-coalesced"),
    *("zero3-kept", "zero3-reused", "zero3-coalesced"),
)
SHAPES = [(2, "4x1"), (2, "1x4"), (4, "2x1"), (4, "1x4")]


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
    failures = [rank.communicate(timeout=280)[1] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(failures)
    results: dict[str, Case] = torch.load(output, weights_only=False)  # our own file, with our own types in it
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
            own = name.startswith(("zero1", "zero2", "zero3"))  # DeepSpeed reads the norm of the gradients, or two
            assert case["host_syncs"] <= (2 if own else 0), name


@pytest.mark.parametrize("strategy", [*SHARDED, *VARIANTS])
@pytest.mark.parametrize(("world_size", "shape"), SHAPES)
def test_every_strategy_trains_the_same(
    results: dict[int, dict[str, Case]], strategy: str, world_size: int, shape: str
) -> None:
    case = results[world_size][f"{strategy}-{shape}"]
    reference = results[1]["16x1-mixed" if (world_size, shape) == (4, "1x4") else "8x1-mixed"]
    assert worst(case, reference) <= 1
    assert case["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert case["reduced"]


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2", "zero3"])
def test_a_strategy_on_one_device_trains_the_same(results: dict[int, dict[str, Case]], strategy: str) -> None:
    assert worst(results[1][f"{strategy}-2x4"], results[1]["8x1-mixed"]) <= 1


@pytest.mark.parametrize("strategy", SHARDED)
def test_every_strategy_clips_the_norm_of_the_whole_step(results: dict[int, dict[str, Case]], strategy: str) -> None:
    assert worst(results[2][f"{strategy}-0.05"], results[1]["8x1-clipped"]) <= 1


@pytest.mark.parametrize("strategy", SHARDED)
def test_every_strategy_trains_the_same_with_checkpointing(results: dict[int, dict[str, Case]], strategy: str) -> None:
    case = results[2][f"{strategy}-True"]
    assert worst(case, results[1]["8x1-mixed"]) <= 1
    assert case["volume"].holds(counted(case))


@pytest.mark.parametrize("strategy", ["ddp", "deferred", *SHARDED])
def test_in_bf16_all_agree_within_its_rounding(results: dict[int, dict[str, Case]], strategy: str) -> None:
    """Weights that are kept as bfloat16 to compute with differ by up to 2^-9 of their size before the first step."""
    case, reference = results[2][f"{strategy}-bf16"], results[1]["bf16"]
    kept = strategy in ("zero1", "zero2", "zero3")
    for name, expected in reference["end"].items():
        moved = (expected - reference["start"][name]).norm()
        allowed = 0.03 * moved + (2**-9 * reference["start"][name].norm() if kept else 0)
        assert (case["end"][name] - expected).norm() <= allowed, name
    assert case["losses"] == pytest.approx(reference["losses"], rel=2e-3)


@pytest.mark.parametrize(
    ("strategy", "gathered"),
    [("zero0", None), ("zero1", "bfloat16"), ("zero2", "bfloat16"), ("zero3", "bfloat16"), ("fsdp", "bfloat16")],
)
def test_what_travels_is_of_the_type_that_the_record_says(
    results: dict[int, dict[str, Case]], strategy: str, gathered: str | None
) -> None:
    full, half = results[2][f"{strategy}-bf16"], results[2][f"{strategy}-bf16-bf16"]
    travels = None if gathered is None else f"torch.{gathered}"
    assert full["dtypes"] == ["torch.float32", str(travels), "torch.float32"]
    assert half["dtypes"] == ["torch.float32", str(travels), "torch.bfloat16"]
    reduction = "reduce_scatter" if strategy in ("fsdp", "zero3") else "all_reduce"
    assert half["tensor_bytes"][reduction] == full["tensor_bytes"][reduction] / 2
    plain = results[2][f"{strategy}-1x4"]
    if gathered is not None:
        assert full["tensor_bytes"]["all_gather"] == plain["tensor_bytes"]["all_gather"] / 2


@pytest.mark.parametrize("strategy", [*SHARDED, *VARIANTS])
@pytest.mark.parametrize(("world_size", "shape"), SHAPES)
def test_what_is_sent_is_what_was_computed(
    results: dict[int, dict[str, Case]], strategy: str, world_size: int, shape: str
) -> None:
    case = results[world_size][f"{strategy}-{shape}"]
    assert case["volume"].holds(counted(case))
    assert case["gradient_elements"] == case["parameters"] == case["volume"].elements
    assert case["volume"].bytes.keys() == case["tensor_bytes"].keys()


def counted(case: Case) -> Any:
    """The count of a case, as far as an expectation looks at it."""
    return SimpleNamespace(**{name: case[name] for name in ("syncs", "tensor_bytes", "gradient_elements")})


@pytest.mark.parametrize("world_size", [2, 4])
def test_syncs_and_bytes_by_hand(results: dict[int, dict[str, Case]], world_size: int) -> None:
    """4 P (n-1)/n bytes are one pass of all float32 parameters or gradients; an all-reduce is two."""
    cases, n = results[world_size], world_size
    one_pass = 4 * cases["zero2-1x4"]["parameters"] * (n - 1) / n

    def sent(name: str) -> dict[str, float]:
        return {kind: size / one_pass for kind, size in cases[f"{name}-1x4"]["tensor_bytes"].items()}

    assert sent("zero0") == pytest.approx({"all_reduce": 2})
    assert sent("zero1") == pytest.approx({"all_reduce": 2, "all_gather": 1})
    assert sent("zero2") == pytest.approx({"all_reduce": 8, "all_gather": 1})
    assert sent("zero2-coalesced") == pytest.approx({"all_reduce": 2, "all_gather": 1})
    assert sent("zero3-kept") == pytest.approx({"reduce_scatter": 4, "all_gather": 1})
    assert sent("zero3-reused") == pytest.approx({"reduce_scatter": 4, "all_gather": 4})
    assert sent("fsdp-kept") == pytest.approx({"reduce_scatter": 4, "all_gather": 4})
    assert sent("fsdp-coalesced")["reduce_scatter"] == pytest.approx(1)
    assert 4 < sent("fsdp")["all_gather"] < 8  # blocks twice, the rest once, per micro-step
    assert sent("zero3")["all_gather"] > 8  # all twice, the tied embedding four times
    syncs = {name: cases[f"{name}-1x4"]["syncs"] for name in [*SHARDED, *VARIANTS]}
    once = ("zero0", "zero1", "fsdp-coalesced", "zero2-coalesced", "zero3-coalesced")
    assert syncs == {name: 1 if name in once else 4 for name in syncs}


@pytest.mark.parametrize("strategy", SHARDED)
def test_without_a_reduction_every_strategy_is_caught(results: dict[int, dict[str, Case]], strategy: str) -> None:
    case = results[2][f"{strategy}-unreduced"]
    assert worst(case, results[1]["8x1-mixed"]) > 100
    assert not case["reduced"] and case["syncs"] == 0
    assert not case["volume"].holds(counted(case))


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("sabotage", ["undivided", "per_micro_batch"])
def test_a_wrong_loss_is_caught_with_every_strategy(
    results: dict[int, dict[str, Case]], strategy: str, sabotage: str
) -> None:
    assert worst(results[2][f"{strategy}-{sabotage}"], results[1]["8x1-mixed"]) > 100


@pytest.mark.parametrize("strategy", ["fsdp-coalesced", "zero0", "zero1", "zero2", "zero3"])
def test_a_step_that_never_sees_its_last_micro_batch_trains_nothing(
    results: dict[int, dict[str, Case]], strategy: str
) -> None:
    case = results[2][f"{strategy}-never_last"]
    assert worst(case, results[1]["8x1-mixed"]) > 100
    if strategy != "zero3":  # which gathers and reduces as ever, and only does not update
        assert not case["volume"].holds(counted(case))


@pytest.mark.parametrize(
    ("strategy", "loses"),
    [("zero0", False), ("fsdp-coalesced", False), ("zero1", True), ("zero2", True), ("zero3", False)],
)
def test_a_boundary_at_every_micro_step_is_caught(
    results: dict[int, dict[str, Case]], strategy: str, loses: bool
) -> None:
    """C17: a loop that accumulates by hand around ZeRO-1 or 2 keeps the last micro-batch only; ZeRO-3 loses none."""
    case = results[2][f"{strategy}-always_last"]
    assert (worst(case, results[1]["8x1-mixed"]) > 100) is loses
    assert case["syncs"] == 4


@pytest.mark.parametrize("world_size", [2, 4])
def test_memory_is_told_apart_as_the_textbook_does(results: dict[int, dict[str, Case]], world_size: int) -> None:
    """Bytes per parameter, SGD in float32. DeepSpeed keeps float32 masters beside float32 weights, a part per rank."""
    cases, n = results[world_size], world_size

    def per_parameter(name: str) -> tuple[float, float, float]:
        case = cases[name]
        terms = case["terms"]
        bytes_held = [term * 2**30 / case["parameters"] for term in (terms.model, terms.gradients, terms.optimizer)]
        return bytes_held[0], bytes_held[1], bytes_held[2]

    slack = 0.15  # of gradients that are still in a bucket, and of padding
    for name, by_hand in {
        "zero0-1x4": (4, 4, 0),
        "zero1-1x4": (4, 4, 4 / n),
        "zero2-1x4": (4, 4 / n, 4 / n),
        "zero3-1x4": (4 / n, 4 / n, 4 / n),
        "zero3-kept-1x4": (4 / n + 4, 4 / n, 4 / n),
        "fsdp-1x4": (4 / n, 4 / n, 0),
        "fsdp-coalesced-1x4": (4 / n, 4, 0),
    }.items():
        assert per_parameter(name) == pytest.approx(by_hand, abs=slack), name


@pytest.mark.parametrize("lengths", ["fixed", "mixed"])
def test_an_engine_that_never_reduces_is_caught(results: dict[int, dict[str, Case]], lengths: str) -> None:
    case = results[2][f"never_last-{lengths}"]
    assert not case["reduced"] and not case["agree"] and case["syncs"] == 0
    assert worst(case, results[1][f"8x1-{lengths}"]) > 100


@pytest.mark.parametrize("sabotage", ["always_last", "forward_outside"])
def test_an_engine_that_reduces_at_every_micro_step_is_caught(
    results: dict[int, dict[str, Case]], sabotage: str
) -> None:
    assert results[2][f"{sabotage}-fixed"]["syncs"] == 4
    honest = results[2]["1x4-fixed"]["bytes"]["all_reduce"]
    assert results[2][f"{sabotage}-fixed"]["bytes"]["all_reduce"] == 4 * honest


@pytest.mark.parametrize("lengths", ["fixed", "mixed"])
def test_a_loss_that_is_not_divided_is_caught(results: dict[int, dict[str, Case]], lengths: str) -> None:
    assert worst(results[2][f"undivided-{lengths}"], results[1][f"8x1-{lengths}"]) > 100


def test_a_loss_normalised_per_micro_batch_is_caught_by_mixed_lengths(results: dict[int, dict[str, Case]]) -> None:
    assert worst(results[2]["per_micro_batch-mixed"], results[1]["8x1-mixed"]) > 100
    assert worst(results[2]["per_micro_batch-fixed"], results[1]["8x1-fixed"]) <= 1  # why fixed lengths do not suffice


DOCS = Path(__file__).parents[1] / "docs" / "strategies.md"
SHOWN = (
    *("zero0", "zero1", "zero2", "zero2-coalesced", "zero3-kept", "zero3-reused", "zero3"),
    *("fsdp", "fsdp-kept", "fsdp-coalesced"),
)
LABELS = {
    "zero2-coalesced": "`zero2`, coalesced",
    "zero3-kept": "`zero3`, DeepSpeed's thresholds",
    "zero3-reused": "`zero3`, `param_persistence_threshold=0`",
    "zero3": "`zero3`, all thresholds 0",
    "fsdp-kept": "`fsdp`, `reshard=false`",
    "fsdp-coalesced": "`fsdp`, coalesced",
}


def test_the_tables_of_the_documentation_are_what_was_measured(results: dict[int, dict[str, Case]]) -> None:
    tables = sent_table(results), held_table(results)
    print(*tables, sep="\n\n")
    assert all(table in DOCS.read_text() for table in tables)


def sent_table(results: dict[int, dict[str, Case]]) -> str:
    """Accumulation 4: passes per step, which are the same for 2 and 4 ranks but for padding."""
    rows = ["| k = 4 | reductions | all_reduce | reduce_scatter | all_gather | expected | textbook |", "|" + "---|" * 7]
    for name in SHOWN:
        case = results[2][f"{name}-1x4"]
        one_pass = 4 * case["parameters"] / 2
        passes = [case["tensor_bytes"].get(k, 0) / one_pass for k in ("all_reduce", "reduce_scatter", "all_gather")]
        expected, textbook = sum(case["volume"].bytes.values()) / one_pass, case["volume"].textbook / one_pass
        cells = [f"{value:.2f}" for value in (*passes, expected, textbook)]
        rows.append(f"| {LABELS.get(name, f'`{name}`')} | {case['syncs']} | {' | '.join(cells)} |")
    return "\n".join(rows)


def held_table(results: dict[int, dict[str, Case]]) -> str:
    rows = ["| ranks | strategy | model | gradients | optimizer | gathered after forward |", "|" + "---|" * 6]
    for ranks in (2, 4):
        for name in SHOWN:
            case = results[ranks][f"{name}-1x4"]
            terms, textbook = case["terms"], case["textbook"]
            held = [getattr(terms, key) * 2**30 / case["parameters"] for key in ("model", "gradients", "optimizer")]
            cells = [f"{value:.2f} / {book:.4g}" for value, book in zip(held, textbook.values(), strict=True)]
            gathered = terms.gathered * 2**30 / case["parameters"]
            label = LABELS.get(name, f"`{name}`")
            rows.append(f"| {ranks} | {label} | {' | '.join(cells)} | {gathered:.2f} |")
    return "\n".join(rows)

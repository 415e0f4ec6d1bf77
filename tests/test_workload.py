"""Models and data: sizes, FLOPs, host synchronisation, attention, and text samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import model

from scaling.config import BatchConfig, ModelConfig, SyntheticConfig, TextConfig
from scaling.measure.clock import HostClock
from scaling.measure.loop import Slots, TrainingLoop
from scaling.workload import Batch, Workload, build, source_digest
from scaling.workload.contract import check_loss
from scaling.workload.flops import count_flops
from scaling.workload.loader import Place, open_source
from scaling.workload.text import Text, read_text, text_files, text_path

CPU = torch.device("cpu")


def tiny(**changes: Any) -> Workload:
    arguments = {"layers": 2, "hidden_size": 32, "heads": 2, "vocabulary": 256}
    return build(model("gpt_tiny", args=arguments, sequence_length=16, **changes), CPU, seed=0)


def test_flops_of_a_small_gpt_by_hand() -> None:
    layers, hidden, heads, vocabulary, length = 4, 128, 4, 256, 128
    products = layers * (3 + 1 + 4 + 4) * hidden * hidden + vocabulary * hidden  # qkv, projection, two MLP layers, head
    attention = layers * 2 * length * hidden  # per position: scores and weighted values, over all `length` positions
    forward = 2 * length * (products + attention)
    assert heads * (hidden // heads) == hidden
    assert count_flops(model("gpt_tiny"), 5) == 5 * 3 * forward  # backward computes two products for each one


def test_weights_depend_on_the_seed_alone() -> None:
    first, second = tiny(), tiny()
    other = build(model("gpt_tiny"), CPU, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True))
    assert not torch.equal(next(build(model("gpt_tiny"), CPU, 0).module.parameters()), next(other.module.parameters()))


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_is_causal_without_a_mask(compiled: bool) -> None:
    module = tiny().module.eval()
    masks: list[bool] = []

    def inspect(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        masks.extend(node.kwargs.get("attn_mask") is not None or len(node.args) > 3 for node in calls)
        assert calls and all(node.kwargs["is_causal"] is True for node in calls)
        return graph.forward

    forward: Any = torch.compile(module, backend=inspect, fullgraph=True) if compiled else module
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    with torch.no_grad():
        before, after = forward(input_ids=tokens).logits, forward(input_ids=changed).logits
    assert torch.equal(before[:, :10], after[:, :10])  # the future is not seen
    assert not torch.allclose(before[:, 10:], after[:, 10:])
    if compiled:
        assert masks and not any(masks)


def test_dropout_reaches_the_model() -> None:
    workload = tiny(dropout=0.5)
    tensors = workload.synthetic(2, torch.Generator())
    first, second = (workload.loss(workload.module, tensors)[0] for _ in range(2))
    assert float(first.detach()) != float(second.detach())


def source(data: Any, batch: BatchConfig, rank: int, world_size: int) -> Any:
    return open_source(data, batch, tiny(), 0, Place(rank, world_size, CPU, []))


def test_synthetic_batches_rotate_and_differ_by_rank() -> None:
    batch = BatchConfig(2, 3, 12)
    mine = source(SyntheticConfig(batches=2), batch, 0, 2)
    others = source(SyntheticConfig(batches=2), batch, 1, 2)
    a, b, c = (next(mine.batches) for _ in range(3))
    assert a is c and not torch.equal(a.tensors["inputs"], b.tensors["inputs"])
    assert not torch.equal(a.tensors["inputs"], next(others.batches).tensors["inputs"])
    assert (a.samples, a.targets, a.step_targets) == (2, 32, 32 * 3 * 2)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("lengths", ["fixed", "mixed"])
def test_step_targets_are_the_targets_of_all_ranks_and_micro_steps(lengths: str, workers: int, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 50)
    data = TextConfig(path=str(tmp_path), lengths=lengths, workers=workers)
    sources = [source(data, BatchConfig(2, 2, 8), rank, 2) for rank in range(2)]
    for _ in range(3):
        batches = [next(s.batches) for s in sources for _ in range(2)]
        counted = [int((b.tensors["targets"] != -100).sum()) for b in batches]
        assert [b.targets for b in batches] == counted
        assert {b.step_targets for b in batches} == {sum(counted)}
        assert [b.samples for b in batches] == [2, 2, 2, 2]


def test_a_sample_is_its_bytes_and_the_next_ones() -> None:
    text = Text(np.frombuffer(b"abcdefghijk", dtype=np.uint8), sequence_length=4)
    assert len(text) == 2
    tensors = text[np.array([1, 0])]
    assert tensors["inputs"].tolist() == [list(b"efgh"), list(b"abcd")]
    assert tensors["targets"].tolist() == [list(b"fghi"), list(b"bcde")]


def test_a_short_sample_is_padded_and_its_padding_is_no_target() -> None:
    text = Text(np.frombuffer(bytes(range(1, 42)), dtype=np.uint8), sequence_length=8, mixed=True)
    indices = np.arange(5)
    tensors, lengths = text[indices], text.targets(indices)
    for row, length in enumerate(lengths):
        assert tensors["targets"][row, :length].tolist() == [row * 8 + i + 2 for i in range(length)]
        assert tensors["targets"][row, length:].tolist() == [-100] * (8 - length)


def test_text_is_read_in_a_fixed_order_without_binaries_and_packages(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("bb")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("zz")
    (tmp_path / "c.bin").write_bytes(b"c\0c")
    (tmp_path / ".hidden").write_text("hh")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "p.py").write_text("pp")
    assert [f.name for f in text_files(tmp_path)] == ["b.txt", "c.bin", "z.txt"]
    assert read_text(tmp_path).tobytes() == b"bbzz"


def test_the_default_text_is_the_standard_library() -> None:
    assert (text_path(None) / "argparse.py").is_file()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("scaling.workload.transformer", "write package.module:function"),
        ("scaling.no_such:f", "No module named"),
        ("scaling.workload.transformer:no_such", "no_such"),
        ("scaling.workload.transformer:IGNORED", "is no function"),
        ("builtins:dict", "not a scaling.workload.Workload"),
    ],
)
def test_a_target_that_is_no_workload_is_named(target: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"model.target={target}.*{message}"):
        build(ModelConfig("m", target), CPU, 0)


def with_width(width: int, dropout: float, depth: int = 1) -> Workload:
    return own(torch.nn.Linear(width, width), None)


@pytest.mark.parametrize(
    ("args", "changes", "message"),
    [
        ({}, {}, "with_width needs `width`: give model.args.width=..."),
        ({"widht": 3}, {}, "model.args.widht: .*takes no such argument; did you mean width\\? it takes width, depth"),
        ({"width": 3}, {"sequence_length": 9}, "model.sequence_length=9: .*with_width takes no sequence_length"),
    ],
)
def test_arguments_of_a_users_function_are_checked_by_name(
    args: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(ModelConfig("m", f"{__name__}:with_width", args=args, **changes), CPU, 0)
    assert build(ModelConfig("m", f"{__name__}:with_width", args={"width": 2}), CPU, 0).parameters == 6


def test_arguments_that_a_target_does_not_take_are_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"model.args.layer: .*gpt2 takes no such argument; did you mean layers\? it takes layers, hidden_size",
    ):
        build(model("gpt_tiny", args={"layer": 1}), CPU, 0)
    for wrong in (0, "many"):
        with pytest.raises(ValueError, match=f"model.args.layers={wrong}: must be a whole number"):
            build(model("gpt_tiny", args={"layers": wrong, "hidden_size": 32, "heads": 2, "vocabulary": 256}), CPU, 0)
    with pytest.raises(ValueError, match="hidden_size=32 does not divide by heads=3"):
        build(model("gpt_tiny", args={"layers": 1, "hidden_size": 32, "heads": 3, "vocabulary": 256}), CPU, 0)


def test_the_loop_notes_every_shape_and_counts_what_it_was_given() -> None:
    class Still:
        skipped = 0

        def accumulate(self, batch: Batch, *, last: bool) -> torch.Tensor:
            return torch.tensor(0.5)

        def step(self) -> None: ...

    def batch(length: int) -> Batch:
        return Batch({"inputs": torch.zeros(2, length)}, samples=2, targets=length, step_targets=9)

    engine: Any = Still()
    loop = TrainingLoop(engine, iter([batch(3), batch(3), batch(4), batch(4)]), accumulation_steps=2, clock=HostClock())
    loop.step()
    assert len(loop.shapes) == 1
    loop.step()
    assert len(loop.shapes) == 2  # C22: with compilation on, the second one is compiled inside the window
    assert [(n.samples, n.targets, float(n.loss)) for n in loop.noted] == [(4, 6, 1.0), (4, 8, 1.0)]


def test_losses_of_many_steps_share_a_few_pieces_of_memory() -> None:
    slots = Slots(chunk=4)
    given = [slots.next(torch.tensor(0.0)).fill_(i) for i in range(10)]
    assert [float(slot) for slot in given] == list(range(10))
    assert len({slot.untyped_storage().data_ptr() for slot in given}) == 3


def own(module: torch.nn.Module, loss: Any) -> Workload:
    return Workload(module, loss, lambda n, g: {"x": torch.rand(n, 3, generator=g)}, ())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, t: (m(t["x"]).square().mean(), t["x"].shape[0]), "a mean would be divided twice"),
        (lambda m, t: (m(t["x"]).square().sum(), 1), "has to be a sum and its count"),
        (lambda m, t: m(t["x"]).square().sum(), r"has to return \(sum, count\), not Tensor"),
    ],
)
def test_a_users_loss_that_is_no_sum_with_its_count_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_loss(own(torch.nn.Linear(3, 3), loss), CPU)


def test_a_users_loss_that_is_one_passes_and_leaves_the_model_training() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    check_loss(own(module, lambda m, t: (m(t["x"]).square().sum(), t["x"].shape[0])), CPU)
    assert module.training


@pytest.mark.parametrize(
    ("synthetic", "count", "message"),
    [
        (lambda n, g: {"x": torch.rand(1, 3)}, lambda t: 1, r"synthetic\(2, ...\) gave `x` of shape \(1, 3\)"),
        (lambda n, g: {"x": torch.rand(n, 3)}, lambda t: 0, r"counts \[0, 0, 0, 0\] terms"),
        (lambda n, g: {"x": torch.rand(n, 3)}, lambda t: int(1e6 * t["x"].sum()), "has to be the same number"),
    ],
)
def test_synthetic_batches_that_would_lie_are_refused(synthetic: Any, count: Any, message: str) -> None:
    workload = Workload(torch.nn.Linear(3, 3), lambda m, t: (m(t["x"]).sum(), count(t)), synthetic, ())
    with pytest.raises(ValueError, match=message):
        open_source(SyntheticConfig(), BatchConfig(2, 1, 2), workload, 0, Place(0, 1, CPU, []))


def test_opening_the_data_leaves_batch_statistics_alone() -> None:
    norm = torch.nn.BatchNorm1d(3)
    workload = own(norm, lambda m, t: (m(t["x"]).sum(), t["x"].shape[0]))
    open_source(SyntheticConfig(), BatchConfig(4, 1, 4), workload, 0, Place(0, 1, CPU, []))
    assert norm.num_batches_tracked is not None and int(norm.num_batches_tracked) == 0
    assert norm.training


def half_precision(sequence_length: int, dropout: float) -> Workload:
    return own(torch.nn.Linear(3, 3).bfloat16(), None)


def test_master_weights_are_float32() -> None:
    with pytest.raises(ValueError, match=r"`weight` is torch.bfloat16; master weights are float32"):
        build(ModelConfig("m", f"{__name__}:half_precision", sequence_length=1), CPU, 0)


def test_flops_that_cannot_be_counted_are_none() -> None:
    assert count_flops(ModelConfig("m", f"{__name__}:half_precision", sequence_length=1), 1) is None


def test_the_code_of_a_users_model_is_named() -> None:
    assert source_digest("scaling.workload.transformer:gpt2") is None
    assert len(source_digest(f"{__name__}:half_precision") or "") == 16


def token_model(length: int, **changes: Any) -> Workload:
    embed = torch.nn.Embedding(256, 256)

    def loss(module: torch.nn.Module, tensors: Any) -> Any:
        logits, targets = module(tensors["inputs"]), tensors["targets"]
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total, targets.numel()

    def synthetic(n: int, generator: torch.Generator) -> Any:
        tokens = torch.randint(256, (n, length + 1), generator=generator)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    return replace(Workload(embed, loss, synthetic, sequence_length=16, vocabulary=256), **changes)


def test_a_users_loss_has_to_count_what_the_data_holds() -> None:
    place = Place(0, 1, CPU, [])
    good = token_model(16)
    per_sample = replace(good, loss=lambda m, t: (good.loss(m, t)[0], len(t["inputs"])))
    for lengths in ("fixed", "mixed"):
        data = TextConfig(lengths=lengths)
        open_source(data, BatchConfig(2, 1, 2), good, 0, place)
        with pytest.raises(ValueError, match="counts 1 terms where this data has 16"):
            open_source(data, BatchConfig(2, 1, 2), per_sample, 0, place)


def test_synthetic_samples_of_another_size_than_the_workload_says_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gave `inputs` of shape \(2, 4\), but the Workload says sequence_length=16"):
        open_source(SyntheticConfig(), BatchConfig(2, 1, 2), token_model(4), 0, Place(0, 1, CPU, []))


def test_a_mask_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="mask_token 256 is not in its vocabulary of 256"):
        open_source(TextConfig(), BatchConfig(2, 1, 2), token_model(16, mask_token=256), 0, Place(0, 1, CPU, []))


@pytest.mark.parametrize(
    ("synthetic", "message"),
    [
        (lambda n, g: [torch.rand(n, 3)], "named tensors, not list"),
        (lambda n, g: {"x": [1] * n}, "named tensors, not dict"),
    ],
)
def test_synthetic_samples_that_are_no_tensors_are_refused(synthetic: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_loss(Workload(torch.nn.Linear(3, 3), lambda m, t: (m(t["x"]).sum(), 1), synthetic), CPU)


def test_what_a_users_loss_raises_is_told_with_its_place() -> None:
    def loss(module: torch.nn.Module, tensors: Any) -> Any:
        first, second = tensors["x"].shape[1:]
        return first, second

    with pytest.raises(RuntimeError, match=r"the loss of model.target raised ValueError: not enough values") as raised:
        check_loss(own(torch.nn.Linear(3, 3), loss), CPU)
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="its sum as one number in a tensor"):
        check_loss(own(torch.nn.Linear(3, 3), lambda m, t: (1.0, 3)), CPU)


def frozen(dropout: float) -> Workload:
    return own(torch.nn.Linear(3, 3).requires_grad_(False), None)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="the model has nothing to train"):
        build(ModelConfig("m", f"{__name__}:frozen"), CPU, 0)

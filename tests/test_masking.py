"""What masked language modelling hides, and that neither rank nor worker decides it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models import model

from scaling.workload import build
from scaling.workload.masking import counts, hidden_positions, hide
from scaling.workload.text import Text


def hidden(indices: Any, seed: int = 0, length: int = 64, longest: int = 64) -> tuple[Any, Any]:
    tokens = np.full((len(indices), longest), 7)
    lengths = np.full(len(indices), length)
    return hide(tokens, np.asarray(indices), lengths, mask_token=256, vocabulary=256, seed=seed)


@pytest.mark.parametrize(("length", "count"), [(512, 77), (128, 19), (100, 15), (10, 2), (3, 1), (1, 1)])
def test_fifteen_percent_are_predicted_and_at_least_one(length: int, count: int) -> None:
    assert hidden_positions(length) == count


def test_masks_come_from_seed_and_index_alone() -> None:
    seen, chosen = hidden([0, 1, 2, 3])
    again, same = hidden([3, 1])
    assert (again == seen[[3, 1]]).all() and (same == chosen[[3, 1]]).all()
    assert (chosen[0] != chosen[1]).any()
    assert (hidden([0], seed=1)[1] != chosen[:1]).any()
    assert chosen.sum(axis=1).tolist() == [10] * 4  # 15 % of 64, rounded


def test_of_the_hidden_eight_tenths_are_masked_one_random_one_kept() -> None:
    seen, chosen = hidden(np.arange(20_000))
    shares = [(seen[chosen] == 256).mean(), (seen[chosen] == 7).mean()]
    assert shares == pytest.approx([0.8, 0.1 + 0.1 / 256], abs=0.005)
    assert (seen[~chosen] == 7).all()
    assert len(np.unique(seen[chosen])) == 257  # every byte, and the mask
    assert chosen.mean(axis=0) == pytest.approx(10 / 64, abs=0.015)  # no place is preferred


def test_padding_is_never_predicted() -> None:
    _, chosen = hidden(np.arange(100), length=9)
    assert not chosen[:, 9:].any()
    assert (chosen.sum(axis=1) == counts(np.array([9]))).all()


def text(**changes: Any) -> Text:
    content = np.arange(2000, dtype=np.int64).astype(np.uint8)
    return Text(content, sequence_length=32, mask_token=256, **changes)


def test_hidden_bytes_are_the_targets_at_their_own_place() -> None:
    indices = np.array([5, 2])
    tensors = text()[indices]
    own = torch.tensor([[(i * 32 + p) % 256 for p in range(32)] for i in indices])
    predicted = tensors["targets"] != -100
    assert torch.equal(tensors["targets"][predicted], own[predicted])
    assert torch.equal(tensors["inputs"][~predicted], own[~predicted])
    assert predicted.sum(dim=1).tolist() == text().targets(indices).tolist() == [5, 5]
    assert set(tensors) == {"inputs", "targets"}


def test_mixed_lengths_come_with_what_is_attended() -> None:
    data = text(mixed=True)
    indices = np.arange(40)
    tensors, lengths = data[indices], data.lengths(indices)
    assert tensors["attended"].sum(dim=1).tolist() == lengths.tolist()
    assert (tensors["targets"] != -100).sum(dim=1).tolist() == data.targets(indices).tolist()
    assert not ((tensors["targets"] != -100) & ~tensors["attended"]).any()
    assert (tensors["inputs"][~tensors["attended"]] == 0).all()


def test_synthetic_samples_all_predict_as_many() -> None:
    workload = build(model("bert_tiny"), torch.device("cpu"), 0)
    made = workload.synthetic(5, torch.Generator().manual_seed(0))
    predicted = made["targets"] != -100
    assert predicted.sum(dim=1).tolist() == [hidden_positions(128)] * 5
    assert (made["inputs"][predicted] == 256).all()
    assert int(workload.loss(workload.module, made)[1]) == 5 * 19

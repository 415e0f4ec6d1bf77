"""Sample order: a function of the step, the same global batch for every world and accumulation."""

from __future__ import annotations

import numpy as np
import pytest

from scaling.workload.order import Order, micro_batch, mixed_lengths


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 4), (2, 1), (2, 4), (4, 2), (8, 1)])
def test_ranks_and_micro_steps_are_slices_of_one_global_batch(world_size: int, accumulation: int) -> None:
    indices = Order(100, 8, seed=3).step(5)
    slices = [
        micro_batch(indices, rank=r, world_size=world_size, micro_step=m, accumulation_steps=accumulation)
        for m in range(accumulation)
        for r in range(world_size)
    ]
    assert {len(s) for s in slices} == {8 // world_size // accumulation}
    assert np.concatenate(slices).tolist() == indices.tolist()


def test_an_epoch_visits_no_sample_twice_and_drops_and_counts_its_leftover() -> None:
    order = Order(10, 4, seed=0)  # C36: ten samples, four a step
    first = np.concatenate([order.step(0), order.step(1)])
    second = np.concatenate([order.step(2), order.step(3)])
    assert order.steps_per_epoch == 2
    assert order.dropped_per_epoch == 2
    assert len(set(first.tolist())) == len(set(second.tolist())) == 8
    assert first.tolist() != second.tolist()  # shuffled by epoch


def test_the_order_depends_on_the_seed_and_nothing_else() -> None:
    assert Order(50, 5, seed=1).step(3).tolist() == Order(50, 5, seed=1).step(3).tolist()
    assert Order(50, 5, seed=1).step(3).tolist() != Order(50, 5, seed=2).step(3).tolist()


def test_data_that_fill_no_global_batch_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"3 samples do not fill one global batch of 4"):
        Order(3, 4, seed=0)


def test_mixed_lengths_come_from_seed_and_index() -> None:
    indices = np.arange(10_000)
    lengths = mixed_lengths(indices, longest=64, seed=0)
    assert (lengths.min(), lengths.max()) == (1, 64)
    assert abs(lengths.mean() - 32.5) < 1
    assert mixed_lengths(indices[[7, 3]], longest=64, seed=0).tolist() == lengths[[7, 3]].tolist()
    assert mixed_lengths(indices, longest=64, seed=1).tolist() != lengths.tolist()

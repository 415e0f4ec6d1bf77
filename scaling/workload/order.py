"""Which samples an optimizer step trains on: a function of the step alone, whatever the ranks and micro-batches."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Order:
    """The sample order of a data set of `samples`, shuffled anew in every epoch; its leftover is dropped."""

    samples: int
    global_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.samples < self.global_batch_size:
            raise ValueError(
                f"data: {self.samples} samples do not fill one global batch of {self.global_batch_size}; "
                "give more data or a smaller batch.global_batch_size"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.global_batch_size

    @property
    def dropped_per_epoch(self) -> int:
        """Samples of each epoch that fill no global batch."""
        return self.samples - self.steps_per_epoch * self.global_batch_size

    def step(self, step: int) -> Indices:
        """The sample indices of optimizer step `step` (from 0): [global_batch_size]."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_batch_size
        return _permutation(self.samples, self.seed, epoch)[start : start + self.global_batch_size]


@lru_cache(maxsize=2)
def _permutation(samples: int, seed: int, epoch: int) -> Indices:
    return np.random.default_rng([seed, epoch]).permutation(samples)


def micro_batch(indices: Indices, *, rank: int, world_size: int, micro_step: int, accumulation_steps: int) -> Indices:
    """This rank's part of one micro-step: the global batch is cut into accumulation x world equal slices."""
    size = len(indices) // (world_size * accumulation_steps)
    start = (micro_step * world_size + rank) * size
    return indices[start : start + size]


def mixed_lengths(indices: Indices, *, longest: int, seed: int) -> Indices:
    """A length in [1, longest] for each sample index, uniform, from (seed, index) and nothing else."""
    return (splitmix64(key(indices, seed, b"length")) % np.uint64(longest)).astype(np.int64) + 1


def key(indices: Indices, seed: int, purpose: bytes) -> Words:
    """A starting point for each (seed, index) and purpose, so that lengths, masks and crops do not go together."""
    with np.errstate(over="ignore"):
        start = splitmix64(np.array([seed + zlib.crc32(purpose) * 2**32], dtype=np.uint64))
        return splitmix64(indices.astype(np.uint64) + start)


def splitmix64(words: Words) -> Words:
    """Mix 64-bit words: neighbours come out unrelated.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.
    """
    with np.errstate(over="ignore"):
        z = words + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

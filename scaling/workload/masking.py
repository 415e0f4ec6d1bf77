"""What masked language modelling hides: a function of (seed, sample index), never of a worker or a rank.

The recipe is BERT's (Devlin et al., 2019, section 3.1): 15 % of the positions are predicted; of these 80 % show the
mask token, 10 % a random one, 10 % their own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scaling.workload.order import Indices, key, splitmix64

PERCENT = 15


def hidden_positions(length: int) -> int:
    """How many of `length` positions are predicted; at least one."""
    return int(counts(np.array([length]))[0])


def counts(lengths: Indices) -> Indices:
    """How many positions are predicted in samples of these lengths: 15 %, rounded, at least one."""
    return np.maximum(1, (PERCENT * lengths + 50) // 100)


def hide(
    tokens: Indices, indices: Indices, lengths: Indices, *, mask_token: int, vocabulary: int, seed: int
) -> tuple[Indices, NDArray[np.bool_]]:
    """The tokens as the model sees them, and which positions it predicts; both [samples, positions].

    Only the first `lengths` positions of a sample are candidates. Random tokens are below `vocabulary`.
    """
    positions = np.arange(tokens.shape[1], dtype=np.uint64)
    first = splitmix64(key(indices, seed, b"mask")[:, None] + positions)
    first[positions >= lengths.astype(np.uint64)[:, None]] = np.iinfo(np.uint64).max  # padding comes last
    rank = first.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    hidden = rank < counts(lengths)[:, None]
    second = splitmix64(first)
    tenth = second % np.uint64(10)
    random = (second >> np.uint64(32)).astype(np.int64) % vocabulary
    seen = np.where(hidden & (tenth < 8), mask_token, np.where(hidden & (tenth == 8), random, tokens))
    return seen, hidden

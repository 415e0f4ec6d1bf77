"""Bytes of text files as language-model samples."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from scaling.workload import IGNORED, Tensors, masking
from scaling.workload.order import Indices, mixed_lengths

BYTES = 256  # the vocabulary of a text of bytes
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "node_modules")
LOOKED_AT = 8192  # a NUL byte among the first ones marks a file that is no text


@dataclass(frozen=True)
class Text(Dataset[dict[str, torch.Tensor]]):
    """Sample i holds `sequence_length` bytes from i x sequence_length on, and as targets the bytes one further.

    With `mixed` only the first positions, a length drawn from (seed, i), are loss terms; the rest is padding. With a
    `mask_token` the targets are the bytes that it hides in the sample, drawn from (seed, i) too.
    """

    content: NDArray[np.uint8]
    sequence_length: int
    mixed: bool = False
    seed: int = 0
    mask_token: int | None = None

    def __len__(self) -> int:
        return max(0, (len(self.content) - 1) // self.sequence_length)

    def lengths(self, indices: Indices) -> Indices:
        """Positions of each sample that are no padding."""
        if self.mixed:
            return mixed_lengths(indices, longest=self.sequence_length, seed=self.seed)
        return np.full(len(indices), self.sequence_length, dtype=np.int64)

    def targets(self, indices: Indices) -> Indices:
        """Loss terms of each sample, known from its index."""
        lengths = self.lengths(indices)
        return lengths if self.mask_token is None else masking.counts(lengths)

    def tensors(self, indices: Indices) -> dict[str, torch.Tensor]:
        """`inputs` and `targets` of these samples, [samples, sequence_length] of int64.

        Hidden bytes of mixed lengths come with `attended`, True on the positions that are no padding.
        """
        offsets = indices[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        tokens = self.content[offsets].astype(np.int64)
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        lengths = self.lengths(indices)
        attended = np.arange(self.sequence_length) < lengths[:, None]
        if self.mask_token is not None:
            seen, hidden = masking.hide(
                inputs, indices, lengths, mask_token=self.mask_token, vocabulary=BYTES, seed=self.seed
            )
            inputs, targets = seen, np.where(hidden, inputs, IGNORED)
        inputs[~attended], targets[~attended] = 0, IGNORED
        tensors = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        if self.mixed and self.mask_token is not None:  # a causal model does not see what follows its last target
            tensors["attended"] = torch.from_numpy(attended)
        return tensors

    def __getitem__(self, indices: Indices) -> Tensors:  # type: ignore[override]
        """One micro-batch: the loader's sampler hands out whole index lists."""
        return self.tensors(indices)

    @cached_property
    def digest(self) -> str:
        """Names the content, so that ranks on different hosts can tell that they read the same."""
        return hashlib.sha256(self.content.tobytes()).hexdigest()[:16]


def text_path(path: str | None) -> Path:
    """`path`, or the sources of the running Python's standard library."""
    return Path(path).expanduser() if path is not None else Path(sysconfig.get_paths()["stdlib"])


def text_files(path: Path) -> list[Path]:
    """The file itself, or every file below the folder, sorted by path. Raises ValueError."""
    if not path.exists():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ValueError(f"data.path={path}: no such file or folder{where}")
    if path.is_file():
        return [path]
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("."))
        found += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return [file for file in found if file.is_file()]


def read_text(path: Path) -> NDArray[np.uint8]:
    """All text below `path`, one byte per token; files with NUL bytes are left out. Raises ValueError."""
    parts = []
    for file in text_files(path):
        try:
            with file.open("rb") as handle:
                head = handle.read(LOOKED_AT)
                if b"\0" not in head:
                    parts.append(head + handle.read())
        except OSError as error:
            raise ValueError(f"data.path={path}: cannot read {file} ({error.strerror})") from error
    content = np.frombuffer(b"".join(parts), dtype=np.uint8)
    if not len(content):
        raise ValueError(f"data.path={path}: no text there (empty, or only binary files)")
    return content

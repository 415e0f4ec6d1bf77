"""Whether replicas hold the same weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHUNK = 2**24
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Per parameter two sums over its bits, modulo 2^64: plain and weighted by position. Equal bits, equal sums."""
    return {name: _sums(parameter) for name, parameter in module.named_parameters()}


def _sums(tensor: Tensor) -> tuple[int, int]:
    bits = tensor.detach().contiguous().view(-1).view(WORDS[tensor.element_size()])
    plain, weighted, start = 0, 0, 1
    for part in bits.split(CHUNK):  # as 64-bit numbers an embedding would need gigabytes beside the training
        wide = part.to(torch.int64)
        weights = torch.arange(start, start + wide.numel(), device=bits.device)
        plain, weighted = plain + int(wide.sum()), weighted + int((wide * weights).sum())
        start += wide.numel()
    return plain % 2**64, weighted % 2**64


def disagreeing(fingerprints: list[dict[str, tuple[int, int]]]) -> list[str]:
    """Names of the parameters that differ between ranks."""
    return [
        name for name, sums in fingerprints[0].items() if any(other.get(name) != sums for other in fingerprints[1:])
    ]

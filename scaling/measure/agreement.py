"""Whether replicas hold the same weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Per parameter two sums over its bits, modulo 2^64: plain and weighted by position. Equal bits, equal sums."""
    return {name: _sums(parameter) for name, parameter in module.named_parameters()}


def _sums(tensor: Tensor) -> tuple[int, int]:
    bits = tensor.detach().contiguous().view(-1).view(WORDS[tensor.element_size()]).to(torch.int64)
    weights = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int(bits.sum()), int((bits * weights).sum())


def disagreeing(fingerprints: list[dict[str, tuple[int, int]]]) -> list[str]:
    """Names of the parameters that differ between ranks."""
    return [
        name for name, sums in fingerprints[0].items() if any(other.get(name) != sums for other in fingerprints[1:])
    ]

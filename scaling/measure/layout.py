"""The parameters of a model as they are before a strategy shards them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from torch import nn

from scaling.workload import Workload


@dataclass(frozen=True)
class Weight:
    """One parameter: its elements, the length of its first dimension, how many modules own it, and its block.

    `block` numbers the block that it lies in; None outside of all. `uses` counts a module once for each place it has
    in the model, `owners` once.
    """

    elements: int
    first: int
    owners: int
    block: int | None
    trained: bool = True
    uses: int = 0

    @property
    def places(self) -> int:
        """In how many places of the model each module that owns it is used."""
        return max(1, self.uses // self.owners)

    def padded(self, ranks: int) -> int:
        """As ZeRO-3 cuts it, flat."""
        return math.ceil(self.elements / ranks) * ranks

    def padded_rows(self, ranks: int) -> int:
        """As FSDP2 cuts it, along its first dimension."""
        return math.ceil(self.first / ranks) * ranks * (self.elements // self.first)


@dataclass(frozen=True)
class Layout:
    """The parameters of a model, taken before a strategy shards them."""

    weights: list[Weight]

    @property
    def trained(self) -> list[Weight]:
        return [weight for weight in self.weights if weight.trained]

    @property
    def elements(self) -> int:
        """Of the trainable parameters."""
        return sum(weight.elements for weight in self.trained)

    @property
    def all_elements(self) -> int:
        return sum(weight.elements for weight in self.weights)

    @classmethod
    def of(cls, workload: Workload) -> Layout:
        owners, uses = (_count(workload.module, duplicates=duplicates) for duplicates in (False, True))
        blocks = {
            id(parameter): number for number, block in enumerate(workload.blocks) for parameter in block.parameters()
        }
        return cls(
            [
                Weight(
                    p.numel(),
                    p.shape[0] if p.dim() else 1,
                    owners[id(p)],
                    blocks.get(id(p)),
                    trained=p.requires_grad,
                    uses=uses[id(p)],
                )
                for p in workload.module.parameters()
            ]
        )


def _count(module: nn.Module, *, duplicates: bool) -> Counter[int]:
    """How many modules own each parameter."""
    modules = (part for _, part in module.named_modules(remove_duplicate=not duplicates))
    return Counter(id(parameter) for part in modules for parameter in part.parameters(recurse=False))

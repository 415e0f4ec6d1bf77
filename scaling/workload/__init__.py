"""What is trained: a model, its loss, and its data."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scaling.config import ModelConfig

IGNORED = -100  # a target that is no loss term, as in torch.nn.functional.cross_entropy

# What a loss takes: named tensors whose first dimension is the sample.
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank, and what the loss of the whole optimizer step is divided by."""

    tensors: Tensors
    samples: int
    targets: int  # loss terms in this micro-batch
    step_targets: int  # loss terms in the whole global batch


@dataclass(frozen=True)
class Workload:
    """A model and how to train it; ours and a user's `package.module:function` return the same.

    `loss(module, tensors)` gives (sum of the loss terms, their count); `synthetic(n, generator)` gives the tensors
    of n samples on the generator's device; `block_types` are the layers to shard or checkpoint one by one.
    `vocabulary` and `sequence_length` are None where the samples are not sequences of tokens.
    """

    module: nn.Module
    loss: Callable[[nn.Module, Tensors], tuple[Tensor, int | Tensor]]
    synthetic: Callable[[int, torch.Generator], Tensors]
    block_types: tuple[type[nn.Module], ...]
    sequence_length: int | None = None
    vocabulary: int | None = None

    @property
    def parameters(self) -> int:
        """Trainable parameters; a tied one counts once."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)


def build(model: ModelConfig, device: torch.device | str, seed: int) -> Workload:
    """The workload with weights drawn from `seed` on `device`, the same on every rank. Raises ValueError."""
    function = _resolve(model.target)
    torch.manual_seed(seed)
    arguments = dict(model.args) | {"dropout": model.dropout}
    if model.sequence_length is not None:
        arguments["sequence_length"] = model.sequence_length
    try:
        with torch.device(device):
            workload = function(**arguments)
    except TypeError as error:
        raise ValueError(f"model.target={model.target} does not take {', '.join(arguments)}: {error}") from error
    if not isinstance(workload, Workload):
        raise ValueError(
            f"model.target={model.target} returned {type(workload).__name__}, not a scaling.workload.Workload"
        )
    return workload


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model.target={target}: {error}; write package.module:function") from error
    if not callable(function):
        raise ValueError(f"model.target={target} is no function")
    return function  # type: ignore[no-any-return]

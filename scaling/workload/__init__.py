"""What is trained: a model, its loss, and its data."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scaling.config import ModelConfig

IGNORED = -100  # a target that is no loss term, as in torch.nn.functional.cross_entropy

# What a loss takes: named tensors whose first dimension is the sample.
Tensors = Mapping[str, Tensor]
# The sum of the loss terms of a batch, and their number.
Loss = Callable[[nn.Module, Tensors], tuple[Tensor, int | Tensor]]


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

    `loss(module, tensors)` gives (sum of the loss terms, their count), with the sample as the first dimension of every
    tensor; `synthetic(n, generator)` gives the tensors of n samples on the generator's device, with the same count each
    time. `block_types` are the layers to shard or to recompute one by one, as `checkpointing`
    does. What follows says which data fit.

    Sequences of tokens have a `sequence_length` and a `vocabulary`, and come as int64 `inputs` and `targets`, [samples,
    positions]; with a `mask_token` the targets are the tokens that it hides, without one the next tokens. Images have
    an `image_size` and a number of `classes`, and come as uint8 `images`, [samples, 3, size, size], and int64 `labels`.
    """

    module: nn.Module
    loss: Loss
    synthetic: Callable[[int, torch.Generator], Tensors]
    block_types: tuple[type[nn.Module], ...] = ()
    sequence_length: int | None = None
    vocabulary: int | None = None
    mask_token: int | None = None
    image_size: int | None = None
    classes: int | None = None
    channels_last: bool | None = None  # how images lie in memory; `layout.lay_out` decides
    ours: bool = False  # this package's, whose tests hold it to the contract; `build` decides

    @property
    def batch_statistics(self) -> bool:
        """Whether training depends on how samples are grouped into micro-batches: batch normalisation does that."""
        return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.module.modules())

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules of `block_types` that have something to train and lie in no other."""
        found: dict[int, nn.Module] = {}

        def visit(module: nn.Module) -> None:
            for child in module.children():
                if isinstance(child, self.block_types) and any(p.requires_grad for p in child.parameters()):
                    found[id(child)] = child  # which may be used in several places
                else:
                    visit(child)

        visit(self.module)
        return list(found.values())

    @property
    def parameters(self) -> int:
        """Trainable parameters; a tied one counts once."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)


def build(model: ModelConfig, device: torch.device | str, seed: int) -> Workload:
    """The workload with weights drawn from `seed` on `device`, the same on every rank. Raises ValueError."""
    function = _resolve(model.target)
    own = {"dropout": model.dropout or None, "sequence_length": model.sequence_length, "image_size": model.image_size}
    arguments = dict(model.args) | _check_arguments(function, model, own)
    torch.manual_seed(seed)
    with torch.device(device):
        workload = function(**arguments)
    if not isinstance(workload, Workload):
        raise ValueError(
            f"model.target={model.target} returned {type(workload).__name__}, not a scaling.workload.Workload"
        )
    if not workload.parameters:
        raise ValueError(f"model.target={model.target}: the model has nothing to train")
    for name, parameter in workload.module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ValueError(f"model.target={model.target}: `{name}` is {parameter.dtype}; master weights are float32")
    return replace(workload, ours=is_ours(model.target))


def _check_arguments(function: Callable[..., Any], model: ModelConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """Which of our `own` arguments the function gets: those that are given, and a dropout of 0 if it takes one.

    Raises ValueError for an argument that it does not take, or does not get.
    """
    given = {name: value for name, value in own.items() if value is not None}
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin may have no signature
        return given
    named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    open_ended = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    if open_ended or "dropout" in named:
        given["dropout"] = model.dropout
    for name in (name for name in given if not open_ended and name not in named):
        raise ValueError(f"model.{name}={given[name]}: {model.target} takes no {name}")
    taken = [name for name in named if name not in own]
    for name in (name for name in model.args if not open_ended and name not in taken):
        close = difflib.get_close_matches(name, taken, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"model.args.{name}: {model.target} takes no such argument; {hint}it takes {', '.join(taken) or 'none'}"
        )
    for name in named:
        if parameters[name].default is inspect.Parameter.empty and name not in {*model.args, *given}:
            where = f"model.{name}" if name in own else f"model.args.{name}"
            raise ValueError(f"{model.target} needs `{name}`: give {where}=...")
    return given


def check_sizes(**sizes: object) -> None:
    """Raise ValueError unless each of these `model.args` is a whole number from 1 on."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"model.args.{name}={size}: must be a whole number from 1 on")


def source_digest(target: str) -> str | None:
    """Names the code of a user's own target, which no commit of ours does; None for one of ours."""
    if is_ours(target):
        return None
    file = inspect.getsourcefile(importlib.import_module(target.partition(":")[0]))
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def is_ours(target: str) -> bool:
    """Whether this package has the target, and its tests hold it to the contract."""
    return target.startswith("scaling.")


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model.target={target}: {error}; write package.module:function") from error
    if not callable(function):
        raise ValueError(f"model.target={target} is no function")
    return function  # type: ignore[no-any-return]

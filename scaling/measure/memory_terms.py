"""What the memory of a rank is used for: model, gradients, optimizer state and activations, told apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from scaling.config import FSDPConfig, TrainConfig
from scaling.engine import Engine, Held
from scaling.engine.zero_config import stage
from scaling.hardware.memory import GIB, allocated
from scaling.measure.layout import Layout
from scaling.results.record import MemoryTerms
from scaling.workload import Batch, Tensors

STATE = {"adamw": 8, "adam": 8, "sgd": 0}  # bytes per parameter; what other optimizers of a file keep is not known
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}


def memory_terms(
    engine: Engine, next_batch: Callable[[], Batch], accumulation_steps: int, device: torch.device
) -> MemoryTerms:
    """Run one untimed optimizer step, and look at what this rank holds on `device` in the last forward and after it.

    Optimizer state exists only after a first step, so that this must not be the first.
    """
    at_rest = storages(engine.held().model, device)
    watch = ForwardWatch(engine, at_rest, device)
    between: list[list[int]] = []
    for micro_step in range(1, accumulation_steps + 1):
        last = micro_step == accumulation_steps
        batch = next_batch()
        with watch if last else contextlib.nullcontext():
            engine.accumulate(batch, last=last)
        between.append(_held_bytes(engine.held(), device))
    engine.step()
    _, gradients, optimizer, buffers = map(max, zip(*between, strict=True))
    terms = (sum(at_rest.values()), gradients, optimizer, buffers, watch.activations, watch.gathered)
    return MemoryTerms(*(None if term is None else term / GIB for term in terms))


def _held_bytes(held: Held, device: torch.device) -> list[int]:
    """Bytes of each field; what lies in the storage of an earlier one is that one's."""
    seen: set[int] = set()
    sizes = []
    for tensors in held:
        found = {key: size for key, size in storages(tensors, device).items() if key not in seen}
        sizes.append(sum(found.values()))
        seen |= set(found)
    return sizes


def textbook_bytes(config: TrainConfig, engine: Engine, layout: Layout, ranks: int) -> dict[str, float]:
    """Bytes per trainable parameter that the strategy's idea needs, in the types of this run: ZeRO (2019), figure 1.

    Adam keeps two float32 numbers; weights that are kept in a smaller type to compute with have float32 masters, which
    the paper counts as optimizer state. What an optimizer of a user's file keeps is not known here.
    """
    strategy, settings = config.strategy, engine.settings or {}
    number = 3 if isinstance(strategy, FSDPConfig) else stage(strategy) or 0
    master, weight = engine.parameter_dtype.itemsize, engine.weight_dtype.itemsize
    gradient = WIDTHS[settings.get("data_types", {}).get("grad_accum_dtype", "fp32")]
    model, gradients, optimizer = (ranks if number >= least else 1 for least in (3, 2, 1))
    found = {"model": weight * layout.all_elements / layout.elements / model, "gradients": gradient / gradients}
    if config.optimizer.name not in STATE:
        return found
    state = STATE[config.optimizer.name] + (master if weight < master else 0)
    return found | {"optimizer": state / optimizer}


class ForwardWatch:
    """While entered, looks at each forward of an engine: at what it leaves for backward, and at weights that it
    gathered and did not free.

    On a device the first is what its allocator handed out meanwhile, less those weights. On a host it is what autograd
    saves, each memory once, without weights.
    """

    def __init__(self, engine: Engine, at_rest: dict[int, int], device: torch.device) -> None:
        self.activations: int | None = None
        self.gathered: int | None = None
        self._engine = engine
        self._at_rest = at_rest
        self._device = device
        self._loss = engine.loss

    def __enter__(self) -> None:
        self._engine.loss = self._watched

    def __exit__(self, *_: object) -> None:
        self._engine.loss = self._loss

    def _watched(self, module: nn.Module, tensors: Tensors) -> tuple[Tensor, int | Tensor]:
        before, gathered_before = allocated(self._device), self._gathered()
        if before is None:
            saved: dict[int, int] = {}
            with saved_tensors_hooks(lambda tensor: self._note(tensor, saved), lambda tensor: tensor):
                result = self._loss(module, tensors)
            self.activations = sum(saved.values())
        else:
            result = self._loss(module, tensors)
        self.gathered = self._gathered()
        if before is not None and (after := allocated(self._device)) is not None:
            self.activations = after - before - (self.gathered - gathered_before)
        return result

    def _note(self, tensor: Tensor, saved: dict[int, int]) -> Tensor:
        found = storages([tensor], self._device)
        weights = storages(self._engine.module.parameters(), self._device)
        saved.update({key: size for key, size in found.items() if key not in weights})
        return tensor

    def _gathered(self) -> int:
        """Bytes of the weights that lie elsewhere, or in other parts, between steps."""
        now = storages(self._engine.module.parameters(), self._device)
        return sum(size for key, size in now.items() if key not in self._at_rest)


def storages(tensors: Iterable[Any], device: torch.device) -> dict[int, int]:
    """Address and bytes of the memory below these tensors that lies on this kind of device; views share theirs."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        memory = local.untyped_storage()
        if local.device.type == device.type and memory.nbytes():
            found[memory.data_ptr()] = memory.nbytes()
    return found


def largest_terms(ranks: list[MemoryTerms]) -> MemoryTerms:
    """Term by term the largest over ranks; None where a rank could not tell."""
    columns = zip(*map(astuple, ranks), strict=True)
    return MemoryTerms(*(None if None in column else max(column) for column in columns))

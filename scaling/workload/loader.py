"""Micro-batches for one rank, in the order of the optimizer steps."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from scaling.config import BatchConfig, DataConfig, SyntheticConfig, TextConfig
from scaling.workload import Batch, Tensors, Workload
from scaling.workload.order import Order, micro_batch
from scaling.workload.text import BYTES, Text, read_text, text_path


@dataclass(frozen=True)
class Place:
    """Whose micro-batches, and where they go. Loader workers may run on any of `cores`; empty: where the rank runs."""

    rank: int
    world_size: int
    device: torch.device
    cores: list[int]


@dataclass(frozen=True)
class Source:
    """The data of a run: `batches` yields this rank's micro-batches for ever, accumulation after accumulation.

    `description` is the record's `data`; `facts` identify the content and are the same on every rank.
    """

    batches: Iterator[Batch]
    description: str
    facts: dict[str, Any]


def open_source(data: DataConfig, batch: BatchConfig, workload: Workload, seed: int, place: Place) -> Source:
    """The micro-batches of this rank. Raises ValueError for data that is missing, empty or does not fit the model."""
    if isinstance(data, SyntheticConfig):
        return _synthetic(data, batch, workload, seed, place)
    assert isinstance(data, TextConfig)
    return _text(data, batch, workload, seed, place)


def _synthetic(data: SyntheticConfig, batch: BatchConfig, workload: Workload, seed: int, place: Place) -> Source:
    micro, accumulation, _ = batch.sizes
    generator = torch.Generator(device=place.device).manual_seed(seed * place.world_size + place.rank)
    made = [workload.synthetic(micro, generator) for _ in range(data.batches)]
    targets = _targets(workload, made, micro)
    step_targets = targets * accumulation * place.world_size
    rotation = itertools.cycle([Batch(tensors, micro, targets, step_targets) for tensors in made])
    return Source(rotation, "synthetic", {"batches": data.batches})


def _targets(workload: Workload, made: list[Tensors], samples: int) -> int:
    """Loss terms of each of these batches. Raises ValueError unless they are alike, and of as many samples as asked."""
    for name, tensor in ((name, tensor) for tensors in made for name, tensor in tensors.items()):
        if tensor.dim() < 1 or tensor.shape[0] != samples:
            raise ValueError(
                f"synthetic({samples}, ...) gave `{name}` of shape {tuple(tensor.shape)}: the first is samples"
            )
    workload.module.eval()  # this forward is no training: batch statistics stay as they are
    with torch.no_grad():
        counts = [int(workload.loss(workload.module, tensors)[1]) for tensors in made]
    workload.module.train()
    if counts[0] < 1 or len(set(counts)) > 1:
        raise ValueError(
            f"the loss counts {counts} terms in synthetic batches: it has to be the same number, from 1 on"
        )
    return counts[0]


def _text(data: TextConfig, batch: BatchConfig, workload: Workload, seed: int, place: Place) -> Source:
    if workload.vocabulary is None or workload.sequence_length is None or workload.vocabulary < BYTES:
        raise ValueError(
            f"data=text gives {BYTES} different tokens, but the model takes {workload.vocabulary or 'none'}"
        )
    content = read_text(text_path(data.path))
    text = Text(content, workload.sequence_length, data.lengths == "mixed", seed)
    _, accumulation, total = batch.sizes
    order = Order(len(text), total, seed)
    facts = {
        "digest": text.digest,
        "bytes": len(content),
        "samples": len(text),
        "samples_dropped_per_epoch": order.dropped_per_epoch,
    }
    return Source(_text_batches(text, order, accumulation, data.workers, place), f"text-{data.lengths}", facts)


def _text_batches(text: Text, order: Order, accumulation: int, workers: int, place: Place) -> Iterator[Batch]:
    mine = functools.partial(micro_batch, rank=place.rank, world_size=place.world_size, accumulation_steps=accumulation)
    plan = (mine(order.step(step), micro_step=m) for step in itertools.count() for m in range(accumulation))
    # A sampler that hands out index lists as single "indices", so that a worker gathers a micro-batch at once.
    loader = DataLoader(
        text,
        batch_size=None,
        sampler=plan,
        num_workers=workers,
        pin_memory=place.device.type != "cpu",
        worker_init_fn=functools.partial(_spread_out, cores=place.cores),
    )
    tensors = iter(loader)
    for step in itertools.count():
        indices = order.step(step)
        step_targets = int(text.targets(indices).sum())
        for micro_step in range(accumulation):
            samples = mine(indices, micro_step=micro_step)
            moved = {name: tensor.to(place.device, non_blocking=True) for name, tensor in next(tensors).items()}
            yield Batch(moved, len(samples), int(text.targets(samples).sum()), step_targets)


def _spread_out(worker: int, cores: list[int]) -> None:
    """A worker leaves the cores that its rank was bound to before it was forked."""
    del worker
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)

"""Micro-batches for one rank, in the order of the optimizer steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from scaling.config import BatchConfig, DataConfig, SyntheticConfig, TextConfig
from scaling.workload import Batch, Workload
from scaling.workload.order import Order, micro_batch
from scaling.workload.text import BYTES, Text, read_text, text_path


class Source:
    """The data of a run: `batches` yields this rank's micro-batches for ever, accumulation after accumulation."""

    def __init__(self, batches: Iterator[Batch], description: str, facts: dict[str, Any]) -> None:
        self.batches = batches
        self.description = description  # the record's `data`
        self.facts = facts  # what else identifies it; the same on every rank


def open_source(
    data: DataConfig,
    batch: BatchConfig,
    workload: Workload,
    *,
    seed: int,
    device: torch.device,
    rank: int,
    world_size: int,
) -> Source:
    """The micro-batches of this rank. Raises ValueError for data that is missing, empty or does not fit the model."""
    if isinstance(data, SyntheticConfig):
        return _synthetic(data, batch, workload, seed=seed, device=device, rank=rank, world_size=world_size)
    assert isinstance(data, TextConfig)
    return _text(data, batch, workload, seed=seed, device=device, rank=rank, world_size=world_size)


def _synthetic(
    data: SyntheticConfig,
    batch: BatchConfig,
    workload: Workload,
    *,
    seed: int,
    device: torch.device,
    rank: int,
    world_size: int,
) -> Source:
    micro, accumulation, _ = batch.sizes
    generator = torch.Generator(device=device).manual_seed(seed * world_size + rank)
    made = [workload.synthetic(micro, generator) for _ in range(data.batches)]
    with torch.no_grad():
        targets = int(workload.loss(workload.module, made[0])[1])
    step_targets = targets * accumulation * world_size
    rotation = itertools.cycle([Batch(tensors, micro, targets, step_targets) for tensors in made])
    return Source(rotation, "synthetic", {"batches": data.batches})


def _text(
    data: TextConfig,
    batch: BatchConfig,
    workload: Workload,
    *,
    seed: int,
    device: torch.device,
    rank: int,
    world_size: int,
) -> Source:
    if workload.vocabulary is None or workload.sequence_length is None or workload.vocabulary < BYTES:
        raise ValueError(
            f"data=text gives {BYTES} different tokens, but the model takes {workload.vocabulary or 'none'}"
        )
    _, accumulation, total = batch.sizes
    content = read_text(text_path(data.path))
    text = Text(content, workload.sequence_length, data.lengths == "mixed", seed)
    order = Order(len(text), total, seed)
    place = {"rank": rank, "world_size": world_size, "accumulation_steps": accumulation}
    facts = {
        "digest": text.digest,
        "bytes": len(content),
        "samples": len(text),
        "samples_dropped_per_epoch": order.dropped_per_epoch,
    }
    return Source(_batches(text, order, place, data.workers, device), f"text-{data.lengths}", facts)


def _batches(text: Text, order: Order, place: dict[str, int], workers: int, device: torch.device) -> Iterator[Batch]:
    plan = (
        micro_batch(order.step(step), micro_step=micro_step, **place)
        for step in itertools.count()
        for micro_step in range(place["accumulation_steps"])
    )
    # A batch sampler that hands out index lists as single "indices", so that a worker gathers a micro-batch at once.
    loader = DataLoader(
        text,
        batch_size=None,
        sampler=plan,
        num_workers=workers,
        pin_memory=device.type != "cpu",
        persistent_workers=False,
    )
    tensors = iter(loader)
    for step in itertools.count():
        indices = order.step(step)
        step_targets = int(text.targets(indices).sum())
        for micro_step in range(place["accumulation_steps"]):
            mine = micro_batch(indices, micro_step=micro_step, **place)
            moved = {name: tensor.to(device, non_blocking=True) for name, tensor in next(tensors).items()}
            yield Batch(moved, len(mine), int(text.targets(mine).sum()), step_targets)

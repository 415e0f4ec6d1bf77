"""Micro-batches for one rank, in the order of the optimizer steps."""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset

from scaling.config import BatchConfig, DataConfig, ImagesConfig, SyntheticConfig, TextConfig
from scaling.workload import Batch, Tensors, Workload
from scaling.workload.contract import check_count, check_synthetic, losses
from scaling.workload.copies import on_device
from scaling.workload.images import UNREADABLE, Images, find_images
from scaling.workload.layout import arrange
from scaling.workload.order import Indices, Order, micro_batch
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

    `description` is the record's `data`; `facts` identify the content and are the same on every rank. `notes` are for
    the user; `unreadable()` names the samples that this rank could not read so far, and replaced.
    """

    batches: Iterator[Batch]
    description: str
    facts: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    unreadable: Callable[[], list[str]] = list


class Samples(Protocol):
    """A map from sample indices to tensors, and the loss terms of each sample, known from its index alone."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Indices) -> Tensors: ...

    def targets(self, indices: Indices) -> Indices: ...


def open_source(data: DataConfig, batch: BatchConfig, workload: Workload, seed: int, place: Place) -> Source:
    """The micro-batches of this rank. Raises ValueError for data that is missing, empty or does not fit the model."""
    if isinstance(data, SyntheticConfig):
        return _synthetic(data, batch, workload, seed, place)
    if isinstance(data, ImagesConfig):
        return _images(data, batch, workload, seed, place)
    assert isinstance(data, TextConfig)
    return _text(data, batch, workload, seed, place)


def _synthetic(data: SyntheticConfig, batch: BatchConfig, workload: Workload, seed: int, place: Place) -> Source:
    micro, accumulation, _ = batch.sizes
    generator = torch.Generator(device=place.device).manual_seed(seed * place.world_size + place.rank)
    made = [arrange(workload.synthetic(micro, generator), workload) for _ in range(data.batches)]
    targets = _targets(workload, made, micro)
    step_targets = targets * accumulation * place.world_size
    rotation = itertools.cycle([Batch(tensors, micro, targets, step_targets) for tensors in made])
    return Source(rotation, "synthetic", {"batches": data.batches})


def _targets(workload: Workload, made: Sequence[Tensors], samples: int) -> int:
    """Loss terms of each of these batches. Raises ValueError unless they are alike, and of as many samples as asked."""
    for tensors in made:
        check_synthetic(workload, tensors, samples)
    if workload.ours:  # every sample has as many: one tells, without the memory and the time of a whole batch
        first = {name: tensor[:1] for name, tensor in made[0].items()}
        counts = [samples * count for _, count in losses(workload, [first])]
    else:
        counts = [count for _, count in losses(workload, made)]
    if counts[0] < 1 or len(set(counts)) > 1:
        raise ValueError(
            f"the loss counts {counts} terms in synthetic batches: it has to be the same number, from 1 on"
        )
    return counts[0]


def _text(data: TextConfig, batch: BatchConfig, workload: Workload, seed: int, place: Place) -> Source:
    if workload.vocabulary is None or workload.sequence_length is None or workload.vocabulary < BYTES:
        raise ValueError(
            f"data=text gives {BYTES} different tokens, but the model takes {workload.vocabulary or 'none'}; "
            "gpt, llama and bert models take text, and a Workload of yours with sequence_length and vocabulary"
        )
    if workload.mask_token is not None and workload.mask_token >= workload.vocabulary:
        raise ValueError(
            f"the model's mask_token {workload.mask_token} is not in its vocabulary of {workload.vocabulary}"
        )
    content = read_text(text_path(data.path))
    text = Text(content, workload.sequence_length, data.lengths == "mixed", seed, workload.mask_token)
    order = Order(len(text), batch.sizes[2], seed)
    _check_count(workload, replace(text, mixed=False), order, place)  # padding may count in a loss, or not
    facts = {"digest": text.digest, "bytes": len(content), **_counts(order)}
    batches = _batches(text, order, batch.sizes[1], data.workers, place, unreadable=set())
    return Source(batches, f"text-{data.lengths}", facts)


def _images(data: ImagesConfig, batch: BatchConfig, workload: Workload, seed: int, place: Place) -> Source:
    if workload.image_size is None or workload.classes is None:
        raise ValueError(
            "data=images gives images, but the model takes none; resnet50 and resnet_tiny do, and a Workload of yours "
            "with image_size and classes"
        )
    assert data.path is not None
    folder = find_images(Path(data.path).expanduser())
    if len(folder.classes) > workload.classes:
        raise ValueError(
            f"data.path={data.path}: {len(folder.classes)} classes, but the model tells {workload.classes} apart; "
            f"give it as many (resnet50: model.args.classes={len(folder.classes)})"
        )
    images = Images(folder, workload.image_size, bool(workload.channels_last), seed)
    order = Order(len(images), batch.sizes[2], seed)
    _check_count(workload, images, order, place)  # a folder in which nothing can be decoded ends here, too
    facts = {"digest": folder.digest, "classes": len(folder.classes), **_counts(order)}
    unreadable: set[int] = set()
    batches = _batches(images, order, batch.sizes[1], data.workers, place, unreadable=unreadable)
    names = lambda: [images.name(index) for index in sorted(unreadable)]  # noqa: E731
    return Source(batches, "images", facts, folder.notes(), names)


def _check_count(workload: Workload, samples: Samples, order: Order, place: Place) -> None:
    """Read one sample, and hold a user's loss to what the data says it has to predict."""
    first = order.step(0)[:1]
    tensors = {name: tensor.to(place.device) for name, tensor in samples[first].items() if name != UNREADABLE}
    if not workload.ours:
        check_count(workload, tensors, int(samples.targets(first).sum()))


def _counts(order: Order) -> dict[str, int]:
    return {"samples": order.samples, "samples_dropped_per_epoch": order.dropped_per_epoch}


def _batches(
    samples: Samples, order: Order, accumulation: int, workers: int, place: Place, *, unreadable: set[int]
) -> Iterator[Batch]:
    mine = functools.partial(micro_batch, rank=place.rank, world_size=place.world_size, accumulation_steps=accumulation)
    plan = (mine(order.step(step), micro_step=m) for step in itertools.count() for m in range(accumulation))
    # torch says once per rank, at length, what `preparation` has said in one line.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    # A sampler that hands out index lists as single "indices", so that a worker gathers a micro-batch at once.
    loader = DataLoader(
        cast("Dataset[Tensors]", samples),
        batch_size=None,
        sampler=plan,
        num_workers=workers,
        pin_memory=place.device.type != "cpu",
        worker_init_fn=functools.partial(_spread_out, cores=place.cores),
    )
    tensors = on_device(_without_notes(loader, unreadable), place.device)
    for step in itertools.count():
        indices = order.step(step)
        step_targets = int(samples.targets(indices).sum())
        for micro_step in range(accumulation):
            mine_now = mine(indices, micro_step=micro_step)
            yield Batch(next(tensors), len(mine_now), int(samples.targets(mine_now).sum()), step_targets)


def _without_notes(loader: Iterable[Tensors], unreadable: set[int]) -> Iterator[Tensors]:
    """What the model takes, in host memory; indices that could not be read go into `unreadable`."""
    for tensors in loader:
        if UNREADABLE in tensors:
            unreadable.update(tensors[UNREADABLE].tolist())
        yield {name: tensor for name, tensor in tensors.items() if name != UNREADABLE}


def _spread_out(worker: int, cores: list[int]) -> None:
    """A worker leaves the cores that its rank was bound to before it was forked."""
    del worker
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)

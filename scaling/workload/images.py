"""A folder of class folders as image-classification samples, decoded by Pillow in loader workers."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from scaling.workload import Tensors
from scaling.workload.order import Indices

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})
AREA = (0.08, 1.0)  # of a crop, as a share of the image: Szegedy et al., "Going Deeper with Convolutions", 2015
RATIO = (3 / 4, 4 / 3)  # width over height
TRIES = 10  # to draw a crop that lies inside the image
UNREADABLE = "unreadable"  # the key of a micro-batch under which indices of broken images travel
SIZED = 1000  # files whose sizes are looked at, evenly spread: all of a million would take minutes on a network


@dataclass(frozen=True)
class Folder:
    """What lies below a folder of class folders. The paths are bytes relative to `root`, in order, one array of all.

    (Forked workers would copy a list of a million strings by counting references to them.)
    """

    root: Path
    paths: NDArray[np.bytes_]
    labels: Indices
    classes: tuple[str, ...]
    empty: tuple[str, ...]  # classes without an image
    others: tuple[str, ...]  # files that are no images

    @cached_property
    def digest(self) -> str:
        """Names the files, their classes, and the sizes of a thousand, so that ranks on different hosts and runs of
        different days can tell that they read the same.
        """
        some = self.paths[:: max(1, len(self.paths) // SIZED)]
        sizes = np.array([_size(self.root / os.fsdecode(bytes(path))) for path in some])
        return hashlib.sha256(self.paths.tobytes() + self.labels.tobytes() + sizes.tobytes()).hexdigest()[:16]

    def notes(self) -> list[str]:
        """What a user would want to know before a long run."""
        said = []
        if self.empty:
            said.append(f"{_some(self.empty, 'class', 'classes')} without an image: {_names(self.empty)}")
        if self.others:
            said.append(f"{_some(self.others, 'file', 'files')} skipped, no image files: {_names(self.others)}")
        if len(self.classes) - len(self.empty) == 1:
            said.append("all images are of one class: the speed is real, the loss says nothing")
        return [f"data.path={self.root}: {text}" for text in said]


def _size(file: Path) -> int:
    """Bytes; -1 for a file that is gone since it was listed."""
    try:
        return file.stat().st_size
    except OSError:
        return -1


def _some(names: tuple[str, ...], one: str, many: str) -> str:
    return f"{len(names)} {one if len(names) == 1 else many}"


def _names(names: tuple[str, ...], most: int = 5) -> str:
    shown = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    return "".join(letter if letter.isprintable() else "?" for letter in shown)


def check_folder(root: Path) -> None:
    """Raise ValueError unless there is such a folder."""
    if not root.is_dir():
        where = "" if root.is_absolute() else f" in {Path.cwd()}"
        raise ValueError(f"data.path={root}: {'is a file' if root.exists() else f'no such folder{where}'}")


def find_images(root: Path) -> Folder:
    """Every image below the class folders of `root`, sorted by path. Raises ValueError in one line."""
    check_folder(root)
    try:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise ValueError(f"data.path={root}: cannot read it ({error.strerror})") from error
    if not classes:
        raise ValueError(f"data.path={root}: holds no folders; images lie in one folder per class")
    if SPLITS.issuperset(classes):
        raise ValueError(
            f"data.path={root}: holds {', '.join(classes)}, no classes; is data.path={root / classes[0]} meant?"
        )
    paths: list[bytes] = []
    labels: list[int] = []
    empty: list[str] = []
    others: list[str] = []
    for label, name in enumerate(classes):
        files, besides = _files(root / name)
        images = [file for file in files if file.lower().endswith(SUFFIXES)]
        besides += [file for file in files if not file.lower().endswith(SUFFIXES)]
        others += [f"{name}/{file}" for file in besides]
        paths += [os.fsencode(f"{name}/{file}") for file in images]
        labels += [label] * len(images)
        if not images:
            empty.append(name)
    if not paths:
        raise ValueError(f"data.path={root}: no image in its {len(classes)} folders ({', '.join(SUFFIXES)})")
    return Folder(root, np.array(paths), np.array(labels), tuple(classes), tuple(empty), tuple(others))


def _files(folder: Path) -> tuple[list[str], list[str]]:
    """Files below the folder, and what is there besides files and folders; relative to it, hidden ones left out.

    Links to files are followed, links to folders are not: they may lead back. A pipe would block whoever opens it.
    """
    files: list[str] = []
    others: list[str] = []
    waiting = [""]
    try:
        while waiting:
            below = waiting.pop()
            for entry in os.scandir(folder / below):
                name = f"{below}{entry.name}"
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{name}/")
                elif entry.is_file():
                    files.append(name)
                else:
                    others.append(name)
    except OSError as error:
        raise ValueError(f"data.path: cannot read {error.filename} ({error.strerror})") from error
    return sorted(files), sorted(others)


@dataclass(frozen=True)
class Images(Dataset[dict[str, torch.Tensor]]):
    """Sample i is image i, cropped and mirrored by (seed, i), resized to `size`: uint8, [3, size, size].

    An image that cannot be decoded is replaced by the next one that can; a micro-batch names the indices
    of such images under UNREADABLE.
    """

    folder: Folder
    size: int
    channels_last: bool = False
    seed: int = 0
    _broken: set[int] = field(default_factory=set)  # known to this process

    def __len__(self) -> int:
        return len(self.folder.paths)

    def targets(self, indices: Indices) -> Indices:
        """Loss terms of each sample: one."""
        return np.ones(len(indices), dtype=np.int64)

    def __getitem__(self, indices: Indices) -> Tensors:  # type: ignore[override]
        """One micro-batch: the loader's sampler hands out whole index lists."""
        read = [self._read(int(index)) for index in indices]
        pixels = torch.from_numpy(np.stack([image for image, _, _ in read])).permute(0, 3, 1, 2)  # channels last
        labels = torch.tensor([label for _, label, _ in read])
        unreadable = torch.tensor([index for _, _, broken in read for index in broken], dtype=torch.int64)
        images = pixels if self.channels_last else pixels.contiguous()
        return {"images": images, "labels": labels, UNREADABLE: unreadable}

    def _read(self, index: int) -> tuple[NDArray[np.uint8], int, list[int]]:
        """(pixels, label, indices that could not be read before this one could)."""
        broken: list[int] = []
        for candidate in range(index, index + len(self)):
            place = candidate % len(self)
            if place not in self._broken:
                try:
                    return self._decode(place, index), int(self.folder.labels[place]), broken
                except (OSError, ValueError, SyntaxError, EOFError, MemoryError, _bomb()):  # what Pillow raises
                    self._broken.add(place)
            broken.append(place)
        raise ValueError(
            f"data.path={self.folder.root}: none of {len(broken)} images can be decoded, {self.name(index)} for one"
        )

    def name(self, index: int) -> str:
        """The path of an image below the folder."""
        return os.fsdecode(bytes(self.folder.paths[index]))

    def _decode(self, place: int, index: int) -> NDArray[np.uint8]:
        """Pixels [size, size, 3] of one image, cropped as sample `index` is."""
        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata and sizes: thousands of lines for ImageNet
            with Image.open(self.folder.root / self.name(place)) as image:
                colour = _eight_bit(image).convert("RGB")
        draw = np.random.default_rng([self.seed, index])
        box = crop(colour.width, colour.height, draw)
        small = colour.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        mirrored: Image.Image = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else small
        return np.asarray(mirrored)


def _eight_bit(image: Image) -> Image:
    """Deep grey values scaled down, which `convert` would clip to white. Raises ValueError where they have no range."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"no image: mode {image.mode} has no white")
    return image


def _bomb() -> Any:
    from PIL.Image import DecompressionBombError

    return DecompressionBombError


def crop(width: int, height: int, draw: np.random.Generator) -> tuple[int, int, int, int]:
    """A random box (left, upper, right, lower) inside the image; all of it where none of a few fits."""
    for _ in range(TRIES):
        area = width * height * draw.uniform(*AREA)
        ratio = math.exp(draw.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, upper = int(draw.integers(width - across + 1)), int(draw.integers(height - down + 1))
            return left, upper, left + across, upper + down
    return 0, 0, width, height

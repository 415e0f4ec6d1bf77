"""Folders of images: what is read, skipped, replaced and refused, and that crops come from (seed, index)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import model
from PIL import Image

from scaling.config import BatchConfig, ImagesConfig
from scaling.workload import build
from scaling.workload.images import Images, crop, find_images
from scaling.workload.layout import lay_out
from scaling.workload.loader import Place, Source, open_source

CPU = torch.device("cpu")


def picture(path: Path, colour: Any = (200, 100, 50), size: tuple[int, int] = (80, 60), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in (("cat", (250, 0, 0)), ("dog", (0, 0, 250))):
        for i in range(6):
            picture(tmp_path / name / f"{i}.png", colour)
    return tmp_path


def source(path: Path, rank: int = 0, world_size: int = 1, workers: int = 0, **changes: Any) -> Source:
    args = model("resnet_tiny").args | changes
    workload = lay_out(build(model("resnet_tiny", args=args, image_size=32), CPU, 0), None, CPU, "fp32")
    batch = BatchConfig(2, 2, 4 * world_size)
    return open_source(
        ImagesConfig(path=str(path), workers=workers), batch, workload, 0, Place(rank, world_size, CPU, [])
    )


def test_a_micro_batch_is_images_and_labels_of_their_classes(folder: Path) -> None:
    opened = source(folder)
    batch = next(opened.batches)
    images, labels = batch.tensors["images"], batch.tensors["labels"]
    assert (images.shape, images.dtype, labels.dtype) == ((2, 3, 32, 32), torch.uint8, torch.int64)
    assert images.is_contiguous(memory_format=torch.channels_last)
    for image, label in zip(images, labels, strict=True):
        assert image[0 if label == 0 else 2].float().mean() == pytest.approx(250, abs=1)  # red cats, blue dogs
        assert image[1].max() <= 1
    assert (batch.samples, batch.targets, batch.step_targets) == (2, 2, 4)
    assert set(batch.tensors) == {"images", "labels"}
    assert opened.facts["samples"] == 12 and opened.facts["classes"] == 2
    assert opened.notes == [] and opened.unreadable() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_neither_rank_nor_worker_decides_what_a_sample_is(folder: Path, workers: int) -> None:
    for name in ("cat", "dog"):
        for i in range(6):
            noise = np.random.default_rng([i, len(name)]).integers(256, size=(50, 70, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / name / f"{i}.png")
    alone = source(folder)
    pair = [source(folder, rank, 2, workers) for rank in range(2)]
    whole = {image.numpy().tobytes() for _ in range(6) for image in next(alone.batches).tensors["images"]}
    parts = [image.numpy().tobytes() for s in pair for _ in range(2) for image in next(s.batches).tensors["images"]]
    assert len(parts) == len(set(parts)) == 8
    assert set(parts) <= whole and len(whole) == 12


def test_a_crop_lies_inside_and_covers_what_it_should() -> None:
    draws = [crop(200, 100, np.random.default_rng([0, i])) for i in range(500)]
    for left, upper, right, lower in draws:
        assert 0 <= left < right <= 200 and 0 <= upper < lower <= 100
        assert 0.7 < (right - left) / (lower - upper) < 1.4 or (right - left, lower - upper) == (200, 100)
    areas = [(r - x) * (b - y) / 20_000 for x, y, r, b in draws]
    assert min(areas) > 0.07 and 0.25 < np.mean(areas) < 0.4
    assert crop(1, 1000, np.random.default_rng(0)) == (0, 0, 1, 1000)  # nothing of a square fits


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_is_named_and_its_neighbour_takes_its_place(folder: Path, workers: int) -> None:
    whole = (folder / "cat" / "3.png").read_bytes()
    (folder / "cat" / "2.png").write_bytes(whole[: len(whole) // 2])
    (folder / "dog" / "5.png").write_bytes(b"")
    opened = source(folder, workers=workers)
    for _ in range(6):
        batch = next(opened.batches)
        assert batch.samples == len(batch.tensors["images"]) == 2
    assert opened.unreadable() == ["cat/2.png", "dog/5.png"]


def test_the_neighbour_brings_its_own_label(folder: Path) -> None:
    for i in range(6):
        (folder / "dog" / f"{i}.png").write_bytes(b"no image")
    images = Images(find_images(folder), 32)
    tensors = images[np.array([7, 11, 3])]  # the last dog's neighbours are the cats
    assert tensors["labels"].tolist() == [0, 0, 0]
    assert tensors["unreadable"].tolist() == [7, 8, 9, 10, 11, 11]


@pytest.mark.parametrize(
    ("mode", "colour"), [("L", 90), ("RGBA", (90, 90, 90, 128)), ("P", 90), ("CMYK", 90), ("1", 1)]
)
def test_grey_and_other_modes_become_three_channels(tmp_path: Path, mode: str, colour: Any) -> None:
    picture(tmp_path / "a" / f"x.{'jpg' if mode == 'CMYK' else 'png'}", colour, mode=mode)
    tensors = Images(find_images(tmp_path), 32)[np.array([0])]
    assert tensors["images"].shape == (1, 3, 32, 32)
    if mode == "L":
        assert tensors["images"].unique().tolist() == [90]
    assert tensors["unreadable"].tolist() == []


def test_one_class_is_measured_and_said(tmp_path: Path) -> None:
    for i in range(4):
        picture(tmp_path / "only" / f"{i}.jpg")
    opened = source(tmp_path)
    assert next(opened.batches).tensors["labels"].tolist() == [0, 0]
    assert opened.notes == [
        f"data.path={tmp_path}: all images are of one class: the speed is real, the loss says nothing"
    ]


def test_an_empty_class_and_other_files_are_named_and_keep_the_labels(folder: Path) -> None:
    (folder / "bird").mkdir()
    (folder / "cat" / "readme.txt").write_text("cats")
    (folder / "cat" / ".hidden.png").write_text("x")
    picture(folder / "dog" / "more" / "deep.JPEG")
    found = find_images(folder)
    assert found.classes == ("bird", "cat", "dog")
    assert set(found.labels.tolist()) == {1, 2}
    assert len(found.paths) == 13
    assert found.notes() == [
        f"data.path={folder}: 1 class without an image: bird",
        f"data.path={folder}: 1 file skipped, no image files: cat/readme.txt",
    ]


def test_links_pipes_and_odd_names_are_no_trap(folder: Path) -> None:
    os.mkfifo(folder / "cat" / "pipe.jpg")  # whoever opens it waits for ever
    (folder / "cat" / "gone.jpg").symlink_to(folder / "nowhere.jpg")
    (folder / "cat" / "linked.jpg").symlink_to(folder / "cat" / "0.png")
    (folder / "cat" / "loop").symlink_to(folder)
    picture(folder / "cat" / "album.jpg" / "inside.png")
    with (folder / "dog" / os.fsdecode(b"caf\xe9\n.png")).open("wb") as file:
        file.write((folder / "dog" / "0.png").read_bytes())
    found = find_images(folder)
    names = [os.fsdecode(bytes(path)) for path in found.paths]
    assert {"cat/linked.jpg", "cat/album.jpg/inside.png", os.fsdecode(b"dog/caf\xe9\n.png")} < set(names)
    assert found.others == ("cat/gone.jpg", "cat/loop", "cat/pipe.jpg")
    tensors = Images(found, 32)[np.arange(len(names))]
    assert tensors["unreadable"].tolist() == []
    assert all(note.isprintable() for note in found.notes())


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path.rmdir(), "no such folder"),
        (lambda path: (path.rmdir(), path.touch()), "is a file"),
        (lambda path: None, "holds no folders; images lie in one folder per class"),
        (lambda path: picture(path / "loose.png"), "holds no folders; images lie in one folder per class"),
        (lambda path: (path / "a").mkdir(), "no image in its 1 folders"),
        (
            lambda path: [(path / n / "cat").mkdir(parents=True) for n in ("train", "val")],
            "no classes; is .*/train meant",
        ),
        (lambda path: picture(path / "a" / "1.png"), "1 samples do not fill one global batch of 4"),
    ],
)
def test_folders_without_images_are_refused(tmp_path: Path, prepare: Any, message: str) -> None:
    path = tmp_path / "data"
    path.mkdir()
    prepare(path)
    with pytest.raises(ValueError, match=message):
        source(path)


def test_nothing_that_can_be_decoded_is_refused_at_once(folder: Path) -> None:
    for file in folder.glob("*/*.png"):
        file.write_bytes(b"PNG?")
    with pytest.raises(ValueError, match=r"none of 12 images can be decoded, (cat|dog)/\d.png for one"):
        source(folder)


def test_more_classes_than_the_model_has_are_refused_with_both_numbers(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"2 classes, but the model tells 1 apart.*model.args.classes=2\)"):
        source(folder, classes=1)


def test_a_model_without_images_is_refused(folder: Path) -> None:
    workload = build(model("gpt_tiny"), CPU, 0)
    with pytest.raises(ValueError, match="data=images gives images, but the model takes none"):
        open_source(ImagesConfig(path=str(folder)), BatchConfig(1, 1, 1), workload, 0, Place(0, 1, CPU, []))


def test_the_digest_names_files_and_classes(folder: Path) -> None:
    before = find_images(folder).digest
    assert find_images(folder).digest == before
    (folder / "cat" / "1.png").rename(folder / "dog" / "1b.png")
    assert find_images(folder).digest != before


def test_an_image_larger_than_pillow_allows_is_broken_not_fatal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(folder / "cat" / "0.png", size=(400, 400))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60_000)  # Pillow refuses twice as many
    tensors = Images(find_images(folder), 32)[np.array([0])]
    assert tensors["unreadable"].tolist() == [0]


def test_deep_grey_is_scaled_and_not_clipped_to_white(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((40, 40), 128 * 256 + 7, dtype=np.uint16)).save(tmp_path / "a" / "deep.png")
    Image.fromarray(np.full((40, 40), 0.5, dtype=np.float32)).save(tmp_path / "a" / "float.tif")
    tensors = Images(find_images(tmp_path), 32)[np.array([0, 1])]
    assert tensors["images"].unique().tolist() == [128]
    assert tensors["unreadable"].tolist() == [1]  # a float has no white


def test_the_digest_sees_other_files_under_the_same_names(folder: Path) -> None:
    before = find_images(folder).digest
    picture(folder / "cat" / "0.png", (1, 2, 3), size=(640, 480))
    assert find_images(folder).digest != before


def test_any_number_of_broken_files_in_a_row_is_bridged(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "0.png")
    for i in range(1, 150):
        (tmp_path / "a" / f"{i:03}.jpg").touch()
    tensors = Images(find_images(tmp_path), 32)[np.array([1])]
    assert len(tensors["unreadable"]) == 149


def test_half_of_the_crops_are_mirrored(tmp_path: Path) -> None:
    ramp = np.tile(np.arange(200, dtype=np.uint8), (200, 1))  # dark on the left
    (tmp_path / "a").mkdir()
    for i in range(60):
        Image.fromarray(ramp).save(tmp_path / "a" / f"{i:02}.png")
    images = Images(find_images(tmp_path), 32)[np.arange(60)]["images"].float()
    mirrored = (images[:, 0, :, 0].mean(dim=1) > images[:, 0, :, -1].mean(dim=1)).sum()
    assert 15 <= int(mirrored) <= 45


def test_a_file_that_vanishes_after_it_was_listed_is_a_broken_image(folder: Path) -> None:
    found = find_images(folder)
    (folder / "cat" / "1.png").unlink()
    assert len(found.digest) == 16
    assert Images(found, 32)[np.array([1])]["unreadable"].tolist() == [1]

"""The models people know, real images, checkpointing and a model of the user's own, as a user starts them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from models import model
from PIL import Image
from ran import Ran, start

from scaling.results.reader import read_run
from scaling.results.schema import distrust
from scaling.workload.flops import count_flops

pytestmark = pytest.mark.ranks

SHORT = ["measure.warmup_steps=1", "measure.max_steps=2"]
# BERT-Large on 128 of its 512 positions: a quarter of the work of the same 335 million parameters.
LARGE = {"resnet50": ["model=resnet50"], "bert_large": ["model=bert_large", "model.sequence_length=128"]}
PARAMETERS = {"resnet50": 25_557_032, "bert_large": 335_174_458}
OWN = """
import pathlib
import torch
from scaling.workload import Workload

class Counted(torch.nn.Linear):
    def forward(self, x):
        if self.training and x.device.type == "cpu":  # not while FLOPs are counted
            with pathlib.Path("calls").open("a") as file:
                file.write("x")
        return super().forward(x)

def make(width, dropout, depth=1):
    module = torch.nn.Sequential(*(Counted(width, width) for _ in range(depth)))
    def loss(module, tensors):
        difference = module(tensors["x"]) - tensors["x"]
        return difference.square().sum(), difference.numel()
    def synthetic(samples, generator):
        return {"x": torch.randn(samples, width, generator=generator, device=generator.device)}
    return Workload(module, loss, synthetic, block_types=(Counted,))
"""


def complete(run: Ran) -> None:
    """The record is believable, and has every number that a host can give."""
    s = run.summary
    assert distrust(s) is None
    assert read_run(run.path).doubts == ()
    for name in ("flops_per_step", "tflops_per_device", "matmul_tflops", "matmul_share", "samples_per_s"):
        assert s[name] > 0, name
    assert s["loss"]["first"] is not None and s["peak_memory_gib"]["allocated"] > 0
    for name in ("mfu", "hfu", "peak_tflops", "peak_source", "energy_j", "clock_mhz", "telemetry"):
        assert s[name] is None, name  # C20: nobody publishes a peak for this host


@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_leaves_a_complete_record_alone_and_as_ddp(name: str, tmp_path: Path) -> None:
    common = [*LARGE[name], *SHORT, "batch.micro_batch_size=1", "optimizer.name=sgd"]
    alone = start(0, tmp_path, *common, "strategy=single")
    pair = start(2, tmp_path, *common, "strategy=ddp", "batch.accumulation_steps=1")
    for run, world in ((alone, 1), (pair, 2)):
        complete(run)
        s = run.summary
        assert (s["model"], s["world_size"], s["micro_batch_size"]) == (name, world, 1)
        assert s["parameters"] == PARAMETERS[name]
        assert s["flops_per_step"] == world * alone.summary["flops_per_step"]
        assert s["hardware_flops_per_step"] == s["flops_per_step"]
        assert s["batch_statistics"] is (name == "resnet50")
        assert s["channels_last"] is (True if name == "resnet50" else None)
    # Gradients, once each; running statistics are not sent: 2 (n-1)/n = 1 for two ranks.
    assert pair.summary["comm_bytes_per_step"] == {"all_reduce": 4 * PARAMETERS[name]}
    assert pair.summary["gradients_reduced"] is pair.summary["parameters_agree"] is True


@pytest.fixture
def images(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for name in ("cat", "dog", "empty"):
        (tmp_path / "images" / name).mkdir(parents=True)
    for i in range(20):
        noise = draw.integers(256, size=(90, 70, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "images" / ("cat", "dog")[i % 2] / f"{i}.jpg")
    Image.new("L", (40, 40), 99).save(tmp_path / "images" / "cat" / "grey.png")
    (tmp_path / "images" / "dog" / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "images" / "dog" / "notes.txt").write_text("woof")
    return tmp_path / "images"


def test_images_from_a_folder_with_everything_in_it(images: Path, tmp_path: Path) -> None:
    data = ["data=images", f"data.path={images}", "data.workers=1"]
    run = start(2, tmp_path, "model=resnet_tiny", *data, "batch.micro_batch_size=4", "measure.max_steps=10")
    s = run.summary
    complete(run)
    assert s["data"] == "images"
    assert s["samples_per_s"] * s["window_s"] == pytest.approx(10 * 8)
    assert s["target_tokens_per_s"] is None and s["tokens_per_s"] is None
    assert run.environment["data"]["samples"] == 22
    assert run.environment["unreadable_samples"] == ["dog/broken.jpg"]
    assert "unreadable_samples" in s["flags"]
    said = run.done.stderr
    assert f"data.path={images}: 1 class without an image: empty" in said
    assert "1 file skipped, no image files: dog/notes.txt" in said
    assert "1 sample(s) could not be read, and neighbours took their places: dog/broken.jpg" in said


def test_checkpointing_changes_the_hardware_flops_and_nothing_else(tmp_path: Path) -> None:
    batch = ["batch.micro_batch_size=2", "batch.accumulation_steps=3"]
    common = ["model=llama_tiny", "strategy=single", "data=text", *SHORT, *batch, "optimizer.name=sgd"]
    plain, checkpointed = start(0, tmp_path, *common), start(0, tmp_path, *common, "checkpointing=true")
    a, b = plain.summary, checkpointed.summary
    assert (a["checkpointing"], b["checkpointing"]) == (False, True)
    assert a["flops_per_step"] == b["flops_per_step"] == a["hardware_flops_per_step"]
    assert a["flops_per_step"] == 6 * (count_flops(model("llama_tiny"), 1) or 0)
    assert b["hardware_flops_per_step"] == 6 * (count_flops(model("llama_tiny"), 1, checkpointing=True) or 0)
    assert a["loss"] == b["loss"]


def test_a_model_of_the_users_own_needs_no_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    own = ["model=custom", "model.name=mlp", "model.target=mine:make", "model.args.width=32", "model.args.depth=2"]
    run = start(0, tmp_path, *own, "strategy=single", *SHORT, "checkpointing=true", cwd=tmp_path)
    assert run.summary["model"] == "mlp" and run.path.name.startswith("mlp-single-")
    assert run.summary["parameters"] == 2 * (32 * 32 + 32)
    assert yaml.safe_load((run.path / "config.yaml").read_text())["model"]["args"] == {"width": 32, "depth": 2}
    assert len(run.environment["model_source"]) == 16
    # A warm-up step, two measured ones and two that are looked into, through two layers, each of which runs again in
    # backward.
    assert len((tmp_path / "calls").read_text()) == 5 * 2 * 2

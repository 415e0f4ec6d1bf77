"""Counting what a step sends, comparing replicas, and the machine's own facts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from scaling.hardware import cores, environment, memory
from scaling.hardware.environment import allowed_variables
from scaling.measure import agreement
from scaling.measure.agreement import disagreeing, fingerprint
from scaling.measure.clock import HostClock
from scaling.measure.collectives import Collective, Recorder, StepCount, busbw_factor
from scaling.measure.loop import Noted
from scaling.measure.summary import RankStep, job_steps, rank_steps
from scaling.results.record import Memory


@pytest.mark.parametrize(
    ("kind", "n", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 3, 2 / 3),
        ("all_to_all", 16, 0.9375),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_busbw_factors_are_those_of_nccl_tests(kind: str, n: int, factor: float) -> None:
    assert busbw_factor(kind, n) == pytest.approx(factor)


def reduction(kind: str, elements: int) -> Collective:
    return Collective(kind, elements * 4, elements)


def test_syncs_are_micro_steps_with_a_gradient_reduction_whatever_the_buckets() -> None:
    bucket, scalar, gather = reduction("all_reduce", 100), reduction("all_reduce", 1), reduction("all_gather", 100)
    assert StepCount(2, [[], [], [bucket, bucket], []]).syncs == 1
    assert StepCount(2, [[bucket], [bucket], [bucket], []]).syncs == 3
    assert StepCount(2, [[scalar], [gather], [scalar, gather], [scalar]]).syncs == 0
    assert StepCount(2, [[], [], [], [bucket]]).syncs == 1  # reduced in the update
    assert StepCount(2, [[], [], [bucket], [bucket]]).syncs == 1


def test_bytes_are_payload_times_factor_by_kind() -> None:
    count = StepCount(4, [[reduction("all_reduce", 100)], [reduction("all_reduce", 50), reduction("all_gather", 8)]])
    assert count.bytes == {"all_reduce": 600 * 1.5, "all_gather": 32 * 0.75}


@pytest.mark.parametrize(
    ("kind", "elements", "enough"),
    [("all_reduce", 100, True), ("all_reduce", 99, False), ("reduce_scatter", 100, True), ("all_gather", 1000, False)],
)
def test_gradients_count_as_reduced_when_every_byte_went_in(kind: str, elements: int, enough: bool) -> None:
    count = StepCount(2, [[reduction(kind, elements)], []], gradient_elements=100)
    assert count.reduces(bytes_per_element=4) is enough
    assert not StepCount(2, [[reduction(kind, elements)], []]).reduces(4)  # no gradient was seen


def test_host_reads_are_counted_and_plain_work_is_not() -> None:
    x = torch.arange(4.0)
    with Recorder() as recorder:
        (x * 2).sum()
    assert recorder.host_syncs == 0
    with Recorder() as recorder:
        float(x.sum())
        bool((x > 1).any())
        x[x > 1]
        torch.equal(x, x)
    assert recorder.host_syncs == 4


def test_replicas_agree_to_the_bit_or_are_named() -> None:
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    b.load_state_dict(a.state_dict())
    assert disagreeing([fingerprint(a), fingerprint(b)]) == []
    with torch.no_grad():
        b.weight[1, 2] = torch.nextafter(b.weight[1, 2], torch.tensor(9.0))
    assert disagreeing([fingerprint(a), fingerprint(b)]) == ["weight"]
    with torch.no_grad():
        b.weight.copy_(a.weight.flip(0))  # the same bits in another order
    assert disagreeing([fingerprint(a), fingerprint(b)]) == ["weight"]
    assert disagreeing([fingerprint(a)]) == []


def test_large_parameters_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(50, 3)
    whole = fingerprint(module)
    monkeypatch.setattr(agreement, "CHUNK", 7)
    assert fingerprint(module) == whole
    with torch.no_grad():
        module.weight[2, 49] = torch.nextafter(module.weight[2, 49], torch.tensor(9.0))
    assert disagreeing([whole, fingerprint(module)]) == ["weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_parameter_type_has_a_fingerprint(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 2).to(dtype)
    before = fingerprint(module)
    with torch.no_grad():
        module.bias.neg_()
    assert disagreeing([before, fingerprint(module)]) == ["bias"]


def test_rows_hold_the_whole_job() -> None:
    waits: list[Any] = [(5.0, 5.1), (7.0, 7.0)]
    noted = [Noted(waits, 2, 20, torch.tensor(1.5), torch.tensor(s)) for s in (0, 1, 1)]
    mine = rank_steps([1.0, 2.0, 3.0], noted, HostClock())
    assert mine[0].data_wait_s == pytest.approx(0.1)
    other = [RankStep(1.1, 0.2, 2, 30, 0.5, s) for s in (0, 1, 1)]
    rows = job_steps([mine, other], warmup_steps=1, block_steps=1, tokens=True)
    other_rows = job_steps([mine, other], warmup_steps=1, block_steps=1, tokens=False)
    assert [row.target_tokens for row in other_rows] == [None] * 3  # an image model has loss terms, and no tokens
    assert [row.warmup for row in rows] == [True, False, False]
    assert [row.block for row in rows] == [None, 0, 1]
    assert rows[1].seconds == [2.0, 1.1]
    assert (rows[0].samples, rows[0].target_tokens, rows[0].loss) == (4, 50, 2.0)
    assert [row.skipped for row in rows] == [False, True, False]


def test_a_loss_that_is_not_finite_is_none() -> None:
    rows = job_steps([[RankStep(1.0, 0.0, 1, 1, float("nan"), 0)]], warmup_steps=0, block_steps=1, tokens=True)
    assert rows[0].loss is None


def test_each_rank_gets_cores_of_its_own_and_as_many_in_every_world() -> None:
    allowed = [4, 5, 6, 7]
    assert [cores.share(allowed, rank, 1) for rank in range(4)] == [[4], [5], [6], [7]]
    assert cores.share(allowed, 1, 2) == [6, 7]
    assert cores.share(allowed, 2, 2) == []


@pytest.mark.parametrize(
    ("available", "quota", "ranks", "threads", "crowded"),
    [
        (2, None, 2, 1, False),
        (2, None, 3, 1, True),
        (8, None, 4, 2, False),
        (8, 4.0, 8, 1, True),
        (8, 8.0, 8, 1, False),
    ],
)
def test_more_busy_threads_than_cores_or_quota_is_oversubscribed(
    available: int, quota: float | None, ranks: int, threads: int, crowded: bool
) -> None:
    assert cores.oversubscribed(available, quota, ranks, threads) is crowded


def test_numa_nodes_without_cores_are_no_cpu_nodes(tmp_path: Path) -> None:
    for node, listed in {0: "0-71\n", **dict.fromkeys(range(1, 9), "\n")}.items():  # C41: a Grace host
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(listed)
    (tmp_path / "node10").mkdir()  # no list at all
    (tmp_path / "online").write_text("0-8\n")
    assert cores.numa_nodes(tmp_path) == {0: "0-71"}
    assert cores.numa_nodes(tmp_path / "nowhere") == {}


def test_the_cpu_quota_of_a_control_group_is_read(tmp_path: Path) -> None:
    assert cores.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cores.cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu").mkdir()  # version 1
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert cores.cpu_quota(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("200000\n")
    assert cores.cpu_quota(tmp_path) == 2.0


def test_the_peak_of_a_host_is_of_the_window_alone() -> None:
    cpu = torch.device("cpu")
    big = torch.ones(64 * 2**20)  # 256 MiB, before the window
    del big
    if not memory.reset_peak(cpu):
        assert memory.read_peak(cpu, False) == Memory(None, None, "host_resident")
        return
    low = memory.read_peak(cpu, True).allocated
    held = torch.ones(64 * 2**20)
    high = memory.read_peak(cpu, True)
    assert held.numel() and low is not None and high.allocated is not None
    assert high.allocated - low == pytest.approx(0.25, abs=0.05)
    assert (high.reserved, high.kind) == (None, "host_resident")


def test_memory_of_an_accelerator_comes_from_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    device = torch.device("cuda", 0)
    known = SimpleNamespace(
        empty_cache=lambda: calls.append("empty"),
        reset_peak_memory_stats=lambda device: calls.append("reset"),
        max_memory_allocated=lambda device: 2 * 2**30,
        max_memory_reserved=lambda device: 3 * 2**30,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: known)
    memory.forget_setup(device)
    assert memory.reset_peak(device)
    assert calls == ["empty", "reset"]
    assert memory.read_peak(device, True) == Memory(2.0, 3.0, "device")
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())  # a backend without statistics
    memory.forget_setup(device)
    assert not memory.reset_peak(device)
    assert memory.read_peak(device, False) == Memory(None, None, "device")


def test_the_largest_peak_over_ranks_is_null_where_a_rank_has_none() -> None:
    assert memory.largest([Memory(1.0, 3.0, "device"), Memory(2.0, 2.5, "device")]) == Memory(2.0, 3.0, "device")
    assert memory.largest([Memory(1.0, None, "host_resident"), Memory(None, None, "host_resident")]).allocated is None


def test_only_allow_listed_variables_are_kept_and_no_secret() -> None:
    env = {
        "NCCL_P2P_LEVEL": "SYS",
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "secret",
        "NCCL_API_KEY": "secret",
        "WANDB_API_KEY": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HOME": "/root",
        "OMP_NUM_THREADS": "1",
    }
    assert allowed_variables(env) == {"NCCL_P2P_LEVEL": "SYS", "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7"}


def test_the_driver_version_is_read_where_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert environment.driver_version(file) is None
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version:"
    )
    assert environment.driver_version(file) == "550.54.15"


def test_a_folder_outside_of_a_checkout_has_no_commit(tmp_path: Path) -> None:
    assert environment.git_state(tmp_path) == {"commit": None, "dirty": None}


def test_versions_name_what_matters() -> None:
    found = environment.versions()
    assert found["torch"] == torch.__version__
    assert found["python"] and found["scaling"]
    assert len(os.sched_getaffinity(0)) == len(cores.available_cores())

"""Whether a rank had its cores to itself: by hand, and beside a program that takes half of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ran import start

from scaling.hardware.disturbance import Shares, disturbance, read_shares


def a_proc(folder: Path, main: str, others: dict[str, str], stat: str) -> Path:
    for name, line in {str(os.getpid()): main, **others}.items():
        (folder / "self" / "task" / name).mkdir(parents=True)
        (folder / "self" / "task" / name / "schedstat").write_text(line)
    (folder / "stat").write_text(stat)
    return folder


def test_what_the_scheduler_counts_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3})
    ticks = os.sysconf("SC_CLK_TCK")
    stat = "cpu  1 0 1 1 1 0 0 9999 0 0\n" + "".join(
        f"cpu{core} 1 0 1 1 1 0 0 {stolen * ticks} 0 0\n" for core, stolen in enumerate((50, 2, 70, 4))
    )
    proc = a_proc(
        tmp_path, "7000000000 1500000000 99\n", {"5": "250000000 9 9\n", "6": "500000000 9 9\n"}, stat + "intr 1\n"
    )
    assert read_shares(proc) == Shares(1.5, 0.75, 0.0, 3.0)  # stolen: the mean of 2 s and 4 s


def test_a_thread_that_has_just_ended_takes_only_its_own_share_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    proc = a_proc(tmp_path, "1 1500000000 1", {"5": "250000000 9 9", "6": ""}, "cpu0 1 0 1 1 1 0 0 0 0 0\n")
    (proc / "self" / "task" / "7").mkdir()  # its files are gone already
    assert read_shares(proc) == Shares(1.5, 0.25, 0.0, 0.0)


@pytest.mark.parametrize("missing", ["self", "stat"])
def test_a_system_that_counts_nothing_is_none(missing: str, tmp_path: Path) -> None:
    proc = a_proc(tmp_path, "1 1 1", {}, "cpu0 1 0 1 1 1 0 0 0 0 0\n")
    (tmp_path / missing).rename(tmp_path / "gone")
    assert read_shares(proc) is None


def test_own_threads_and_loader_workers_are_no_disturbance() -> None:
    start, end = Shares(1.0, 5.0, 2.0, 0.5), Shares(3.0, 6.5, 2.25, 0.75)
    mine = end.since(start)
    assert mine == Shares(2.0, 1.5, 0.25, 0.25)
    assert disturbance([mine]) == pytest.approx(2.0 - 1.5 - 0.25 + 0.25)
    other = Shares(0.1, 0.0, 1.0, 0.0)  # its workers may have run on the first rank's core
    assert disturbance([mine, other]) == pytest.approx(0.25)  # stolen is never a thread's
    assert disturbance([mine, None]) is None
    assert disturbance([]) is None


@pytest.mark.ranks
def test_a_run_beside_another_program_is_flagged_where_the_system_counts(tmp_path: Path) -> None:
    common = ["model=gpt_tiny", "strategy=single", "measure.warmup_steps=2", "measure.max_seconds=3"]
    hog = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", hog]) as other:
        try:
            run = start(0, tmp_path, *common)
        finally:
            other.kill()
    s = run.summary
    if read_shares() is None:  # nothing is known, and nothing is said
        assert s["disturbed_s"] is None and "disturbed" not in s["flags"]
        return
    assert "disturbed" in s["flags"]
    assert 0.2 < s["disturbed_s"] / s["window_s"] < 0.8
    assert "! disturbed: other programs took more than 5 % of the window" in run.done.stdout

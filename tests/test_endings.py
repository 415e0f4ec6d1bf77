"""Runs that do not end well: what is left of them is `error.json`, and no process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from launching import (
    ENDLESS,
    SMALL,
    Forked,
    Launched,
    ended_together,
    eventually,
    fork_server,
    forked_ranks,
    read_error,
    run_dirs,
)

from scaling import endings
from scaling.endings import Watcher, classify
from scaling.ranks import Launch, Member
from scaling.results import store
from scaling.results.record import Summary

TEXT_WITH_WORKER = ("data=text", "data.workers=1")


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True)


# ---- under torchrun


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_launch_and_is_named(rank: int, tmp_path: Path) -> None:
    with Launched.torchrun(2, ENDLESS, tmp_path / "here") as launch:
        run_dir = launch.until_training()
        launch.rank(rank).kill()
        ended = launch.wait(60)
        launch.assert_nothing_left()
    assert ended.code != 0
    error = read_error(run_dir)
    assert (error["kind"], error["rank"]) == ("killed", rank), error
    assert f"rank {rank} ended without a word" in error["message"]


@pytest.mark.ranks
def test_sigterm_to_torchrun_ends_ranks_and_loader_workers(tmp_path: Path) -> None:
    with Launched.torchrun(2, [*ENDLESS, *TEXT_WITH_WORKER], tmp_path / "here") as launch:
        run_dir = launch.until_training()
        workers = [worker for rank in (0, 1) for worker in workers_of(launch.rank(rank))]
        assert len(workers) == 2
        assert set(workers) < set(launch.alive()), "they would be missed if they stayed"
        launch.process.terminate()
        ended = launch.wait(60)
        launch.assert_nothing_left()
    assert ended.code != 0
    error = read_error(run_dir)
    assert (error["kind"], error["message"]) == ("terminated", "ended by SIGTERM"), error


@pytest.mark.ranks
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    with Launched.torchrun(2, ENDLESS, tmp_path / "here") as launch:
        run_dir = launch.until_training()
        os.killpg(launch.process.pid, signal.SIGINT)  # as a terminal does; torchrun moved its ranks out of the group
        launch.wait(60)
        launch.assert_nothing_left()
    assert read_error(run_dir)["kind"] == "terminated"


@pytest.mark.ranks
def test_ranks_do_not_outlive_a_killed_torchrun(tmp_path: Path) -> None:
    with Launched.torchrun(2, ENDLESS, tmp_path / "here") as launch:
        run_dir = launch.until_training()
        launch.process.kill()
        launch.assert_nothing_left(within_s=30)
    assert read_error(run_dir)["kind"] == "terminated"


def test_ctrl_c_ends_a_plain_run_and_its_loader_worker(tmp_path: Path) -> None:
    with Launched.python([*ENDLESS, *TEXT_WITH_WORKER], tmp_path / "here") as launch:
        run_dir = launch.until_training()
        assert len(workers_of(psutil.Process(launch.process.pid))) == 1
        os.killpg(launch.process.pid, signal.SIGINT)
        ended = launch.wait(30)
        launch.assert_nothing_left()
    assert ended.code == 128 + signal.SIGINT
    assert "Traceback" not in ended.stderr
    error = read_error(run_dir)
    assert (error["kind"], error["rank"], error["message"]) == ("terminated", 0, "ended by SIGINT"), error


# ---- ranks without a launcher


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "kind", "message", "in_trace"),
    [
        ("error", "other", "the loss exploded", "faulty_model.py"),
        ("value", "other", "a shape does not fit", "faulty_model.py"),
        ("memory", "oom", "can't allocate memory", "torch.empty(2**60)"),
        ("crash", "killed", "rank 1 ended without a word", "backward"),
    ],
)
def test_a_fault_on_one_rank_is_told_once(fault: str, kind: str, message: str, in_trace: str, tmp_path: Path) -> None:
    with forked_ranks([ENDLESS, ENDLESS], tmp_path / "here", FAULT=fault, FAULT_RANK="1") as ranks:
        ended = [rank.wait(30) for rank in ranks]
    assert all(one.code != 0 for one in ended)
    (run_dir,) = run_dirs(tmp_path / "here")
    error = read_error(run_dir)
    assert (error["kind"], error["rank"]) == (kind, 1), error
    assert message in error["message"]
    assert in_trace in error["traceback"]


@pytest.mark.ranks
def test_a_rank_that_hangs_is_a_timeout(tmp_path: Path) -> None:
    arguments = [*ENDLESS, "timeout_s=6"]
    with forked_ranks([arguments, arguments], tmp_path / "here") as (survivor, hanging):
        run_dir = survivor.until_training()
        hanging.signal(signal.SIGSTOP)
        assert survivor.wait(40).code == 1
        error = read_error(run_dir)
        hanging.signal(signal.SIGCONT)
        assert hanging.wait(20).code == 1  # it finds itself alone
    assert (error["kind"], error["rank"]) == ("timeout", 0), error
    assert "Timed out waiting 6000ms" in error["message"]
    assert read_error(run_dir) == error, "the first word stands"


@pytest.mark.ranks
def test_sigterm_to_one_rank_ends_the_others(tmp_path: Path) -> None:
    with forked_ranks([ENDLESS, ENDLESS], tmp_path / "here") as ranks:
        run_dir = ranks[0].until_training()
        ranks[1].signal(signal.SIGTERM)
        codes = [rank.wait(20).code for rank in ranks]
    assert codes == [1, 128 + signal.SIGTERM]
    error = read_error(run_dir)
    assert (error["kind"], error["rank"]) == ("terminated", 1), error


def test_a_terminal_that_closes_ends_a_run(tmp_path: Path) -> None:
    with Forked(ENDLESS, tmp_path / "here") as run:
        run_dir = run.until_training()
        run.signal(signal.SIGHUP)
        assert run.wait(20).code == 128 + signal.SIGHUP
    error = read_error(run_dir)
    assert (error["kind"], error["message"]) == ("terminated", "ended by SIGHUP"), error


@pytest.mark.ranks
def test_a_rank_told_to_end_looks_who_is_gone(tmp_path: Path) -> None:
    """Its main thread does not: it sleeps, as it may in a collective that waits for a device."""
    with forked_ranks([ENDLESS, ENDLESS], tmp_path / "here", FAULT="sleep", FAULT_RANK="0") as (sleeper, victim):
        run_dir = sleeper.until_training()
        victim.kill()
        sleeper.signal(signal.SIGTERM)
        assert sleeper.wait(20).code == 128 + signal.SIGTERM
    error = read_error(run_dir)
    assert (error["kind"], error["rank"], error["traceback"]) == ("killed", 1, None), error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_loader_worker_that_is_told_to_end_does_not_wake_its_parents_watcher(number: int, tmp_path: Path) -> None:
    with Forked([*ENDLESS, *TEXT_WITH_WORKER], tmp_path / "here") as run:
        run_dir = run.until_training()
        (worker,) = workers_of(psutil.Process(run.pid))
        worker.send_signal(number)
        assert run.wait(20).code == 1
    error = read_error(run_dir)
    assert (error["kind"], error["rank"]) == ("killed", 0), error
    assert "torch/utils/data/dataloader.py" in error["traceback"]


@pytest.mark.ranks
def test_a_run_refused_while_it_is_built_says_so(tmp_path: Path) -> None:
    little = tmp_path / "little.txt"
    little.write_text("hello")
    with forked_ranks([[*SMALL, "data=text", f"data.path={little}"]] * 2, tmp_path / "here") as ranks:
        ended = ended_together(ranks)
    assert ended[0].code == 2
    (run_dir,) = run_dirs(tmp_path / "here")
    error = read_error(run_dir)
    assert (error["kind"], error["rank"]) == ("config", 0)
    assert "0 samples do not fill one global batch of 16" in error["message"]
    assert [error["message"] in line for line in ended[0].errors] == [True]


# ---- the watcher


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def watcher_of_two(run_dir: Path, other_pid: int) -> Watcher:
    """The watcher of rank 0, with a process of this host as rank 1."""
    launch = Launch(rank=0, local_rank=0, world_size=2, local_world_size=2, nodes=1, torchrun=True)
    me = Member.here(launch, torch.device("cpu"), {}, None)
    watcher = Watcher()
    watcher.run_dir = run_dir
    started = psutil.Process(other_pid).create_time()
    watcher.members = [me, replace(me, rank=1, pid=other_pid, started=started)]
    return watcher


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:39644")


def test_a_rank_is_gone_when_its_process_is(neighbour: subprocess.Popen[bytes], tmp_path: Path) -> None:
    watcher = watcher_of_two(tmp_path, neighbour.pid)
    assert watcher.gone() == []
    neighbour.kill()
    eventually(lambda: watcher.gone() == [1], 5, "a zombie is gone")
    neighbour.wait()
    assert watcher.gone() == [1]


def test_a_recycled_process_id_is_not_the_rank(neighbour: subprocess.Popen[bytes], tmp_path: Path) -> None:
    watcher = watcher_of_two(tmp_path, neighbour.pid)
    watcher.members[1] = replace(watcher.members[1], started=watcher.members[1].started - 100)
    assert watcher.gone() == [1]


def test_nothing_is_known_of_ranks_on_other_hosts(neighbour: subprocess.Popen[bytes], tmp_path: Path) -> None:
    watcher = watcher_of_two(tmp_path, neighbour.pid)
    neighbour.kill()
    neighbour.wait()
    watcher.members[1] = replace(watcher.members[1], host="another")
    assert watcher.gone() == []


def test_a_broken_connection_is_blamed_on_the_rank_that_goes_a_moment_later(
    neighbour: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    watcher = watcher_of_two(tmp_path, neighbour.pid)
    timer = threading.Timer(0.3, neighbour.kill)  # its sockets closed first
    timer.start()
    watcher.failed(LOST)
    timer.join()
    error = read_error(tmp_path)
    assert (error["kind"], error["rank"]) == ("killed", 1)
    assert "rank 0 then saw" in error["message"]


def test_a_broken_connection_with_everybody_there_is_this_ranks_fault(
    neighbour: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "GRACE_S", 0.1)
    watcher_of_two(tmp_path, neighbour.pid).failed(LOST)
    error = read_error(tmp_path)
    assert (error["kind"], error["rank"]) == ("other", 0)


def test_a_process_that_is_told_to_end_leaves_the_word_to_its_watcher(
    neighbour: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Ctrl-C reaches the loader worker too, and the main thread sees that break."""
    watcher = watcher_of_two(tmp_path, neighbour.pid)
    watcher._signalled = True
    slow = threading.Timer(0.2, store.write_error, (tmp_path, "terminated", 0, "ended by SIGINT"))
    watcher._thread = slow
    slow.start()
    watcher.failed(RuntimeError("DataLoader worker (pid 7) is killed by signal: Interrupt."))
    assert read_error(tmp_path)["kind"] == "terminated"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "oom"),
        (
            RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 5000ms for recv operation"),
            "timeout",
        ),
        (torch.distributed.DistStoreError("wait timeout after 300000ms, keys: /block/3"), "timeout"),
        (TimeoutError(), "timeout"),
        (LOST, "other"),
        (ValueError("mat1 and mat2 shapes cannot be multiplied"), "other"),
        (SystemExit(3), "other"),
    ],
)
def test_kinds_of_exceptions(error: BaseException, kind: str) -> None:
    assert classify(error) == kind


def leave_with_a_child(pid_file: Path, *, stuck: bool) -> None:
    """What a process of ours does at its end, with a child that would stay and maybe output that nobody takes."""
    pid_file.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    endings.LAST_WORDS_S = 1
    endings.leave(3, (lambda: time.sleep(1000)) if stuck else (lambda: None))


def fail_while_a_loader_worker_dies(run_dir: Path) -> None:
    watcher = Watcher()
    watcher.run_dir, record = run_dir, watcher.failed

    def interrupted(error: BaseException) -> None:
        watcher.failed = record  # type: ignore[method-assign]
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    watcher.failed = interrupted  # type: ignore[method-assign]
    signal.signal(signal.SIGCHLD, lambda *_: None)
    watcher.fail(ConnectionResetError(104, "Connection reset by peer"))


def test_torchs_handler_for_dead_workers_does_not_keep_a_failure_from_being_recorded(tmp_path: Path) -> None:
    """It raises in the main thread, wherever that is: seen in the middle of recording the first exception."""
    process = fork_server.Process(target=fail_while_a_loader_worker_dies, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == 1
    assert read_error(tmp_path)["message"] == "[Errno 104] Connection reset by peer"


@pytest.mark.parametrize(("stuck", "code"), [(False, 3), (True, -signal.SIGALRM)])
def test_leaving_ends_children_and_waits_for_nobody(stuck: bool, code: int, tmp_path: Path) -> None:
    process = fork_server.Process(target=leave_with_a_child, args=(tmp_path / "pid",), kwargs={"stuck": stuck})
    process.start()
    process.join(30)
    assert process.exitcode == code
    child = int((tmp_path / "pid").read_text())
    try:
        eventually(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie", 2, "it ends")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


# ---- the run directory


def test_run_directories_are_numbered_and_never_shared(tmp_path: Path) -> None:
    made: list[Path] = []
    output = tmp_path / "deep" / "runs"
    threads = [
        threading.Thread(target=lambda: made.append(store.make_run_dir(str(output), "gpt-ddp", "0a1b2c3d")))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in made) == [f"gpt-ddp-0a1b2c3d-{number:02d}" for number in range(1, 13)]
    assert store.make_run_dir(str(output), "gpt-ddp", "ffffffff").name == "gpt-ddp-ffffffff-01"
    assert all(path.is_absolute() for path in made)


def test_the_first_free_number_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a-d-01").mkdir()
    (tmp_path / "a-d-02").write_text("a file is in the way as well")
    (tmp_path / "a-d-04").mkdir()
    assert store.make_run_dir(str(tmp_path), "a", "d").name == "a-d-03"
    assert store.make_run_dir(str(tmp_path), "a", "d").name == "a-d-05"


def test_a_models_name_makes_no_folders_of_its_own(tmp_path: Path) -> None:
    assert store.make_run_dir(str(tmp_path), "meta/llama 8B-ddp", "d") == tmp_path / "meta-llama-8B-ddp-d-01"


def test_a_run_dir_of_the_users_must_be_new(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where"
    assert store.make_run_dir("ignored", "a", "d", str(path)) == path
    with pytest.raises(ValueError, match="exists already, and no run is overwritten"):
        store.make_run_dir("ignored", "a", "d", str(path))
    assert not Path("ignored").exists()


@pytest.mark.parametrize("key", ["output_dir", "run_dir"])
def test_a_folder_that_cannot_be_made_is_named_with_its_key(key: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "below")
    with pytest.raises(ValueError, match=rf"^{key}={path}: .*(not a folder|Not a directory|cannot write)"):
        store.make_run_dir(path, "a", "d", path if key == "run_dir" else None)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store.write_environment(tmp_path, {"a": 1})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.write_environment(tmp_path, {"a": 2})
    assert not store.write_error(tmp_path, "other", 0, "m")
    assert [path.name for path in tmp_path.iterdir()] == ["environment.json"]
    assert json.loads((tmp_path / "environment.json").read_text()) == {"a": 1}


def no_hardlinks(self: Path, target: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("hardlinks", [True, False])
def test_the_first_error_stands(hardlinks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hardlinks:
        monkeypatch.setattr(Path, "hardlink_to", no_hardlinks)
    assert store.write_error(tmp_path, "killed", 1, "first", "trace")
    assert not store.write_error(tmp_path, "terminated", 0, "second")
    assert read_error(tmp_path) == {"kind": "killed", "rank": 1, "message": "first", "traceback": "trace"}


def test_a_folder_that_is_gone_is_no_second_fault(tmp_path: Path) -> None:
    assert not store.write_error(tmp_path / "gone", "other", 0, "m")


def fake_summary(monkeypatch: pytest.MonkeyPatch) -> Summary:
    monkeypatch.setattr(store, "asdict", lambda summary: {"run_id": "x"})
    return Summary.__new__(Summary)


def test_a_completed_run_gets_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_summary(tmp_path, fake_summary(monkeypatch))
    assert not store.write_error(tmp_path, "terminated", 0, "late")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_run_that_has_ended_gets_no_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.write_error(tmp_path, "killed", 1, "m")
    with pytest.raises(RuntimeError, match=r"error\.json"):
        store.write_summary(tmp_path, fake_summary(monkeypatch))
    assert read_error(tmp_path)["kind"] == "killed"


@pytest.mark.parametrize("first", ["summary", "error"])
def test_summary_and_error_in_the_same_moment_leave_the_summary(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other file appears after the look for it and before the writing."""
    summary, write = fake_summary(monkeypatch), store._write

    def meanwhile(path: Path, text: str, *, replace: bool = True) -> None:
        monkeypatch.setattr(store, "_write", write)
        (tmp_path / ("error.json" if first == "summary" else "summary.json")).write_text("{}")
        write(path, text, replace=replace)

    monkeypatch.setattr(store, "_write", meanwhile)
    if first == "summary":
        store.write_summary(tmp_path, summary)
    else:
        assert not store.write_error(tmp_path, "terminated", 0, "m")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_second_thread_waits_until_the_first_has_its_error_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one that is first ends the process; the other would leave half a file behind.
    import threading

    entered, go_on, wrote = threading.Event(), threading.Event(), []
    write = store._write

    def slow(path: Path, text: str, *, replace: bool = True) -> None:
        entered.set()
        go_on.wait(5)
        write(path, text, replace=replace)

    monkeypatch.setattr(store, "_write", slow)

    def one(kind: str) -> None:
        wrote.append((kind, store.write_error(tmp_path, kind, 0, kind)))

    first = threading.Thread(target=one, args=("oom",))
    first.start()
    assert entered.wait(5)
    second = threading.Thread(target=one, args=("terminated",))
    second.start()
    second.join(0.2)
    assert second.is_alive() and wrote == []
    go_on.set()
    first.join(5)
    second.join(5)
    assert wrote == [("oom", True), ("terminated", False)]
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize("how", ["(pid 4242) is killed by signal: Killed. ", "(pid(s) 4242) exited unexpectedly"])
def test_a_loader_worker_that_is_gone_was_killed(how: str) -> None:
    assert classify(RuntimeError(f"DataLoader worker {how}")) == "killed"

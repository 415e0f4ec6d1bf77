"""One launch is one world: what the launcher said, who is there, and that they belong together."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from launching import (
    ENDLESS,
    SMALL,
    Ended,
    Forked,
    Launched,
    ended_together,
    forked,
    forked_ranks,
    free_port,
    rank_environment,
)

from scaling.hardware.cores import available_cores
from scaling.hardware.device import local_device
from scaling.ranks import Launch, Member, Refused, check_one_world, introduce, place_on_machine
from scaling.world import World

# ---- what the launcher said

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Launch(0, 0, 1, 1, 1, torchrun=False)),
        (TORCHRUN, Launch(5, 1, 8, 4, 2, torchrun=True)),
        ({k: v for k, v in TORCHRUN.items() if k != "GROUP_WORLD_SIZE"}, Launch(5, 1, 8, 4, 2, torchrun=True)),
        ({"OMPI_COMM_WORLD_SIZE": "8", **TORCHRUN}, Launch(5, 1, 8, 4, 2, torchrun=True)),
        ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"}, Launch(0, 0, 1, 1, 1, torchrun=False)),
        ({"MASTER_ADDR": "somewhere", "MASTER_PORT": "29500"}, Launch(0, 0, 1, 1, 1, torchrun=False)),
    ],
)
def test_launches_that_are_one_world(env: dict[str, str], expected: Launch) -> None:
    assert Launch.from_env(env) == expected


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_SIZE=2", "no WORLD_SIZE", "torchrun --nproc_per_node"]),
        ({"PMI_SIZE": "4"}, ["PMI_SIZE=4", "these 4 processes do not know each other"]),
        ({"SLURM_STEP_NUM_TASKS": "16"}, ["SLURM_STEP_NUM_TASKS=16"]),
        ({"WORLD_SIZE": "8"}, ["RANK, LOCAL_RANK, LOCAL_WORLD_SIZE not set, but WORLD_SIZE"]),
        ({"RANK": "0", "LOCAL_RANK": "0"}, ["WORLD_SIZE, LOCAL_WORLD_SIZE not set, but RANK, LOCAL_RANK"]),
        (TORCHRUN | {"RANK": "x"}, ["not numbers", "RANK=x", "WORLD_SIZE=8"]),
        (TORCHRUN | {"RANK": ""}, ["not numbers", "RANK="]),
        (TORCHRUN | {"RANK": "8"}, ["no such place in a world", "RANK=8", "WORLD_SIZE=8"]),
        (TORCHRUN | {"RANK": "-1"}, ["no such place", "RANK=-1"]),
        (TORCHRUN | {"LOCAL_RANK": "4"}, ["no such place", "LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "16"}, ["no such place", "LOCAL_WORLD_SIZE=16"]),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "x"}, ["not numbers", "GROUP_WORLD_SIZE=x"]),
    ],
)
def test_half_a_world_is_refused_with_its_variables(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        Launch.from_env(env)
    assert all(word in str(refused.value) for word in words), refused.value


def test_devices_of_this_host() -> None:
    assert local_device("cpu", 0, 0) == torch.device("cpu")
    with pytest.raises(ValueError, match="device=tpu: not on this host; there is: auto, cpu"):
        local_device("tpu", 0, 0)
    with pytest.raises(ValueError, match=r"device=cpu:0: .*the index comes from LOCAL_RANK"):
        local_device("cpu:0", 0, 0)


# ---- who is there


def member(rank: int, **changes: Any) -> Member:
    config = {"seed": 0, "model": {"name": "gpt_tiny", "args": {"layers": 4}}}
    me = Member(rank, "box", "boot", 4026531836, 1000 + rank, 0.0, "cpu", "EPYC", config, None)
    return replace(me, **changes)


def refusal(members: list[Member]) -> Refused:
    with pytest.raises(Refused) as refused:
        check_one_world(members)
    return refused.value


def test_distinct_processes_of_one_config_are_one_world() -> None:
    check_one_world([member(0)])
    check_one_world([member(0), member(1), member(2, pid=1000, host="other"), member(3, pid=1000, pid_namespace=7)])


def test_one_process_that_is_two_ranks_is_refused() -> None:
    said = refusal([member(0), member(1), member(2, pid=1001)])
    assert str(said) == "ranks 1 and 2 are one process (box, pid 1001)"
    assert said.rank == 0


def test_configs_that_differ_are_refused_key_by_key() -> None:
    other = {"seed": 1, "model": {"name": "gpt_tiny", "args": {"layers": 2, "heads": 1}}}
    said = refusal([member(0), member(1), member(2, config=other)])
    assert str(said) == (
        "ranks 0 and 2 have different configs: model.args.heads None and 1; model.args.layers 4 and 2; seed 0 and 1"
    )
    assert said.rank == 0


def test_a_problem_of_one_rank_is_that_ranks_to_print() -> None:
    said = refusal([member(0), member(1, problem="no such device here", device=None)])
    assert (str(said), said.rank) == ("no such device here", 1)


def test_kinds_of_device_are_not_mixed() -> None:
    cuda = [member(rank, device=f"cuda:{rank}") for rank in range(2)]
    check_one_world(cuda)
    said = refusal([*cuda, member(2, device="cpu")])
    assert str(said) == "ranks are on different kinds of device: cpu, cuda"


@pytest.fixture(params=["tcp", "file"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], dist.Store]]:
    """Makes clients of one real store."""
    if request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "store"), -1)
        return
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


def come_together(
    stores: Callable[[], dist.Store], people: list[Member], size: int, timeout_s: float
) -> dict[int, list[Member] | Refused]:
    """What each of these processes, by its id, learns of the others; they come one after another, 0.2 s apart."""
    learned: dict[int, list[Member] | Refused] = {}

    def come(me: Member) -> None:
        launch = Launch(me.rank, me.rank, size, size, 1, torchrun=True)
        try:
            learned[me.pid] = introduce(stores(), launch, me, timeout_s)
        except Refused as refused:
            learned[me.pid] = refused

    threads = [threading.Thread(target=come, args=(person,)) for person in people]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join(timeout_s + 10)
    return learned


def test_ranks_learn_of_each_other_in_rank_order(stores: Callable[[], dist.Store]) -> None:
    people = [member(2), member(0), member(1)]
    learned = come_together(stores, people, 3, 20.0)
    assert list(learned.values()) == [[member(0), member(1), member(2)]] * 3


def test_two_processes_that_claim_one_rank_are_refused_at_once_and_by_name(stores: Callable[[], dist.Store]) -> None:
    people = [member(0), member(1), member(1, pid=77, host="elsewhere")]
    start = time.monotonic()
    learned = come_together(stores, people, 3, 60.0)
    assert time.monotonic() - start < 10, "rank 2 never comes, and nobody waits for it"
    printers = {}
    for pid, said in learned.items():
        assert isinstance(said, Refused)
        assert str(said) == "rank 1 of 3 was started twice: on box (pid 1001) and on elsewhere (pid 77)"
        printers[pid] = said.rank
    assert printers == {1000: 0, 1001: 0, 77: 1}, "rank 0 prints, and so does the one too many"


def test_a_rank_too_many_does_not_disturb_a_world_that_has_met(stores: Callable[[], dist.Store]) -> None:
    learned = come_together(stores, [member(0), member(1), member(0, pid=77)], 2, 20.0)
    assert learned[1000] == learned[1001] == [member(0), member(1)]
    assert isinstance(learned[77], Refused)


def test_a_rank_that_does_not_come_is_named(stores: Callable[[], dist.Store]) -> None:
    learned = come_together(stores, [member(0), member(2)], 3, 1.0)
    assert {str(said) for said in learned.values()} == {"rank 1 of 3 did not come within timeout_s=1"}


def test_a_world_of_one_needs_no_other_and_no_group() -> None:
    world = World.open(Launch(0, 0, 1, 1, 1, torchrun=False), {"a": 1}, request="cpu", process_group=False)
    assert (world.rank, world.size, world.gather("x"), world.together(lambda: 3)) == (0, 1, ["x"], 3)
    assert not dist.is_initialized()
    world.barrier()
    world.close()


def test_what_a_rank_finds_on_its_host_becomes_a_refusal() -> None:
    def check(device: torch.device) -> None:
        raise ValueError(f"no tea on {device}")

    with pytest.raises(Refused, match="no tea on cpu") as refused:
        World.open(Launch(0, 0, 1, 1, 1, torchrun=False), {}, request="cpu", local_check=check, process_group=False)
    assert refused.value.rank == 0


# ---- real ranks


@pytest.mark.ranks
def test_ranks_with_different_command_lines_do_not_train(tmp_path: Path) -> None:
    lines = [[*SMALL, "seed=1"], [*SMALL, "seed=2", "strategy.bucket_mb=1"]]
    with forked_ranks(lines, tmp_path / "here") as ranks:
        first, second = ended_together(ranks)
    assert first.errors == [
        "scaling.train: error: ranks 0 and 1 have different configs: seed 1 and 2; strategy.bucket_mb 25.0 and 1.0"
    ]
    assert (first.code, second.errors, first.run_dirs) == (2, [], [])


@pytest.mark.ranks
def test_what_only_one_rank_finds_is_printed_by_that_rank(tmp_path: Path) -> None:
    """C13: one command line, but on rank 1's host the path is not there."""
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "text.txt").write_text("x" * 10_000)
    line, port = [*SMALL, "data=text", "data.path=text.txt"], free_port()
    with (
        Forked(line, tmp_path / "zero", rank_environment(0, 2, port)) as zero,
        Forked(line, tmp_path / "one", rank_environment(1, 2, port)) as one,
    ):
        first, second = ended_together([zero, one])
    assert second.errors == [f"scaling.train: error: data.path=text.txt: no such file or folder in {tmp_path / 'one'}"]
    assert (second.code, first.errors, first.run_dirs) == (2, [], [])


@pytest.mark.ranks
def test_a_lonely_rank_says_who_is_missing(tmp_path: Path) -> None:
    port = free_port()
    zero = forked([*SMALL, "timeout_s=1"], tmp_path / "here", rank_environment(0, 2, port))
    assert zero.errors == ["scaling.train: error: rank 1 of 2 did not come within timeout_s=1"]
    one = forked([*SMALL, "timeout_s=1"], tmp_path / "here", rank_environment(1, 2, port))
    assert len(one.errors) == 1
    assert f"rank 1 of 2 cannot meet the others at 127.0.0.1:{port} (" in one.errors[0]
    assert one.errors[0].endswith("is rank 0 there?")
    assert (zero.code, one.code, zero.run_dirs) == (2, 2, [])


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = forked(SMALL, tmp_path / "here", rank_environment(0, 2, port))
    assert ended.code == 2
    assert len(ended.errors) == 1
    assert f"rank 0 of 2 cannot meet the others at 127.0.0.1:{port} (" in ended.errors[0]
    assert "address already in use); is the port another launch's?" in ended.errors[0]


@pytest.mark.parametrize("changes", [{"MASTER_ADDR": None}, {"MASTER_PORT": None}, {"MASTER_PORT": "http"}])
def test_a_meeting_place_that_is_none_is_refused(changes: dict[str, str | None], tmp_path: Path) -> None:
    env = rank_environment(0, 2, 29500, **changes)
    ended = forked(SMALL, tmp_path / "here", env)
    assert ended.code == 2
    assert len(ended.errors) == 1
    expected = f"MASTER_ADDR={env.get('MASTER_ADDR', '')} and MASTER_PORT={env.get('MASTER_PORT', '')} do not say"
    assert expected in ended.errors[0]


@pytest.mark.ranks
def test_two_launches_at_once_are_two_worlds_with_a_run_directory_each(tmp_path: Path) -> None:
    """C49, C53: the same command line twice, in one folder, in the same second."""
    folder = tmp_path / "here"
    ended: list[Ended] = []
    with Launched.torchrun(2, SMALL, folder) as first, Launched.torchrun(2, SMALL, folder) as second:
        ended = [first.wait(), second.wait()]
        first.assert_nothing_left()
        second.assert_nothing_left()
    assert [one.code for one in ended] == [0, 0], "\n".join(map(str, ended))
    made = [Path(one.stdout.splitlines()[-1]) for one in ended]
    assert sorted(made) == ended[0].run_dirs
    assert [path.name[-3:] for path in sorted(made)] == ["-01", "-02"]
    for path in made:
        assert {file.name for file in path.iterdir()} == {
            "config.yaml",
            "environment.json",
            "steps.jsonl",
            "summary.json",
        }
        summary = json.loads((path / "summary.json").read_text())
        assert (summary["run_id"], summary["world_size"]) == (path.name, 2)
    assert [path.name for path in folder.iterdir()] == ["runs"], "Hydra makes no file or folder of its own"


def test_ranks_of_several_launchers_share_the_cores_of_their_machine() -> None:
    people = [member(0), member(1, machine="other"), member(2, host="container"), member(3, machine="other")]
    assert [place_on_machine(people, rank) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]


@pytest.mark.ranks
def test_two_launchers_on_one_machine_do_not_put_their_ranks_on_one_core(tmp_path: Path) -> None:
    world = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}  # as two agents of one rank each say
    with forked_ranks([ENDLESS, ENDLESS], tmp_path / "here", **world) as ranks:
        ranks[0].until_training()
        cores = [set(psutil.Process(rank.pid).cpu_affinity()) for rank in ranks]
    if len(available_cores()) == 1:
        assert cores[0] == cores[1]  # oversubscribed, and so not bound
    else:
        assert [len(own) for own in cores] == [1, 1]
        assert not cores[0] & cores[1]

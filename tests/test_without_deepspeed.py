"""What needs no DeepSpeed neither imports nor misses it; what does says in one line what is not there."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import SMALL, Ended, Forked, environment, free_port, rank_environment, run_dirs
from test_mistakes import assert_refused

QUICK = (*SMALL, "measure.matmul_rate=false")


def altered(words: list[str], folder: Path, ranks: int = 1, **changes: str | None) -> list[Ended]:
    """How so many ranks ended that were started with these changes of their environment: see altered.py."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(Forked(words, folder, rank_environment(rank, ranks, port, **changes), module="altered"))
            for rank in range(ranks)
        ]
        return [rank.wait() for rank in started]


def imported(folder: Path, rank: int) -> set[str]:
    return set((folder / f"imported-{rank}").read_text().splitlines())


# Installed


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_without_deepspeed_imports_none_of_it(strategy: str, tmp_path: Path) -> None:
    ended = altered([*QUICK, f"strategy={strategy}"], tmp_path / "here", ranks=2)
    assert [one.code for one in ended] == [0, 0], str(ended[0])
    for rank in (0, 1):
        found = imported(tmp_path / "here", rank)
        assert {"torch", "scaling"} < found, "the list is the one of this process"
        assert "deepspeed" not in found


@pytest.mark.parametrize(
    "words",
    [
        ["--help", "strategy=zero3"],
        ["strategy=deepspeed"],
    ],
)
def test_neither_help_nor_a_refusal_imports_it(words: list[str], tmp_path: Path) -> None:
    """In a process of its own: the fork's has imported what a run needs."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "scaling.train", *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == (0 if words[0].startswith("--") else 2), done.stderr
    found = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "omegaconf" in found, "the list is the one of this process"
    assert not {name for name in found if name.split(".")[0] in ("deepspeed", "transformers")}


# Not installed


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_other_strategies_work_where_it_is_not_installed(strategy: str, tmp_path: Path) -> None:
    (ended,) = altered([*QUICK, f"strategy={strategy}"], tmp_path / "here", HIDE="deepspeed,ninja")
    assert ended.code == 0, str(ended)
    (run_dir,) = run_dirs(tmp_path / "here")
    assert json.loads((run_dir / "summary.json").read_text())["strategy"] == strategy
    assert json.loads((run_dir / "environment.json").read_text())["versions"].get("deepspeed") is None


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_one_line_says_what_to_install(strategy: str, tmp_path: Path) -> None:
    (ended,) = altered([*QUICK, f"strategy={strategy}"], tmp_path / "here", HIDE="deepspeed")
    assert_refused(ended, f"strategy={strategy} needs DeepSpeed: pip install 'scaling[deepspeed]'")
    assert run_dirs(tmp_path / "here") == []


def test_a_users_file_needs_it_too(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    words = [*QUICK, "strategy=deepspeed", "strategy.config=ds.json"]
    (ended,) = altered(words, folder, HIDE="deepspeed")
    assert_refused(ended, "strategy=deepspeed needs DeepSpeed: pip install 'scaling[deepspeed]'")


@pytest.fixture
def empty(tmp_path: Path) -> str:
    folder = tmp_path / "bin"
    folder.mkdir()
    return str(folder)


def test_a_missing_ninja_is_one_line(empty: str, tmp_path: Path) -> None:
    (ended,) = altered([*QUICK, "strategy=zero1"], tmp_path / "here", HIDE="ninja", PATH=empty)
    assert_refused(ended, "strategy=zero1: DeepSpeed compiles a part of itself on hosts, and there is no ninja", "pip")


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        (None, "there is no C++ compiler: install g++, or set CXX"),
        ("nowhere-icpx", "there is no C++ compiler (CXX=nowhere-icpx): install g++"),
    ],
)
def test_a_missing_compiler_is_one_line(compiler: str | None, words: str, empty: str, tmp_path: Path) -> None:
    (ended,) = altered([*QUICK, "strategy=zero1"], tmp_path / "here", PATH=empty, CXX=compiler)
    assert_refused(ended, words)
    assert run_dirs(tmp_path / "here") == []

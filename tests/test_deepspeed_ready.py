"""Whether a host can run DeepSpeed, what DeepSpeed finds in the environment, and where its own words go."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scaling.engine import deepspeed_ready
from scaling.engine.deepspeed_ready import check_deepspeed, held_builds, prepare_environment, wait_for_builds

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH with nothing on it; an installed DeepSpeed without compiled parts; no ninja."""
    package = tmp_path / "deepspeed"
    package.mkdir()
    find = importlib.util.find_spec

    def found(name: str) -> ModuleSpec | None:
        if name == "deepspeed":
            return ModuleSpec(name, None, origin=str(package / "__init__.py"))
        return None if name == "ninja" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def put(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


def refusal(device_type: str = "cpu", *, offload: bool = False) -> str:
    with pytest.raises(ValueError, match="strategy=zero1") as error:
        check_deepspeed("zero1", device_type, offload)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_without_deepspeed_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal("cuda") == "strategy=zero1 needs DeepSpeed: pip install 'scaling[deepspeed]'"


def test_what_compiling_needs_is_asked_for_in_turn(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no ninja: pip install ninja" in refusal()
    put(bare, "ninja")
    assert "there is no C++ compiler: install g++" in refusal()
    monkeypatch.setenv("CXX", "/nowhere/icpx -O1")
    assert "no C++ compiler (CXX=/nowhere/icpx -O1)" in refusal()
    put(bare, "mine")
    monkeypatch.setenv("CXX", "mine")
    check_deepspeed("zero1", "cpu", offload=False)
    monkeypatch.delenv("CXX")
    put(bare, "g++")
    check_deepspeed("zero1", "cpu", offload=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(bare))
    assert "there is no Python.h" in refusal()


def test_an_accelerator_compiles_for_offload_only(bare: Path) -> None:
    del bare
    check_deepspeed("zero3", "cuda", offload=False)
    assert "compiles a part of itself with offload, and there is no ninja" in refusal("cuda", offload=True)


def test_parts_that_came_compiled_need_no_compiler(bare: Path) -> None:
    facts = bare.parent / "deepspeed" / "git_version_info_installed.py"
    facts.write_text("installed_ops={'deepspeed_shm_comm': True, 'cpu_adam': False}\naccelerator_name='cpu'\n")
    check_deepspeed("zero1", "cpu", offload=False)
    assert "no ninja" in refusal(offload=True)


def test_ninja_of_the_environment_is_found_and_put_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ninja = importlib.import_module("ninja")  # `make setup` installs it; a missing one is a failure
    put(tmp_path, "g++")
    for name, value in {"PATH": str(tmp_path), "DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "CXX": ""}.items():
        monkeypatch.setenv(name, value)
    check_deepspeed("zero1", "cpu", offload=True)
    prepare_environment(CPU)
    assert os.environ["PATH"] == os.pathsep.join([ninja.BIN_DIR, str(tmp_path)])
    assert shutil.which("ninja")
    assert os.environ["CXX"] == "g++"  # PyTorch itself looks for c++ only


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [
        ("cpu", None, "0"),
        ("cpu", "3", "3"),  # hosts have no index; the launcher's stays
        ("cuda:2", None, "2"),
        ("cuda:0", "3", "0"),  # a launcher that shows each rank one device only
    ],
)
def test_the_device_index_is_where_deepspeed_looks(
    monkeypatch: pytest.MonkeyPatch, device: str, before: str | None, after: str
) -> None:
    for name, value in {"DS_ACCELERATOR": None, "LOCAL_RANK": before, "OMPI_COMM_WORLD_LOCAL_RANK": before}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    prepare_environment(torch.device(device))
    assert os.environ["LOCAL_RANK"] == after
    assert os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", after) == after
    assert os.environ["DS_ACCELERATOR"] == device.partition(":")[0]


def test_another_accelerator_than_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with pytest.raises(ValueError, match="DS_ACCELERATOR=cuda is set, but this run is on device=cpu; unset it"):
        prepare_environment(CPU)


# Locks of compilations


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As torch leaves it while it compiles a part of DeepSpeed."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "cpu_adam" / "lock"
    path.parent.mkdir()
    path.touch()
    return path


def test_a_lock_that_nobody_takes_away_ends_the_wait_in_one_line(lock: Path) -> None:
    """Its process was killed; torch itself would wait for ever, and without a word."""
    before = time.monotonic()
    with pytest.raises(ValueError, match="was killed; remove it") as error:
        wait_for_builds(0.01)
    assert time.monotonic() - before < 5
    assert str(error.value).startswith(f"{lock} is there for ") and "\n" not in str(error.value)


def test_a_compilation_that_ends_is_waited_for(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            lock.unlink()

    monkeypatch.setattr(time, "sleep", sleep)
    wait_for_builds(60)
    assert len(naps) == 3


def test_without_a_lock_nothing_is_waited_for(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert held_builds() == [lock]
    lock.unlink()
    assert held_builds() == []
    monkeypatch.setattr(time, "sleep", None)
    wait_for_builds(0)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parent / "nowhere"))  # nothing was ever compiled
    assert held_builds() == []


def test_locks_are_looked_for_where_torch_compiles(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(deepspeed_ready, "get_default_build_root", lambda: str(lock.parent.parent))
    assert held_builds() == [lock]


@pytest.mark.parametrize(
    ("visible", "kept"),
    [
        (None, True),
        ("", True),
        ("0", True),
        ("2, 0", True),
        ("MIG-1c2d3e4f-0000-0000-0000-000000000000", False),
        ("GPU-1c2d3e4f-0000-0000-0000-000000000000,1", False),
    ],
)
def test_where_devices_have_names_deepspeed_does_not_read_them_as_numbers(
    visible: str | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    accelerator: Any = SimpleNamespace(pynvml="NVML")
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator.cuda_accelerator", accelerator)
    deepspeed_ready._forget_named_devices()
    assert (accelerator.pynvml == "NVML") is kept


@pytest.fixture
def in_python() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run a program in a process of its own, as the command does: prepared for hosts."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        start = "import torch; from scaling.engine.deepspeed_ready import *; prepare_environment(torch.device('cpu'));"
        env = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "DS_ACCELERATOR")}
        return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=True, env=env)

    return run


def test_asking_imports_nothing(in_python: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    code = "import sys; check_deepspeed('zero1', 'cuda', False); print('deepspeed' in sys.modules)"
    assert in_python(code).stdout == "False\n"


def test_the_words_of_deepspeed_go_to_stderr(in_python: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    done = in_python(
        "ds = import_deepspeed(); import_deepspeed(); from deepspeed.utils import logger;"
        "logger.info('chatter'); logger.warning('careful'); print(ds.__name__)"
    )
    assert done.stdout == "deepspeed\n"
    assert done.stderr.count("careful") == 1
    assert "chatter" not in done.stderr


def test_importing_deepspeed_changes_no_setting(in_python: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    done = in_python(
        """
import logging, signal, sys, warnings
def settings():
    return [torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision(),
            torch.get_rng_state().tolist(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
            torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32, list(logging.root.handlers),
            logging.root.level, [signal.getsignal(s) for s in signal.valid_signals()], list(warnings.filters),
            sys.excepthook, torch.empty, torch.nn.Linear.__init__, torch.nn.functional.linear]
before = settings(); import_deepspeed(); print(before == settings())
"""
    )
    assert done.stdout == "True\n"


def test_a_deepspeed_that_does_not_import_is_one_line(
    in_python: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    done = in_python(
        """
import sys
sys.modules["deepspeed"] = None
try:
    import_deepspeed()
except ValueError as error:
    print(error)
"""
    )
    assert done.stdout.startswith("DeepSpeed does not import (")
    assert done.stdout.count("\n") == 1

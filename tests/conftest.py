"""What holds for every test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

LONGEST_COMPILATION_S = 280
COMPILE = """
import torch
from scaling.engine.deepspeed_ready import import_deepspeed, prepare_environment
prepare_environment(torch.device("cpu"))
import_deepspeed()
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load()
"""


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rates of this machine's devices stay out of the user's cache; what DeepSpeed compiles is kept for other times."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    kept = cache / "scaling-tests" / f"{sys.implementation.cache_tag}-torch-{version('torch')}"
    changes = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    changes |= {"TORCH_EXTENSIONS_DIR": str(kept)} if "TORCH_EXTENSIONS_DIR" not in os.environ else {}
    for lock in kept.glob("*/lock"):  # of a compilation that was killed: torch would wait for it for ever
        if time.time() - lock.stat().st_mtime > LONGEST_COMPILATION_S:
            lock.unlink(missing_ok=True)
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    yield
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def deepspeed_compiled(_own_cache: None) -> None:
    """What DeepSpeed needs on hosts is compiled before a test waits for a run: that takes up to a minute."""
    if not list(Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("deepspeed_shm_comm/*.so")):
        subprocess.run([sys.executable, "-c", COMPILE], check=True, timeout=LONGEST_COMPILATION_S, capture_output=True)

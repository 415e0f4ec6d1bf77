"""Whether this host can run DeepSpeed, and what DeepSpeed wants to find before it is imported."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import runpy
import shlex
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.cpp_extension import get_default_build_root

# The parts of DeepSpeed that it compiles on first use.
HOST_OP = "deepspeed_shm_comm"
OFFLOAD_OP = "cpu_adam"
LONGEST_BUILD_S = 300.0  # about a minute on two cores


def check_deepspeed(strategy_name: str, device_type: str, offload: bool) -> None:
    """Raise ValueError for what DeepSpeed would miss here: itself, or what it compiles its parts with.

    Imports nothing of it. On hosts it always compiles one part, on any device another one for `offload`.
    """
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        raise ValueError(f"strategy={strategy_name} needs DeepSpeed: pip install 'scaling[deepspeed]'")
    needed = [HOST_OP] if device_type == "cpu" and sys.platform == "linux" else []
    needed += [OFFLOAD_OP] if offload else []
    if all(_prebuilt(Path(spec.origin).parent, op, device_type) for op in needed):
        return
    place = "with offload" if offload else "on hosts"
    missing = f"strategy={strategy_name}: DeepSpeed compiles a part of itself {place}, and there is no"
    if _ninja_folder() is None:
        raise ValueError(f"{missing} ninja: pip install ninja")
    if (compiler := _compiler()) is None or shutil.which(compiler) is None:
        named = f" (CXX={os.environ['CXX']})" if os.environ.get("CXX") else ""
        raise ValueError(f"{missing} C++ compiler{named}: install g++, or set CXX to the one that you have")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        raise ValueError(f"{missing} Python.h: install the development files of this Python (python3-dev)")


def prepare_environment(device: torch.device) -> None:
    """Set what DeepSpeed reads from the environment: the accelerator, the device's index, and where ninja is.

    Call it before `import_deepspeed`. Raises ValueError for a DS_ACCELERATOR that names another device.
    """
    asked = os.environ.setdefault("DS_ACCELERATOR", device.type)
    if asked != device.type:
        raise ValueError(f"DS_ACCELERATOR={asked} is set, but this run is on device={device.type}; unset it")
    # DeepSpeed stops without it and takes the device's index from it, which a launcher that hides the others makes 0.
    index = str(device.index or 0)
    if device.type != "cpu" or "LOCAL_RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = index
        if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:  # DeepSpeed insists on the same
            os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = index
    folder = _ninja_folder()
    if shutil.which("ninja") is None and folder is not None:  # torchrun called by its path: the venv is not on PATH
        os.environ["PATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PATH")])])
    if not os.environ.get("CXX") and shutil.which("c++") is None and (compiler := _compiler()):
        os.environ["CXX"] = compiler  # PyTorch would look for c++ only


def held_builds() -> list[Path]:
    """Locks of parts that somebody compiles now, or was killed while compiling: all others wait until they go."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    return [lock for op in (HOST_OP, OFFLOAD_OP) for lock in sorted(Path(root).glob(f"**/{op}/lock"))]


def wait_for_builds(limit_s: float) -> None:
    """Wait until nobody compiles. Raises ValueError after `limit_s`: torch itself would wait for ever."""
    deadline = time.monotonic() + limit_s
    while locks := held_builds():
        if time.monotonic() > deadline:
            raise ValueError(
                f"{locks[0]} is there for {limit_s:.0f} s: what compiles a part of DeepSpeed was killed; remove it"
            )
        time.sleep(0.2)


def import_deepspeed() -> ModuleType:
    """DeepSpeed, with what it prints and logs on stderr. Raises ValueError where it does not import.

    What it prints while an engine is built needs `contextlib.redirect_stdout(sys.stderr)` too.
    """
    logger = logging.getLogger("DeepSpeed")
    first = "deepspeed" not in sys.modules
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module("deepspeed")
    except ImportError as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"DeepSpeed does not import ({problem}): pip install --force-reinstall deepspeed") from error
    _forget_named_devices()
    if first:
        logger.setLevel(max(logger.level, logging.WARNING))
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            handler.setStream(sys.stderr)
    return module


def _forget_named_devices() -> None:
    """Where CUDA_VISIBLE_DEVICES names devices, as a MIG slice has to be, DeepSpeed would read the names as numbers to
    ask NVML for free memory; without NVML it asks torch.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not all(name.strip().isdigit() for name in names.split(",") if name.strip()):
        importlib.import_module("deepspeed.accelerator.cuda_accelerator").pynvml = None  # type: ignore[attr-defined]


def _ninja_folder() -> str | None:
    """Where ninja is: on PATH, or where the package `ninja` put it."""
    if found := shutil.which("ninja"):
        return str(Path(found).parent)
    if importlib.util.find_spec("ninja") is None:
        return None
    folder = getattr(importlib.import_module("ninja"), "BIN_DIR", "")
    return folder if folder and shutil.which("ninja", path=folder) else None


def _compiler() -> str | None:
    """The command that compiles C++: that of CXX, else the first that is there."""
    if named := shlex.split(os.environ.get("CXX", "")):
        return named[0]
    return next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def _prebuilt(package: Path, op: str, device_type: str) -> bool:
    """Whether DeepSpeed was installed with this part compiled for this device (DS_BUILD_OPS=1)."""
    facts = package / "git_version_info_installed.py"
    if not facts.is_file():
        return False
    built = runpy.run_path(str(facts))
    return bool(built.get("installed_ops", {}).get(op)) and built.get("accelerator_name") == device_type

"""The snapshot that goes into `environment.json`: what the numbers depend on, and no secrets."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from scaling.hardware.cores import numa_nodes

# Variables that change how a run behaves. An allow-list: keys and tokens live in the same environment.
ALLOWED = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "OMP_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "MKL_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
ALLOWED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "SLURM_", "HSA_", "ROCR_", "HIP_VISIBLE", "ASCEND_RT_VISIBLE")
REFUSED_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "JWT")
PACKAGES = ("scaling", "torch", "transformers", "deepspeed", "numpy", "hydra-core", "omegaconf", "wandb")


def snapshot(command: str, hosts: list[str], devices: list[str | None], cores: list[int]) -> dict[str, Any]:
    """Everything about the machine and the code; `cores` are those this process may use."""
    return {
        "command": command,
        "git": git_state(Path(__file__).parent),
        "versions": versions(),
        "hosts": hosts,
        "devices": devices,
        "cores": cores,
        "numa_nodes": numa_nodes(),
        "platform": platform.platform(),
        "variables": allowed_variables(os.environ),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python, the packages that matter and the device stack; None for what is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["torch"] = torch.__version__  # names the build too, which the package's metadata may not
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else None
    found["cuda"] = torch.version.cuda
    found["hip"] = torch.version.hip
    found["nccl"] = ".".join(map(str, nccl)) if nccl else None
    found["driver"] = driver_version()
    return found


def driver_version(proc: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The NVIDIA kernel driver's version, None without one."""
    if not proc.exists():
        return None
    words = proc.read_text().split()
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def allowed_variables(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(env.items())
        if (name in ALLOWED or name.startswith(ALLOWED_PREFIXES))
        and not any(word in name.upper() for word in REFUSED_WORDS)
    }


def git_state(folder: Path) -> dict[str, Any]:
    """Commit of the code that runs, and whether it differs from it; None outside of a checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    ours = git("ls-files", "--error-unmatch", Path(__file__).name if folder == Path(__file__).parent else ".")
    commit = git("rev-parse", "HEAD") if ours else None  # an installation inside somebody else's checkout has none
    status = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "dirty": bool(status) if status is not None else None}

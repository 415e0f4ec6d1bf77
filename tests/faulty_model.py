"""A GPT-2 that says when it trains, and can go wrong in its loss: `model.target=faulty_model:faulty`.

In the FAULT_AT-th loss of its process (8 by default: inside the window of a run with one warm-up step) it makes the
file `training-<rank>` in the working directory; then, on rank FAULT_RANK, it does what FAULT says.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scaling.workload import Tensors, Workload
from scaling.workload.transformer import gpt2


def faulty(**arguments: Any) -> Workload:
    """The workload of `gpt2` with such a loss."""
    workload = gpt2(**arguments)
    calls = itertools.count(1)
    rank = os.environ.get("RANK", "0")

    def loss(module: nn.Module, tensors: Tensors) -> tuple[Tensor, int | Tensor]:
        if next(calls) == int(os.environ.get("FAULT_AT", "8")):
            Path(f"training-{rank}").touch()
            if rank == os.environ.get("FAULT_RANK"):
                go_wrong(os.environ["FAULT"])
        return workload.loss(module, tensors)

    return replace(workload, loss=loss)


def go_wrong(how: str) -> None:
    if how == "error":
        raise RuntimeError("the loss exploded")
    if how == "value":
        raise ValueError("a shape does not fit")
    if how == "memory":
        torch.empty(2**60)
    if how == "exit":
        os._exit(3)
    if how == "sleep":
        time.sleep(1000)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)

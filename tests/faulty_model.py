"""A GPT-2 that says when it trains, and can go wrong in its loss: `model.target=faulty_model:faulty`.

In the FAULT_AT-th loss of its process (8 by default: inside the window of a run with one warm-up step) it makes the
file `training-<rank>` in the working directory; then, on rank FAULT_RANK, it does what FAULT says. `faulty_layer` does
so in the middle of its forward: between two gathers, where a strategy gathers its weights.
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
    pass_by = Fault()

    def loss(module: nn.Module, tensors: Tensors) -> tuple[Tensor, int | Tensor]:
        pass_by()
        return workload.loss(module, tensors)

    return replace(workload, loss=loss)


def faulty_layer(**arguments: Any) -> Workload:
    """The workload of `gpt2` with such a last block."""
    workload = gpt2(**arguments)
    blocks = [module for module in workload.module.modules() if isinstance(module, workload.block_types)]
    pass_by = Fault()
    blocks[-1].register_forward_hook(lambda *_: pass_by())
    return workload


class Fault:
    """What is called once in every loss."""

    def __init__(self) -> None:
        self._calls = itertools.count(1)
        self._rank = os.environ.get("RANK", "0")

    def __call__(self) -> None:
        if next(self._calls) == int(os.environ.get("FAULT_AT", "8")):
            Path(f"training-{self._rank}").touch()
            if self._rank == os.environ.get("FAULT_RANK"):
                go_wrong(os.environ["FAULT"])


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
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

"""What an optimizer step really sends, counted from the collectives that were issued in untimed steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scaling.engine import Engine
from scaling.measure.host_waits import HostWaits
from scaling.workload import Batch

# Operator of c10d -> (kind, which argument holds S as nccl-tests defines it: the gathered output, the scattered input).
KINDS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
# Operators whose result the host has to see before it can go on.
HOST_READS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}  # by a mask: the host has to know how many
COPIES = {"aten::_to_copy", "aten::copy_"}


def busbw_factor(kind: str, n: int) -> float:
    """Bytes per rank on the wire for each byte of S: nccl-tests, doc/PERFORMANCE.md."""
    if kind == "all_reduce":
        return 2 * (n - 1) / n
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (n - 1) / n
    return 1.0


@dataclass(frozen=True)
class Collective:
    kind: str
    payload_bytes: int  # S
    elements: int


class Recorder(TorchDispatchMode):
    """Notes collectives and host synchronisations of everything that runs inside, backward included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[Collective] = []
        self.host_syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" and (known := KINDS.get(func._schema.name.split("::")[1])):
            kind, argument = known
            tensors = [leaf for leaf in tree_leaves(args[argument]) if isinstance(leaf, Tensor)]
            self.collectives.append(Collective(kind, sum(t.nbytes for t in tensors), sum(t.numel() for t in tensors)))
        elif _reads_host(func, args, kwargs):
            self.host_syncs += 1
        return func(*args, **kwargs)


def _reads_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = func._schema.name
    if name in HOST_READS:
        return True
    if name in INDEXING:
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name not in COPIES or kwargs.get("non_blocking"):
        return False
    if name == "aten::copy_":
        target, source = args[0].device, args[1]
        blocking = not (len(args) > 2 and args[2])
    else:
        target, source, blocking = torch.device(kwargs.get("device") or args[0].device), args[0], True
    return blocking and (target.type == "cpu") != (source.device.type == "cpu")  # either way CUDA's copy waits


@dataclass
class StepCount:
    """One optimizer step of this rank: its collectives by micro-step (the update is the last entry)."""

    world_size: int
    micro_steps: list[list[Collective]] = field(default_factory=list)
    host_syncs: int = 0
    gradient_elements: int = 0  # of the parameters that got a gradient

    @property
    def bytes(self) -> dict[str, float]:
        """Per kind: payload x busbw factor."""
        return self._sent(least_elements=0)

    @property
    def tensor_bytes(self) -> dict[str, float]:
        """The same without single numbers, as norms and overflow checks are."""
        return self._sent(least_elements=2)

    def _sent(self, least_elements: int) -> dict[str, float]:
        total: dict[str, float] = {}
        for collective in (c for micro_step in self.micro_steps for c in micro_step if c.elements >= least_elements):
            sent = collective.payload_bytes * busbw_factor(collective.kind, self.world_size)
            total[collective.kind] = total.get(collective.kind, 0.0) + sent
        return total

    @property
    def syncs(self) -> int:
        """Micro-steps in which gradients are reduced, the update counting for the last; scalars are no gradients."""
        *micro_steps, update = [any(c.kind in REDUCTIONS and c.elements > 1 for c in m) for m in self.micro_steps]
        return sum(micro_steps) + (update and not micro_steps[-1])

    def reduces(self, bytes_per_element: int) -> bool:
        """Whether reductions took in every byte of the gradients: less cannot have averaged them.

        Where no gradient was seen, nothing shows that they did. In bytes sent that is at least (n-1)/n of them, what a
        reduce_scatter sends, and twice it for an all_reduce.
        """
        reduced = sum(c.payload_bytes for micro_step in self.micro_steps for c in micro_step if c.kind in REDUCTIONS)
        return self.gradient_elements > 0 and reduced >= self.gradient_elements * bytes_per_element


def count_step(engine: Engine, next_batch: Callable[[], Batch], accumulation_steps: int, world_size: int) -> StepCount:
    """Run one optimizer step and count what it issues; slower than a real one, so never timed."""
    count = StepCount(world_size)
    device = next(engine.module.parameters()).device

    def record(part: Callable[[], object]) -> None:
        with HostWaits(device) as waits, Recorder() as recorder:
            part()
        count.micro_steps.append(recorder.collectives)
        count.host_syncs += recorder.host_syncs + waits.count

    with _gradients_of(engine.module) as with_gradient:
        for micro_step in range(1, accumulation_steps + 1):
            batch = next_batch()
            record(lambda batch=batch, last=micro_step == accumulation_steps: engine.accumulate(batch, last=last))  # type: ignore[misc]
        count.gradient_elements = sum(with_gradient())
    record(engine.step)
    return count


@contextlib.contextmanager
def _gradients_of(module: nn.Module) -> Iterator[Callable[[], list[int]]]:
    """Gives the sizes of the parameters that got a gradient meanwhile: ZeRO takes gradients away as they come, and
    FSDP computes them for other tensors than the parameters.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    seen: set[int] = set()
    handles = [p.register_hook(functools.partial(_note, seen, id(p))) for p in parameters]
    yield lambda: [elements(p) for p in parameters if id(p) in seen or p.grad is not None]
    for handle in handles:
        handle.remove()


def _note(seen: set[int], key: int, gradient: Tensor) -> None:
    seen.add(key)


def elements(parameter: Tensor) -> int:
    """Of the whole parameter, however much of it lies here."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))

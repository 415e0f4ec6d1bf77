"""Data parallel: every rank holds the whole model and the gradients are averaged once per optimizer step."""

# No `from __future__ import annotations`: DDP reads the annotations of a communication hook as objects.
import inspect
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from scaling.engine.precision import Precision
from scaling.engine.single import SingleEngine
from scaling.workload import Batch, Workload

MIB = 2**20
TORCH_BUCKET_MB = 25.0  # DDP's default; given as a number it would lose the small first bucket that comes with it

# Running statistics, which training never reads, are not sent before each forward. Since torch 2.13 under a new name.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


class _Replicas(SingleEngine):
    """The whole model on every rank."""

    def __init__(
        self,
        workload: Workload,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        world_size: int,
        *,
        clip: float | None = None,
    ) -> None:
        super().__init__(workload, optimizer, precision, clip=clip)
        self.reduce_dtype = precision.reduce_dtype
        self._world_size = world_size


class DDPEngine(_Replicas):
    """torch DistributedDataParallel: buckets are reduced while backward runs.

    `static_graph` is not offered: it fails inside the reducer together with accumulation.
    """

    def __init__(self, *args: Any, bucket_mb: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        device = self._parameters[0].device
        self._ddp = DistributedDataParallel(
            self.module,
            device_ids=None if device.type == "cpu" else [device],
            bucket_cap_mb=None if bucket_mb == TORCH_BUCKET_MB else bucket_mb,
            gradient_as_bucket_view=True,
            **KEEP_BUFFERS,
        )
        if self.reduce_dtype != torch.float32:
            self._ddp.register_comm_hook(self.reduce_dtype, _reduce_as)
        self._forward = self._ddp
        self._accumulates = False

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        if last:
            return self._backward(batch, self._world_size)
        self._accumulates = True
        with self._ddp.no_sync():  # around the forward too: it is the forward that arms the reducer
            return self._backward(batch, self._world_size)

    def _clear(self) -> None:
        """With accumulation gradients stay where they are, in the buckets: dropped, the first micro-step would make
        new ones beside these, as large as all parameters.
        """
        self._optimizer.zero_grad(set_to_none=not self._accumulates)


def _reduce_as(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average one bucket in `dtype`, on any device; torch's own hook for bf16 insists on NCCL or XCCL."""
    buffer = bucket.buffer()
    sent = buffer.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None

    def back(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(reduced.value()[0])

    return cast(torch.futures.Future[Tensor], work.get_future().then(back))


class DeferredEngine(_Replicas):
    """Data parallel without overlap: buckets of the same size, reduced one after another after the last backward."""

    def __init__(self, *args: Any, bucket_mb: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buckets = split_into_buckets(list(reversed(self._parameters)), int(bucket_mb * MIB))
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)  # as DistributedDataParallel does when it wraps

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        loss = self._backward(batch, self._world_size)
        if last:
            self._reduce()
        return loss

    @torch.no_grad()
    def _reduce(self) -> None:
        for bucket in self._buckets:
            gradients = [p.grad for p in bucket if p.grad is not None]
            if not gradients:
                continue  # parameters that this model does not use
            flat = torch.cat([g.flatten() for g in gradients]).div_(self._world_size).to(self.reduce_dtype)
            dist.all_reduce(flat)
            parts = flat.split([g.numel() for g in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def split_into_buckets(parameters: list[torch.nn.Parameter], limit_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Consecutive parameters of one type, each bucket closed as soon as it holds `limit_bytes`, as DDP packs them."""
    buckets: list[list[torch.nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if buckets[-1] and (size >= limit_bytes or parameter.dtype != buckets[-1][0].dtype):
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets

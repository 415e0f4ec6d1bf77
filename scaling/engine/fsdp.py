"""Fully sharded data parallel (FSDP2): ranks hold parts of all parameters, and gather whole blocks to compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from scaling.engine import Held
from scaling.engine.precision import Precision
from scaling.engine.single import SingleEngine
from scaling.workload import Batch, Workload


class FSDPEngine(SingleEngine):
    """torch `fully_shard`, one group per block and one for what lies outside the blocks.

    Weights are gathered as `gather_dtype` and gradients reduced as `reduce_dtype`; what is sharded stays float32.
    `make_optimizer` is given the module once it is sharded.
    """

    def __init__(
        self,
        workload: Workload,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        precision: Precision,
        world_size: int,
        *,
        gather_dtype: torch.dtype,
        reshard: bool = True,
        coalesce: bool = False,
        clip: float | None = None,
    ) -> None:
        device = next(workload.module.parameters()).device
        _shard(workload, device, gather_dtype, precision.reduce_dtype, reshard)
        super().__init__(workload, make_optimizer(workload.module), precision, clip=clip)
        self.gather_dtype, self.reduce_dtype = gather_dtype, precision.reduce_dtype
        self._world_size = world_size
        self._coalesce = coalesce

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        if self._coalesce:
            assert isinstance(self.module, FSDPModule)
            self.module.set_requires_gradient_sync(last)
        return self._backward(batch, self._world_size)

    def held(self) -> Held:
        """With `coalesce` also the whole gradients that wait for the last micro-step."""
        held = super().held()
        return held._replace(gradients=[*held.gradients, *whole_gradients(self.module)])


def _shard(
    workload: Workload, device: torch.device, gather_dtype: torch.dtype, reduce_dtype: torch.dtype, reshard: bool
) -> None:
    """Shard the blocks, then the rest. The order of the groups is that of the first forward: FSDP2 finds it itself."""
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=gather_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    # None is torch's own way: blocks are freed after forward, the rest is not, as backward wants it first.
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": None if reshard else False}
    for block in workload.blocks:
        fully_shard(block, **options)
    fully_shard(workload.module, **options)


def whole_gradients(module: nn.Module) -> list[Tensor]:
    """Gradients that were accumulated and not yet reduced; torch has no public name for them."""
    found = []
    for part in module.modules():
        group = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            whole = getattr(parameter, "_unsharded_param", None)
            found += [parameter.unsharded_accumulated_grad, None if whole is None else whole.grad]
    return [gradient for gradient in found if gradient is not None]

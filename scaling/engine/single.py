"""One device, no wrapper; and the update that every engine of whole parameters shares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scaling.engine import Held
from scaling.engine.precision import Precision
from scaling.workload import Batch, Workload


class SingleEngine:
    """The model as it is: forward, backward, update."""

    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    settings: dict[str, Any] | None = None

    def __init__(
        self, workload: Workload, optimizer: torch.optim.Optimizer, precision: Precision, *, clip: float | None = None
    ) -> None:
        self.module = workload.module
        self.loss = workload.loss
        self.skipped: Tensor | int = 0
        self._forward: nn.Module = workload.module
        self._optimizer = optimizer
        self._precision = precision
        self._scaler = precision.scaler()
        self._clip = clip
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.parameter_dtype = self.weight_dtype = self._parameters[0].dtype

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        del last  # nothing to reduce
        return self._backward(batch, world_size=1)

    def _backward(self, batch: Batch, world_size: int) -> Tensor:
        """Back-propagate sum x world / step_targets, which a mean over ranks makes sum / step_targets."""
        with self._precision.autocast():
            total, _ = self.loss(self._forward, batch.tensors)
        share = total / batch.step_targets
        self._scaler.scale(share * world_size if world_size > 1 else share).backward()
        return share.detach()

    def step(self) -> None:
        """Unscale and clip once, update, clear; a step left out for non-finite gradients is counted."""
        scaler = self._scaler
        if self._clip is not None:
            scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        if not scaler.is_enabled():
            self._optimizer.step()
        else:
            one = torch.ones((), device=self._parameters[0].device)
            before = scaler.scale(one)  # the scale as a device tensor: get_scale() would wait for the device
            scaler.step(self._optimizer)
            scaler.update()
            self.skipped = self.skipped + (scaler.scale(one) < before)
        self._clear()

    def held(self) -> Held:
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        return Held(
            model=[*self.module.parameters(), *self.module.buffers()],
            gradients=[p.grad for p in self._parameters if p.grad is not None],
            optimizer=[value for value in state if isinstance(value, Tensor)],
            buffers=[],
        )

    def _clear(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

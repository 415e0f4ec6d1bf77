"""DeepSpeed behind the two methods of an engine."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scaling.config import DeepSpeedConfig, TrainConfig
from scaling.deepspeed_file.sections import zero_section
from scaling.engine import Held, make_optimizer
from scaling.engine.deepspeed_ready import LONGEST_BUILD_S, import_deepspeed, wait_for_builds
from scaling.engine.deepspeed_streams import bound_waits, keep_until_reduced, let_gathers_wait
from scaling.engine.precision import Precision
from scaling.engine.zero_config import coalesces, offloads, stage, zero_settings
from scaling.workload import Batch, Workload

NESTED = 4  # how deep DeepSpeed's optimizers keep tensors in lists and dicts


class ZeroEngine:
    """A DeepSpeed engine. The accumulation boundary is set from `last`, so that no loop can put it elsewhere.

    `settings` is the DeepSpeed config as it holds, and could be given to `strategy.config`; optimizer and autocast are
    ours.
    """

    def __init__(
        self, config: TrainConfig, workload: Workload, precision: Precision, world_size: int, *, weights: torch.dtype
    ) -> None:
        self.module, self.loss = workload.module, workload.loss
        self.stage = stage(config.strategy) or 0
        self._world_size = world_size
        self._precision = precision
        self._own_file = isinstance(config.strategy, DeepSpeedConfig)
        self._coalesce = contextlib.ExitStack() if coalesces(config.strategy) else None
        self._coalescing = False
        device = next(self.module.parameters()).device
        half = weights != torch.float32
        if isinstance(config.strategy, DeepSpeedConfig):
            given = dict(config.strategy.settings)
        else:
            given = zero_settings(
                config, half_weights=half, weight_classes=weight_classes(self.module), on_host=device.type == "cpu"
            )
            if half:
                # Around the forward and not around the engine, which switches off any autocast but its own.
                self.module.forward = torch.autocast(device.type, weights)(self.module.forward)
        optimizer = None if "optimizer" in given else _optimizer(config, self.module, device)
        wait_for_builds(max(config.timeout_s, LONGEST_BUILD_S))
        self._engine = _initialize(self.module, optimizer, given, own_file=self._own_file)
        bound_waits(self._engine, config.timeout_s)
        if device.type != "cpu":
            keep_until_reduced(self._engine.optimizer)
        self._skipped: Tensor | int = 0
        self.settings: dict[str, Any] | None = _effective(given, self._engine)
        self.parameter_dtype = self._masters()[0].dtype
        self.weight_dtype = next(p for p in self.module.parameters() if p.requires_grad).dtype
        self.mixed_types = False
        self.reduce_dtype: torch.dtype | None
        self.reduce_dtype, self.gather_dtype = self._travels_as()

    def _travels_as(self) -> tuple[torch.dtype, torch.dtype | None]:
        """In which types gradients are reduced and weights gathered; None where no weights are."""
        if self.stage == 0:
            return self._engine.communication_data_type, None
        if not self._engine.torch_autocast_enabled():
            return self._engine.communication_data_type, self.weight_dtype
        # Under its autocast DeepSpeed marks parameters by class of module; the smallest type stands for all.
        travels = {getattr(p, "comm_dtype", p.dtype) for p in self.module.parameters() if p.requires_grad}
        self.mixed_types = len(travels) > 1
        smallest = min(travels, key=lambda dtype: dtype.itemsize)
        return smallest, smallest if self.stage == 3 else self.weight_dtype

    @property
    def skipped(self) -> Tensor | int:
        return self._engine.skipped_steps + self._skipped  # type: ignore[no-any-return]

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        if self._coalesce is not None and not self._coalescing:
            self._coalesce.enter_context(self._engine.coalesce_grad_reduction())
            self._coalescing = True
        self._engine.set_gradient_accumulation_boundary(last)
        with contextlib.nullcontext() if self._own_file else self._precision.autocast():
            total, _ = self.loss(self._engine, batch.tensors)
        share = total / batch.step_targets
        # DeepSpeed would divide by its number of accumulation steps; ours is divided by the targets of the whole step.
        self._engine.backward(share * self._world_size, scale_wrt_gas=False)
        if self._coalesce is not None and last:
            self._coalesce.close()  # reduces; and puts the boundary back to where it was before the first micro-step
            self._coalescing = False
            self._engine.set_gradient_accumulation_boundary(True)
        return share.detach()

    def step(self) -> None:
        """The update."""
        self._step()
        if self._engine.device.type != "cpu":
            let_gathers_wait(self._engine)

    def _step(self) -> None:
        scaler = self._engine.torch_autocast_z0_gradscaler
        if scaler is None:
            self._engine.step()
            return
        one = torch.ones((), device=self._engine.device)  # stage 0 keeps no count of skipped steps
        before = scaler.scale(one)
        self._engine.step()
        self._skipped = self._skipped + (scaler.scale(one) < before)

    def held(self) -> Held:
        """ZeRO's optimizers keep gradients under names with "grad", and buckets under "ipg"."""
        parameters = list(self.module.parameters())
        partitions = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
        whole = [p for p in parameters if p.numel()]  # ZeRO-3 leaves an empty tensor where nothing is gathered
        gradients = [p.grad for p in parameters if p.grad is not None]
        wrapper, basic = self._engine.optimizer, self._engine.basic_optimizer
        own = {} if wrapper is basic else vars(wrapper)
        masters = self._masters()
        gradients += [master.grad for master in masters if master.grad is not None]  # of an update on the host
        return Held(
            model=[*partitions, *whole, *self.module.buffers()],
            gradients=[*gradients, *tensors_in(value for name, value in own.items() if "grad" in name)],
            optimizer=[*tensors_in([basic.state]), *masters],
            buffers=list(tensors_in(value for name, value in own.items() if "ipg" in name)),
        )

    def _masters(self) -> list[Tensor]:
        """The weights that the optimizer updates; stage 3 gives them to it only for the time of a step."""
        kept = getattr(self._engine.optimizer, "fp32_partitioned_groups_flat", None)
        if kept is not None:
            return list(tensors_in([kept]))
        return [p for group in self._engine.basic_optimizer.param_groups for p in group["params"]]


def _initialize(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, given: dict[str, Any], *, own_file: bool
) -> Any:
    """DeepSpeed's engine. Raises ValueError, in one line, for settings that DeepSpeed does not take."""
    deepspeed = import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfigError
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    mistakes: tuple[type[Exception], ...] = (ValueError, DeepSpeedConfigError)
    if own_file:  # DeepSpeed says what is wrong with one in many ways
        mistakes += (AssertionError, TypeError, AttributeError, KeyError, ZeRORuntimeException)

    # Said by torch, of DeepSpeed's calls, at the first of each kind: nothing that a user could do.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\..*is deprecated", category=FutureWarning)
    try:
        return deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=given,
            dist_init_required=False,
        )[0]
    except mistakes as error:
        raise ValueError(f"DeepSpeed does not take these settings: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """What DeepSpeed says, and of a section that was checked by pydantic which key it speaks of."""
    if callable(each := getattr(error, "errors", None)):
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in each())
    return " ".join(str(error).split()) or type(error).__name__


def weight_classes(module: nn.Module) -> list[str]:
    """The classes of the modules that own parameters, as DeepSpeed's config names them."""
    kinds = {type(m) for m in module.modules() if next(m.parameters(recurse=False), None) is not None}
    return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def _optimizer(config: TrainConfig, module: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Ours; where DeepSpeed updates on the host, its Adam for hosts with the same numbers."""
    if not offloads(config.strategy) or config.optimizer.name != "adamw":
        return make_optimizer(module, config.optimizer, device)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameters = [p for p in module.parameters() if p.requires_grad]
    return DeepSpeedCPUAdam(parameters, lr=config.optimizer.lr, weight_decay=1e-2, adamw_mode=True)  # type: ignore[no-any-return]


def tensors_in(values: Iterable[Any], depth: int = NESTED) -> Iterator[Tensor]:
    """The tensors in containers in containers; `state` of an optimizer has tensors as keys, which are left out."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif depth and isinstance(value, list | tuple | set):
            yield from tensors_in(value, depth - 1)
        elif depth and isinstance(value, dict):
            yield from tensors_in(value.values(), depth - 1)
        elif depth and hasattr(value, "__dataclass_fields__"):
            yield from tensors_in(vars(value).values(), depth - 1)


def _effective(given: dict[str, Any], engine: Any) -> dict[str, Any]:
    """What was given, and what DeepSpeed made of all that changes the training or the comparison."""
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    zero = zero_section(given)
    if engine.zero_optimization():
        zero |= {
            "stage": int(engine.zero_optimization_stage()),
            "overlap_comm": bool(engine.zero_overlap_comm()),
            "reduce_bucket_size": int(engine.zero_reduce_bucket_size()),
            "allgather_bucket_size": int(engine.zero_allgather_bucket_size()),
            "compute_grad_norm": bool(engine.zero_compute_grad_norm()),
        }
    if engine.zero_optimization_partition_weights():
        del zero["compute_grad_norm"]  # of stages 1 and 2
        zero |= {
            "stage3_param_persistence_threshold": int(engine.zero_param_persistence_threshold()),
            "stage3_max_live_parameters": int(engine.zero_max_live_parameters()),
            "stage3_max_reuse_distance": int(engine.zero_max_reuse_distance()),
            "stage3_prefetch_bucket_size": int(engine.zero_prefetch_bucket_size()),
        }
    return {
        **given,
        "train_batch_size": engine.train_batch_size(),
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": float(engine.gradient_clipping()),
        "communication_data_type": _short(engine.communication_data_type),
        "data_types": {**given.get("data_types", {}), "grad_accum_dtype": _short(engine.get_data_types()[1])},
        "prescale_gradients": not engine.postscale_gradients(),
        "gradient_predivide_factor": float(engine.gradient_predivide_factor()),
        "zero_allow_untested_optimizer": bool(engine.zero_allow_untested_optimizer()),
        "zero_optimization": zero,
    }


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]

"""One rank of a parity launch: trains every case of one world size from the same seed and saves what came out.

python tests/parity_worker.py RANK WORLD_SIZE STORE_FILE OUTPUT_FILE
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from scaling.config import (
    BatchConfig,
    DDPConfig,
    FSDPConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    SingleConfig,
    StrategyConfig,
    TextConfig,
    TrackingConfig,
    TrainConfig,
    Zero0Config,
    Zero1Config,
    Zero2Config,
    Zero3Config,
    validate,
)
from scaling.engine import Engine, make_engine
from scaling.engine.ddp import DDPEngine
from scaling.engine.deepspeed_ready import prepare_environment
from scaling.engine.fsdp import FSDPEngine
from scaling.engine.zero import ZeroEngine
from scaling.measure.agreement import disagreeing, fingerprint
from scaling.measure.collectives import KINDS, REDUCTIONS, count_step
from scaling.measure.layout import Layout
from scaling.measure.memory_terms import memory_terms, textbook_bytes
from scaling.measure.volume import expected_volume
from scaling.ranks import Launch
from scaling.workload import Batch, build
from scaling.workload.checkpointing import checkpoint_blocks
from scaling.workload.loader import Place, open_source
from scaling.world import World

STEPS = 3
TEXT = Path(__file__).parent.parent / "LICENSE"
MODEL = ModelConfig(
    name="gpt_small",
    target="scaling.workload.transformer:gpt2",
    args={"layers": 2, "hidden_size": 32, "heads": 2, "vocabulary": 256},
    sequence_length=32,
)

BERT = ModelConfig(
    name="bert_small",
    target="scaling.workload.bert:bert",
    args={"layers": 2, "hidden_size": 32, "heads": 2, "mlp_size": 64, "vocabulary": 260, "positions": 32},
    sequence_length=32,
)
LLAMA = ModelConfig(
    name="llama_small",
    target="scaling.workload.transformer:llama",
    args={
        "layers": 2,
        "hidden_size": 32,
        "heads": 4,
        "key_value_heads": 2,
        "mlp_size": 64,
        "vocabulary": 256,
        "tied_embeddings": False,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
    },
    sequence_length=32,
)


def unreduced(engine: Engine, batch: Batch, last: bool) -> Tensor:
    """Sabotage: no reduction of more than a number takes place; each rank keeps its own part."""
    with Muted():  # type: ignore[no-untyped-call]
        return engine.accumulate(batch, last=last)


def never_last(engine: Engine, batch: Batch, last: bool) -> Tensor:
    """Sabotage: every micro-step is taken for an inner one."""
    return engine.accumulate(batch, last=False)


def always_last(engine: Engine, batch: Batch, last: bool) -> Tensor:
    """Sabotage: every micro-step is taken for the last, as by a loop around an engine that knows of no accumulation."""
    return engine.accumulate(batch, last=True)


def forward_outside(engine: Engine, batch: Batch, last: bool) -> Tensor:
    """Sabotage: the forward left outside of no_sync, the commonest fault of hand-written loops."""
    assert isinstance(engine, DDPEngine)
    total, _ = engine.loss(engine._ddp, batch.tensors)
    share = total / batch.step_targets
    with nullcontext() if last else engine._ddp.no_sync():
        (share * engine._world_size).backward()
    return share.detach()


def undivided(engine: Engine, batch: Batch, last: bool) -> Tensor:
    """Sabotage: each micro-batch's mean, summed over micro-batches and not divided by their number."""
    whole = Batch(batch.tensors, batch.samples, batch.targets, batch.targets * dist.get_world_size())
    return engine.accumulate(whole, last=last)


def per_micro_batch(engine: Engine, batch: Batch, last: bool) -> Tensor:
    """Sabotage: the mean of four micro-batch means, which weighs short sequences more than long ones."""
    own = Batch(batch.tensors, batch.samples, batch.targets, batch.targets * 4 * dist.get_world_size())
    return engine.accumulate(own, last=last)


class Muted(TorchDispatchMode):
    """Reductions that nobody counts and that reduce nothing: each rank keeps what it had, of a scatter its own part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func._schema.name.split("::")[1]
        if func.namespace != "c10d" or KINDS.get(kind, ("", 0))[0] not in REDUCTIONS:
            return func(*args, **(kwargs or {}))
        if kind == "allreduce_":
            (tensor,) = args[0]
            own = tensor.clone()
        else:
            assert kind == "_reduce_scatter_base_", kind
            tensor, own = args[0], args[1].chunk(dist.get_world_size())[dist.get_rank()].clone()
            args = (tensor.clone(), *args[1:])  # gloo writes to it once more when the caller waits
        if own.numel() <= 1:
            return func(*args, **(kwargs or {}))
        with _disable_current_modes():
            _, work = func(*args, **(kwargs or {}))
            work.wait()
            tensor.copy_(own.view_as(tensor))
        return ([tensor] if kind == "allreduce_" else tensor), work


Sabotage = Callable[[Engine, Batch, bool], Tensor]
SABOTAGES: dict[str, Sabotage] = {
    function.__name__: function
    for function in (unreduced, never_last, always_last, forward_outside, undivided, per_micro_batch)
}


def cut(**options: Any) -> Zero3Config:
    """Stage 3 that keeps nothing gathered, however small the model."""
    return Zero3Config(param_persistence_threshold=0, max_live_parameters=0, max_reuse_distance=0, **options)


STRATEGIES: dict[str, StrategyConfig] = {
    "single": SingleConfig(),
    "ddp": DDPConfig(),
    "deferred": DDPConfig(overlap=False),
    "fsdp": FSDPConfig(),
    "fsdp-kept": FSDPConfig(reshard=False),
    "fsdp-coalesced": FSDPConfig(coalesce_grad_reduction=True),
    "zero0": Zero0Config(),
    "zero1": Zero1Config(bucket_mb=0.02),
    "zero2": Zero2Config(bucket_mb=0.02),
    "zero2-deepspeed": Zero2Config(defaults="deepspeed"),
    "zero2-coalesced": Zero2Config(coalesce_grad_reduction=True),
    "zero3": cut(bucket_mb=0.02),
    "zero3-kept": Zero3Config(),
    "zero3-reused": Zero3Config(param_persistence_threshold=0),
    "zero3-coalesced": cut(coalesce_grad_reduction=True),
}
SHARDED = [name for name in STRATEGIES if name.startswith(("fsdp", "zero"))]


def case_config(world_size: int, micro: int, accumulation: int, lengths: str = "mixed", **changes: Any) -> TrainConfig:
    config = TrainConfig(
        model=changes.get("model", MODEL),
        checkpointing=changes.get("checkpointing", False),
        strategy=STRATEGIES[changes.get("strategy", "ddp")],
        precision=PrecisionConfig(changes.get("precision", "fp32"), changes.get("reduce", "fp32")),
        data=TextConfig(path=str(TEXT), lengths=lengths),
        tracking=TrackingConfig("off"),
        batch=BatchConfig(micro, accumulation),
        optimizer=OptimizerConfig("sgd", lr=0.5, clip=changes.get("clip")),
    )
    return validate(config, world_size)


def cases(world_size: int) -> dict[str, tuple[TrainConfig, str | None]]:
    """Name -> (config, sabotage)."""
    shapes = {1: [(8, 1), (2, 4)], 2: [(4, 1), (1, 4)], 4: [(1, 2)]}[world_size]
    found: dict[str, tuple[TrainConfig, str | None]] = {}
    for lengths in ("fixed", "mixed"):
        for micro, accumulation in shapes:
            found[f"{micro}x{accumulation}-{lengths}"] = (case_config(world_size, micro, accumulation, lengths), None)
        for name in SABOTAGES if world_size == 2 else ():
            found[f"{name}-{lengths}"] = (case_config(2, 1, 4, lengths), name)
    micro, accumulation = shapes[-1]
    found["deferred"] = (case_config(world_size, micro, accumulation, strategy="deferred"), None)
    found["clipped"] = (case_config(world_size, micro, accumulation, clip=0.05), None)
    found["bf16-reduce"] = (case_config(world_size, micro, accumulation, reduce="bf16"), None)
    found["checkpointed"] = (case_config(world_size, micro, accumulation, checkpointing=True), None)
    for model in (BERT, LLAMA):
        shape = (8, 1) if world_size == 1 else (micro, accumulation)
        found[model.name] = (case_config(world_size, *shape, model=model), None)
    if world_size == 1:
        found["single"] = (case_config(1, micro, accumulation, strategy="single"), None)
        found["8x1-clipped"] = (case_config(1, 8, 1, clip=0.05), None)
        found["16x1-mixed"] = (case_config(1, 16, 1), None)
        found["bf16"] = (case_config(1, 8, 1, strategy="single", precision="bf16"), None)
    return found | _sharded_cases(world_size)


def _sharded_cases(world_size: int) -> dict[str, tuple[TrainConfig, str | None]]:
    """Every strategy that shards, or is DeepSpeed's, at accumulation 1 and 4; its sabotages; its variants."""
    found: dict[str, tuple[TrainConfig, str | None]] = {}
    shapes = {1: [(2, 4)], 2: [(4, 1), (1, 4)], 4: [(2, 1), (1, 4)]}[world_size]
    for name in SHARDED if world_size > 1 else ("fsdp", "zero1", "zero2", "zero3"):
        for micro, accumulation in shapes:
            found[f"{name}-{micro}x{accumulation}"] = (
                case_config(world_size, micro, accumulation, strategy=name),
                None,
            )
    if world_size != 2:
        return found
    for name in ("fsdp", "zero0", "zero1", "zero2", "zero3"):
        for sabotage in ("unreduced", "undivided", "per_micro_batch"):
            found[f"{name}-{sabotage}"] = (case_config(2, 1, 4, strategy=name), sabotage)
        for variant in (
            {"clip": 0.05},
            {"precision": "bf16"},
            {"precision": "bf16", "reduce": "bf16"},
            {"checkpointing": True},
        ):
            label = "-".join(str(value) for value in variant.values())
            found[f"{name}-{label}"] = (case_config(2, 1, 4, strategy=name, **variant), None)
    for name in ("ddp", "deferred"):
        found[f"{name}-bf16"] = (case_config(2, 1, 4, strategy=name, precision="bf16"), None)
    for name in ("fsdp-coalesced", "zero0", "zero1", "zero2", "zero3"):
        for sabotage in ("never_last", "always_last"):
            found[f"{name}-{sabotage}"] = (case_config(2, 1, 4, strategy=name), sabotage)
    return found


class Sabotaged:
    """An engine whose `accumulate` is another."""

    def __init__(self, engine: Engine, how: Sabotage) -> None:
        self._engine, self._how = engine, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        return self._how(self._engine, batch, last)


def whole_weights(engine: Engine) -> dict[str, Tensor]:
    """The float32 weights that the optimizer updates, whole, on every rank."""
    named = dict(engine.module.named_parameters())
    if isinstance(engine, FSDPEngine):
        return {name: p.full_tensor().detach().clone() for name, p in named.items()}  # type: ignore[attr-defined]
    if isinstance(engine, ZeroEngine) and engine.stage > 0:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(p).detach().clone().view(shape_of(p)) for name, p in named.items()}
    return {name: p.detach().clone() for name, p in named.items()}


def shape_of(parameter: Tensor) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def train(config: TrainConfig, sabotage: str | None, world: World) -> dict[str, Any]:
    """Three steps, then what the checks of a run say of a fourth."""
    workload = build(config.model, world.device, config.seed)
    if config.checkpointing:
        checkpoint_blocks(workload)
    start = {name: p.detach().clone() for name, p in workload.module.named_parameters()}
    place = Place(world.rank, world.size, world.device, [])
    source = open_source(config.data, config.batch, workload, config.seed, place)
    layout = Layout.of(workload)
    engine = make_engine(config, workload, world.device, world.size)
    trained: Engine = engine if sabotage is None else Sabotaged(engine, SABOTAGES[sabotage])
    _, accumulation, _ = config.batch.sizes
    losses = []
    for _ in range(STEPS):
        loss = sum(
            trained.accumulate(next(source.batches), last=micro_step == accumulation - 1)
            for micro_step in range(accumulation)
        )
        engine.step()
        losses.append(float(sum(world.gather(loss))))
    kept = [p.grad.untyped_storage().data_ptr() for p in workload.module.parameters() if p.grad is not None]
    end = whole_weights(engine)
    agree = engine.gather_dtype is None and not disagreeing(world.gather(fingerprint(workload.module)))
    terms = memory_terms(engine, lambda: next(source.batches), accumulation, world.device)
    count = count_step(trained, lambda: next(source.batches), accumulation, world.size)
    volume = expected_volume(config, engine, layout, world.size)
    textbook = textbook_bytes(config, engine, layout, world.size)
    forget_deepspeed(engine)
    return {
        "start": start,
        "end": end,
        "losses": losses,
        "agree": agree,
        "gradient_storages": len(set(kept)),
        "terms": terms,
        "syncs": count.syncs,
        "bytes": count.bytes,
        "tensor_bytes": count.tensor_bytes,
        "gradient_elements": count.gradient_elements,
        "volume": volume,
        "textbook": textbook,
        "host_syncs": count.host_syncs,
        "reduced": count.reduces((engine.reduce_dtype or torch.float32).itemsize),
        "parameters": layout.elements,
        "dtypes": [str(d) for d in (engine.parameter_dtype, engine.gather_dtype, engine.reduce_dtype)],
    }


def forget_deepspeed(engine: Engine) -> None:
    """Let the next engine of this process start as in a process of its own."""
    if isinstance(engine, ZeroEngine):
        from deepspeed.runtime import torch_autocast

        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
        engine._engine.destroy()


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    only = sys.argv[5:]
    torch.set_num_threads(1)
    launch = Launch(rank, rank, world_size, world_size, nodes=1, torchrun=True)
    world = World.open(launch, {}, request="cpu", store=dist.FileStore(sys.argv[3], world_size), timeout_s=120)
    prepare_environment(world.device)
    results = {
        name: train(config, sabotage, world)
        for name, (config, sabotage) in cases(world_size).items()
        if not only or name in only
    }
    if rank == 0:
        torch.save(results, sys.argv[4])
    world.close()


if __name__ == "__main__":
    main()

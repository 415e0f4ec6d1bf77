"""What can be configured, and what is refused. Nothing below `main()` sees a DictConfig."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

MAX_SEED = 2**31
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass
class ModelConfig:
    """`target` is `package.module:function`; it is called with `args`, `dropout`, and the sizes that are given."""

    name: str = MISSING
    target: str = MISSING
    args: dict[str, Any] = field(default_factory=dict)
    sequence_length: int | None = None
    image_size: int | None = None
    channels_last: bool | None = None
    dropout: float = 0.0
    micro_batch_size: int = 1


@dataclass
class StrategyConfig:
    name: str = MISSING


@dataclass
class SingleConfig(StrategyConfig):
    name: str = "single"


@dataclass
class DDPConfig(StrategyConfig):
    name: str = "ddp"
    bucket_mb: float = 25.0
    overlap: bool = True


@dataclass
class FSDPConfig(StrategyConfig):
    name: str = "fsdp"
    reshard: bool = True
    coalesce_grad_reduction: bool = False


@dataclass
class Zero0Config(StrategyConfig):
    """DeepSpeed's data parallel: its buckets and its order are fixed."""

    name: str = "zero0"


@dataclass
class Zero1Config(StrategyConfig):
    name: str = "zero1"
    bucket_mb: float = DDPConfig.bucket_mb
    overlap: bool = DDPConfig.overlap
    defaults: str = "scaling"
    offload_optimizer: bool = False


@dataclass
class Zero2Config(Zero1Config):
    name: str = "zero2"
    coalesce_grad_reduction: bool = False


@dataclass
class Zero3Config(Zero2Config):
    """The thresholds are numbers of elements; None is DeepSpeed's own value."""

    name: str = "zero3"
    offload_parameters: bool = False
    param_persistence_threshold: int | None = None
    max_live_parameters: int | None = None
    max_reuse_distance: int | None = None


@dataclass
class DeepSpeedConfig(StrategyConfig):
    """`config` is the user's own DeepSpeed file; `settings` is what stands in it, which `validate` fills in."""

    name: str = "deepspeed"
    config: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class PrecisionConfig:
    """`name` is the compute type; gradients travel in `reduce`; weights that are gathered, in `gather`."""

    name: str = MISSING
    reduce: str = "fp32"
    gather: str = "auto"


@dataclass
class DataConfig:
    name: str = MISSING


@dataclass
class SyntheticConfig(DataConfig):
    name: str = "synthetic"
    batches: int = 4


@dataclass
class TextConfig(DataConfig):
    name: str = "text"
    path: str | None = None
    lengths: str = "fixed"
    workers: int = 0


@dataclass
class ImagesConfig(DataConfig):
    name: str = "images"
    path: str | None = None
    workers: int = 4


@dataclass
class TrackingConfig:
    name: str = MISSING


@dataclass
class BatchConfig:
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    global_batch_size: int | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(micro, accumulation, global) of a validated config."""
        assert self.micro_batch_size and self.accumulation_steps and self.global_batch_size
        return self.micro_batch_size, self.accumulation_steps, self.global_batch_size


@dataclass
class OptimizerConfig:
    name: str = "adamw"
    lr: float = 1e-4
    clip: float | None = None


@dataclass
class MeasureConfig:
    warmup_steps: int = 10
    block_steps: int = 10
    min_blocks: int = 5
    max_steps: int | None = None
    max_seconds: float = 60.0
    target_ci: float = 0.01
    matmul_rate: bool = True


@dataclass
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    compile: bool = False
    checkpointing: bool = False
    threads: int = 1
    timeout_s: float = 300.0
    device: str = "auto"
    seed: int = 0
    output_dir: str = "runs"
    run_dir: str | None = None


# Groups whose options differ in their keys.
OPTIONS: dict[str, dict[str, type]] = {
    "strategy": {
        "single": SingleConfig,
        "ddp": DDPConfig,
        "fsdp": FSDPConfig,
        "zero0": Zero0Config,
        "zero1": Zero1Config,
        "zero2": Zero2Config,
        "zero3": Zero3Config,
        "deepspeed": DeepSpeedConfig,
    },
    "data": {"synthetic": SyntheticConfig, "text": TextConfig, "images": ImagesConfig},
    "tracking": {"off": TrackingConfig},
}


def register_schemas() -> None:
    """Put every schema where the group files pull it in; `schema/` keeps them from being options of a group."""
    store = ConfigStore.instance()
    store.store(group="schema", name="train", node=TrainConfig, package="_global_")
    store.store(group="schema", name="model", node=ModelConfig)
    store.store(group="schema", name="precision", node=PrecisionConfig)
    for group, options in OPTIONS.items():
        for name, node in options.items():
            # As a key of its group, and the group's file is `@package _global_`: at the top of a file, or of a schema,
            # Hydra would take `strategy.defaults` for a list of its own.
            inner = {group: OmegaConf.structured(node)} if hasattr(node, "defaults") else node
            store.store(group=f"schema/{group}", name=name, node=inner)


def conf_dir() -> Path:
    """Where the YAML files are: inside an installed wheel, else at the top of the checkout."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "train.yaml").is_file():
            return candidate
    raise ValueError(f"conf/ is neither in {package} nor beside it: this installation is broken; install scaling again")


def resolve_batch(batch: BatchConfig, default_micro: int, world_size: int) -> BatchConfig:
    """Fill in micro x accumulation x world = global; raise ValueError with every number involved."""
    micro, accumulation, total = batch.micro_batch_size, batch.accumulation_steps, batch.global_batch_size
    for name, value in asdict(batch).items():
        if value is not None and value < 1:
            raise ValueError(f"batch.{name}={value}: must be at least 1")
    if micro is not None and accumulation is not None and total is not None:
        raise ValueError(
            f"batch: micro_batch_size={micro}, accumulation_steps={accumulation} and global_batch_size={total} are all "
            f"given; give two, the third follows from the {_ranks(world_size)}"
        )
    if total is None:
        micro = default_micro if micro is None else micro
        accumulation = 1 if accumulation is None else accumulation
        return BatchConfig(micro, accumulation, micro * accumulation * world_size)
    if micro is None:
        accumulation = 1 if accumulation is None else accumulation
        micro = _divide(total, accumulation * world_size, f"accumulation_steps={accumulation}", world_size)
    else:
        accumulation = _divide(total, micro * world_size, f"micro_batch_size={micro}", world_size)
    return BatchConfig(micro, accumulation, total)


def _divide(total: int, divisor: int, given: str, world_size: int) -> int:
    if total % divisor:
        below, above = total // divisor * divisor, math.ceil(total / divisor) * divisor
        nearest = " or ".join(str(n) for n in (below, above) if n)
        raise ValueError(
            f"batch.global_batch_size={total} does not divide by {given} x {_ranks(world_size)} = {divisor}; "
            f"nearest that does: {nearest}"
        )
    return total // divisor


def _ranks(world_size: int) -> str:
    return f"{world_size} rank" + ("s" if world_size != 1 else "")


def validate(config: TrainConfig, world_size: int) -> TrainConfig:
    """The config with the batch filled in. Raises ValueError for what no machine of this world size can run."""
    _one_of("precision.name", config.precision.name, PRECISIONS)
    _one_of("precision.reduce", config.precision.reduce, ("fp32", "bf16"))
    _one_of("precision.gather", config.precision.gather, ("auto", "fp32", "compute"))
    _one_of("optimizer.name", config.optimizer.name, ("adamw", "sgd"))
    measure, optimizer = config.measure, config.optimizer
    _at_least("measure.warmup_steps", measure.warmup_steps, 0)
    for name in ("block_steps", "min_blocks", "max_steps"):
        _at_least(f"measure.{name}", getattr(measure, name), 1)
    for name, value in {
        "measure.max_seconds": measure.max_seconds,
        "measure.target_ci": measure.target_ci,
        "timeout_s": config.timeout_s,
        "optimizer.lr": optimizer.lr,
        "optimizer.clip": optimizer.clip,
    }.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: must be greater than 0")
    _at_least("threads", config.threads, 1)
    if not 0 <= config.seed < MAX_SEED:
        raise ValueError(f"seed={config.seed}: must be in [0, 2^31)")
    for name in ("sequence_length", "image_size", "micro_batch_size"):
        _at_least(f"model.{name}", getattr(config.model, name), 1)
    if not 0 <= config.model.dropout < 1:
        raise ValueError(f"model.dropout={config.model.dropout}: must be in [0, 1)")
    _validate_groups(config)
    _validate_strategy(config.strategy, world_size)
    if isinstance(config.strategy, DeepSpeedConfig):
        from scaling.deepspeed_file import reconcile

        config = reconcile(config, world_size)
    return replace(config, batch=resolve_batch(config.batch, config.model.micro_batch_size, world_size))


def _validate_groups(config: TrainConfig) -> None:
    for group, options in OPTIONS.items():
        chosen = getattr(config, group)
        if chosen.name not in options or type(chosen) is not options[chosen.name]:
            raise ValueError(f"{group}.name={chosen.name}: choose with {group}=OPTION; there are: {', '.join(options)}")
    if isinstance(config.data, TextConfig):
        _one_of("data.lengths", config.data.lengths, ("fixed", "mixed"))
    if isinstance(config.data, ImagesConfig) and config.data.path is None:
        raise ValueError("data.path: data=images needs a folder of class folders: data.path=FOLDER")
    if isinstance(config.data, TextConfig | ImagesConfig):
        if config.data.path == "":
            raise ValueError("data.path= is empty; name a file or folder, or leave it out")
        _at_least("data.workers", config.data.workers, 0)
    if isinstance(config.data, SyntheticConfig):
        _at_least("data.batches", config.data.batches, 1)


def _validate_strategy(strategy: StrategyConfig, world_size: int) -> None:
    if isinstance(strategy, SingleConfig) and world_size != 1:
        raise ValueError(
            f"strategy=single is one device without a wrapper, but {world_size} ranks were started; "
            "use strategy=ddp, or --nproc_per_node=1"
        )
    if isinstance(strategy, DDPConfig | Zero1Config) and not 0 < strategy.bucket_mb < math.inf:
        raise ValueError(f"strategy.bucket_mb={strategy.bucket_mb}: must be greater than 0")
    if isinstance(strategy, Zero1Config):
        _one_of("strategy.defaults", strategy.defaults, ("scaling", "deepspeed"))
        own = {"bucket_mb": DDPConfig.bucket_mb, "overlap": DDPConfig.overlap}
        for name, default in own.items() if strategy.defaults == "deepspeed" else ():
            if (value := getattr(strategy, name)) != default:
                raise ValueError(
                    f"strategy.{name}={value}: strategy.defaults=deepspeed takes DeepSpeed's own; leave out either"
                )
    if isinstance(strategy, Zero3Config):
        for name in ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance"):
            _at_least(f"strategy.{name}", getattr(strategy, name), 0)


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key}={value}: choose one of {', '.join(allowed)}")


def _at_least(key: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{key}={value}: must be at least {least}")


def digest(config: TrainConfig) -> str:
    """Eight hex digits that name a configuration; where it is written and tracked does not count."""
    values = asdict(config)
    for key in ("output_dir", "run_dir", "tracking"):
        del values[key]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]

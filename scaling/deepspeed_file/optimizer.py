"""The optimizer of a DeepSpeed file beside that of the command line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scaling.config import OptimizerConfig
from scaling.deepspeed_file.sections import AUTO, section, shown


def refuse_two_optimizers(settings: dict[str, Any], given: OptimizerConfig) -> None:
    """Raise ValueError where the file has an optimizer and the command line another one."""
    if "optimizer" not in settings:
        return
    kind, lr = section(settings, "optimizer").get("type"), section(settings, "optimizer.params").get("lr")
    usual = OptimizerConfig()
    if given.name != usual.name and given.name != str(kind).lower():
        raise ValueError(f"optimizer.type={shown(kind)} in the file, but optimizer.name={given.name}; leave out either")
    if given.lr != usual.lr and lr not in (None, AUTO, given.lr):
        raise ValueError(
            f"optimizer.params.lr={shown(lr)} in the file, but optimizer.lr={given.lr}; leave out either, or write "
            '"auto" into the file'
        )


def optimizer_of(settings: dict[str, Any], given: OptimizerConfig) -> OptimizerConfig:
    """What will update: the file's optimizer, where it has one."""
    kind, lr = section(settings, "optimizer").get("type"), section(settings, "optimizer.params").get("lr")
    if kind is None:
        return given
    return replace(given, name=str(kind).lower(), lr=float(lr) if isinstance(lr, int | float) else given.lr)

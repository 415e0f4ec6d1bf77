"""A DeepSpeed file of the user's: read, reconciled with the command line, and described. Imports no DeepSpeed."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from scaling.config import BatchConfig, DeepSpeedConfig, TrainConfig
from scaling.deepspeed_file import notes as _notes
from scaling.deepspeed_file.autos import fill_autos
from scaling.deepspeed_file.batch import fill_batch, resolve
from scaling.deepspeed_file.notes import DEFAULT_CLIP
from scaling.deepspeed_file.optimizer import optimizer_of, refuse_two_optimizers
from scaling.deepspeed_file.precision import fill_communication_type, fill_precision, refuse_accumulation
from scaling.deepspeed_file.reading import read_settings
from scaling.deepspeed_file.refusals import refuse_other_training
from scaling.deepspeed_file.sections import reductions_per_step, settings_stage, shown
from scaling.deepspeed_file.spelling import refuse_misspelt

__all__ = ["notes", "read_settings", "reconcile", "reductions_per_step", "resolve", "settings_stage"]


def reconcile(config: TrainConfig, world_size: int) -> TrainConfig:
    """The config with `strategy.settings` and `batch` filled from the file and the command line.

    Raises ValueError in one line where the two disagree, or where the file asks for another kind of training.
    """
    strategy = config.strategy
    assert isinstance(strategy, DeepSpeedConfig)
    if strategy.settings:
        raise ValueError(
            "strategy.settings is filled in by the run; put what you need into the file of strategy.config"
        )
    settings = read_settings(strategy.config)
    try:
        refuse_misspelt(settings)
        refuse_other_training(settings, world_size)
        refuse_two_optimizers(settings, config.optimizer)
        micro, steps = fill_batch(settings, config.batch, config.model.micro_batch_size, world_size)
        fill_precision(settings, config.precision.name)
        refuse_accumulation(settings)
        fill_communication_type(settings, config.precision.reduce)
        _fill_clipping(settings, config.optimizer.clip)
        fill_autos(settings, config.optimizer.lr)
    except ValueError as error:
        raise ValueError(f"strategy.config={strategy.config}: {error}") from None
    batch = BatchConfig(micro_batch_size=micro, accumulation_steps=steps)
    # What will hold, so that the record does not speak of another optimizer, nor of no clipping where DeepSpeed clips.
    optimizer = replace(
        optimizer_of(settings, config.optimizer), clip=settings.get("gradient_clipping", DEFAULT_CLIP) or None
    )
    return replace(config, strategy=replace(strategy, settings=settings), batch=batch, optimizer=optimizer)


def notes(config: TrainConfig) -> list[str]:
    """What a user should know about a reconciled file, one line each. Reads the file again."""
    assert isinstance(config.strategy, DeepSpeedConfig)
    written = read_settings(config.strategy.config)
    return _notes.describe(written, copy.deepcopy(config.strategy.settings), config.precision.reduce)


def _fill_clipping(settings: dict[str, Any], clip: float | None) -> None:
    """Left out and no `optimizer.clip`: it stays out, and DeepSpeed's own default holds."""
    if "gradient_clipping" not in settings:
        if clip is not None:
            settings["gradient_clipping"] = clip
        return
    value = settings["gradient_clipping"]
    if value == "auto":
        settings["gradient_clipping"] = 0.0 if clip is None else clip
    elif isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f'gradient_clipping={shown(value)}: must be a number from 0 (off), or "auto"')
    elif clip is not None and value != clip:
        raise ValueError(
            f"gradient_clipping={value} but optimizer.clip={clip} on the command line; "
            'make them equal, leave out optimizer.clip, or write "auto" into the file'
        )

"""DeepSpeed files for tests: public ones, ones that a test writes, and what a refusal of them says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scaling.config import (
    DeepSpeedConfig,
    ModelConfig,
    PrecisionConfig,
    SyntheticConfig,
    TrackingConfig,
    TrainConfig,
)
from scaling.deepspeed_file import reconcile

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed"


def config(path: Path | str | None, **changes: Any) -> TrainConfig:
    """A run with this file, for a model whose own micro-batch is 8."""
    base = TrainConfig(
        model=ModelConfig("m", "a:b", micro_batch_size=8),
        strategy=DeepSpeedConfig(config=None if path is None else str(path)),
        precision=PrecisionConfig("fp32"),
        data=SyntheticConfig(),
        tracking=TrackingConfig("off"),
    )
    return replace(base, **changes)


def write(folder: Path, content: dict[str, Any] | str | bytes) -> Path:
    """A file with this content; a dict as JSON, anything else as it is."""
    path = folder / "ds.json"
    text = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def settings_of(reconciled: TrainConfig) -> dict[str, Any]:
    assert isinstance(reconciled.strategy, DeepSpeedConfig)
    return reconciled.strategy.settings


def refusal(path: Path | str | None, world_size: int = 2, **changes: Any) -> str:
    """The one line that refuses this file, without the file's name."""
    with pytest.raises(ValueError, match="strategy") as error:
        reconcile(config(path, **changes), world_size)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"strategy.config={path or ''}:")
    return message.removeprefix(f"strategy.config={path}: ")

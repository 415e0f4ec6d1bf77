"""The model files of conf/ as configs."""

from __future__ import annotations

from typing import Any

import yaml

from scaling.config import ModelConfig, conf_dir


def model(name: str, **changes: Any) -> ModelConfig:
    """conf/model/NAME.yaml, with some of its keys changed."""
    values = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())
    values.pop("defaults")
    return ModelConfig(**(values | changes))

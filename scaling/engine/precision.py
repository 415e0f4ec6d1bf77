"""Precision: the compute type. Weights and optimizer state stay float32."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from scaling.config import PrecisionConfig
from scaling.hardware.device import device_name

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
REDUCE = {"fp32": torch.float32, "bf16": torch.bfloat16}
TF32_CAPABILITY = (8, 0)  # NVIDIA Ampere
BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Precision:
    name: str
    device_type: str
    reduce_dtype: torch.dtype

    @classmethod
    def of(cls, config: PrecisionConfig, device: torch.device) -> Precision:
        return cls(config.name, device.type, REDUCE[config.reduce])

    def apply(self) -> None:
        """Allow TF32 for `tf32` and forbid it for the others: fp32 that runs as TF32 is TF32."""
        torch.set_float32_matmul_precision("high" if self.name == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = self.name == "tf32"

    def autocast(self) -> AbstractContextManager[object]:
        dtype = AUTOCAST.get(self.name)
        return torch.autocast(self.device_type, dtype) if dtype else nullcontext()

    def scaler(self) -> torch.amp.GradScaler:
        """Scales losses for fp16 only; disabled, it hands everything through."""
        return torch.amp.GradScaler(self.device_type, enabled=self.name == "fp16")


def check_precision(name: str, device: torch.device) -> None:
    """Raise ValueError for a precision that this device cannot do, naming those that it can."""
    if name == "tf32" and os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        raise ValueError("precision=tf32: NVIDIA_TF32_OVERRIDE=0 makes it run as fp32; unset it, or use precision=fp32")
    capable = [p for p in ("fp32", "tf32", "bf16", "fp16") if _capable(p, device)]
    if name not in capable:
        raise ValueError(
            f"precision={name}: {device.type} ({device_name(device)}) does not do it; it does {', '.join(capable)}"
        )


def _capable(name: str, device: torch.device) -> bool:
    if name == "fp32":
        return True
    if device.type == "cpu":
        return name == "bf16"
    if device.type == "cuda" and torch.version.cuda:
        capability = torch.cuda.get_device_capability(device)
        return {"tf32": capability >= TF32_CAPABILITY, "bf16": capability >= BF16_CAPABILITY, "fp16": True}[name]
    return name != "tf32"

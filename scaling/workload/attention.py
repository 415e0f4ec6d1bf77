"""The attention that every transformer here uses: torch's fused kernels, registered with transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "scaling_sdpa"
FLASH_CAPABILITY = (8, 0)  # NVIDIA Ampere


def attention(
    module: Any,  # with transformers' config
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Stock fused attention on [samples, heads, positions, head size], causal by flag; keys may have fewer heads.

    All three are taken to the type of the values: under autocast rotary embeddings leave queries and keys in float32.

    Registered under a name that has no mask function: transformers' own path synchronises with the host once per
    forward to look for packed sequences, and builds an explicit mask when compiled. A mask is True where a key is
    attended to, and for bidirectional models only: in a causal one padding follows the last target.
    """
    causal = bool(getattr(module, "is_causal", False))
    if causal and attention_mask is not None:
        raise ValueError("padding masks are not used in causal models: padding follows the last target")
    query, key = query.to(value.dtype), key.to(value.dtype)
    groups = query.shape[1] // key.shape[1]
    grouped = groups > 1 and takes_groups(value, getattr(module.config, "flash_takes_groups", False))
    if groups > 1 and not grouped:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=grouped,
    )
    return output.transpose(1, 2), None


def flash_takes_groups() -> bool:
    """Whether this host's CUDA devices have a fused kernel for fewer key than query heads: NVIDIA from Ampere on.

    Asked while a model is built and kept in its config: a compiled forward cannot ask.
    """
    return (
        torch.cuda.is_available()
        and torch.version.hip is None
        and torch.cuda.get_device_capability() >= FLASH_CAPABILITY
    )


def takes_groups(value: Tensor, has_flash: bool) -> bool:
    """Whether a fused kernel takes keys and values of this type and place in groups; flash attention is for halves.

    Where none does, torch falls back to plain products with a matrix of [samples, heads, positions, positions].
    """
    if value.device.type in ("cpu", "meta"):
        return True
    return value.is_cuda and value.dtype in (torch.bfloat16, torch.float16) and has_flash


AttentionInterface.register(ATTENTION, attention)

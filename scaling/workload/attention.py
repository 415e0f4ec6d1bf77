"""The attention that every transformer here uses: torch's fused kernels, registered with transformers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "scaling_sdpa"


def attention(
    module: nn.Module,
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

    Registered under a name that has no mask function: transformers' own path synchronises with the host once per
    forward to look for packed sequences, and builds an explicit mask when compiled. A mask is True where a key is
    attended to, and for bidirectional models only: in a causal one padding follows the last target.
    """
    causal = bool(getattr(module, "is_causal", False))
    if causal and attention_mask is not None:
        raise ValueError("padding masks are not used in causal models: padding follows the last target")
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention)

"""Language models from transformers configs, randomly initialised, trained on next-token prediction."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from scaling.workload import IGNORED, Tensors, Workload

ATTENTION = "scaling_sdpa"


def _attention(
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
    """Stock fused attention on [batch, heads, positions, head size], causal by flag.

    Registered under a name that has no mask function: transformers' own path synchronises with the host once per
    forward to look for packed sequences, and builds an explicit mask when compiled.
    """
    if attention_mask is not None:
        raise ValueError("padding masks are not used here: padding follows the last target of a causal sequence")
    causal = bool(getattr(module, "is_causal", False))
    output = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling, is_causal=causal)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


def gpt2(
    *, layers: int, hidden_size: int, heads: int, vocabulary: int, sequence_length: int, dropout: float
) -> Workload:
    """A GPT-2 with tied embeddings over `sequence_length` positions."""
    sizes = {"layers": layers, "hidden_size": hidden_size, "heads": heads, "vocabulary": vocabulary}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"model.args.{name}={size}: must be a whole number from 1 on")
    if hidden_size % heads:
        raise ValueError(f"model.args: hidden_size={hidden_size} does not divide by heads={heads}")
    config = GPT2Config(
        n_layer=layers,
        n_embd=hidden_size,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=sequence_length,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=ATTENTION,
    )
    return Workload(
        module=GPT2LMHeadModel(config).train(),
        loss=next_token_loss,
        synthetic=_random_tokens(vocabulary, sequence_length),
        block_types=(GPT2Block,),
        sequence_length=sequence_length,
        vocabulary=vocabulary,
    )


def next_token_loss(module: nn.Module, tensors: Tensors) -> tuple[Tensor, int]:
    """Summed cross-entropy in fp32 and the number of positions it covers, padding included.

    `inputs` and `targets` are [samples, positions]; a target of -100 adds nothing to the sum.
    """
    logits = module(input_ids=tensors["inputs"]).logits
    targets = tensors["targets"]
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, targets.numel()


def _random_tokens(vocabulary: int, length: int) -> Any:
    def synthetic(samples: int, generator: torch.Generator) -> Tensors:
        tokens = torch.randint(vocabulary, (samples, length + 1), generator=generator, device=generator.device)
        return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    return synthetic

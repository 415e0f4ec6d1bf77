"""Causal language models from transformers configs, randomly initialised, trained on next-token prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from scaling.workload import IGNORED, Tensors, Workload, check_sizes
from scaling.workload.attention import ATTENTION, flash_takes_groups


def gpt2(
    *, layers: int, hidden_size: int, heads: int, vocabulary: int, sequence_length: int, dropout: float
) -> Workload:
    """A GPT-2 with tied embeddings over `sequence_length` positions."""
    check_sizes(layers=layers, hidden_size=hidden_size, heads=heads, vocabulary=vocabulary)
    check_heads(hidden_size, heads)
    config = GPT2Config(
        n_layer=layers,
        n_embd=hidden_size,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=sequence_length,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own formula, as one kernel
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=ATTENTION,
    )
    return _causal(GPT2LMHeadModel(config), GPT2Block, sequence_length, vocabulary)


def llama(
    *,
    layers: int,
    hidden_size: int,
    heads: int,
    key_value_heads: int,
    mlp_size: int,
    vocabulary: int,
    tied_embeddings: bool,
    rope: dict[str, Any],
    sequence_length: int,
    dropout: float,
) -> Workload:
    """A Llama 3 with grouped queries; `rope` is transformers' `rope_parameters`, dropout that of the attention."""
    sizes = {"layers": layers, "hidden_size": hidden_size, "heads": heads, "mlp_size": mlp_size}
    check_sizes(**sizes, key_value_heads=key_value_heads, vocabulary=vocabulary)
    check_heads(hidden_size, heads)
    if heads % key_value_heads:
        raise ValueError(f"model.args: heads={heads} does not divide by key_value_heads={key_value_heads}")
    if hidden_size // heads % 2:
        raise ValueError(
            f"model.args: a head of {hidden_size // heads} (hidden_size / heads) has to be even to be rotated"
        )
    if not isinstance(rope, dict) or "rope_type" not in rope:
        raise ValueError(
            f"model.args.rope={rope}: has to hold rope_type and what it needs, as in conf/model/llama_1b.yaml"
        )
    if not isinstance(tied_embeddings, bool):
        raise ValueError(f"model.args.tied_embeddings={tied_embeddings}: has to be true or false")
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=mlp_size,
        vocab_size=vocabulary,
        tie_word_embeddings=tied_embeddings,
        rope_parameters=dict(rope),
        max_position_embeddings=max(sequence_length, 131072),
        rms_norm_eps=1e-5,
        attention_dropout=dropout,
        flash_takes_groups=flash_takes_groups(),
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=ATTENTION,
    )
    return _causal(LlamaForCausalLM(config), LlamaDecoderLayer, sequence_length, vocabulary)


def check_heads(hidden_size: int, heads: int) -> None:
    """Raise ValueError unless the hidden size splits into heads."""
    if hidden_size % heads:
        raise ValueError(f"model.args: hidden_size={hidden_size} does not divide by heads={heads}")


def _causal(module: PreTrainedModel, block: type[nn.Module], length: int, vocabulary: int) -> Workload:
    return Workload(
        module=module.train(),
        loss=next_token_loss,
        synthetic=_random_tokens(vocabulary, length),
        block_types=(block,),
        sequence_length=length,
        vocabulary=vocabulary,
    )


def next_token_loss(module: nn.Module, tensors: Tensors) -> tuple[Tensor, int]:
    """Summed cross-entropy in fp32 and the number of positions it covers, padding included.

    `inputs` and `targets` are [samples, positions]; a target of -100 adds nothing to the sum.
    """
    logits = module(input_ids=tensors["inputs"]).logits
    targets = tensors["targets"]
    return summed_cross_entropy(logits, targets), targets.numel()


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over all positions with a target, in fp32; logits are [samples, positions, vocabulary]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def _random_tokens(vocabulary: int, length: int) -> Callable[[int, torch.Generator], Tensors]:
    def synthetic(samples: int, generator: torch.Generator) -> Tensors:
        tokens = torch.randint(vocabulary, (samples, length + 1), generator=generator, device=generator.device)
        return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    return synthetic

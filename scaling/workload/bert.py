"""BERT from a transformers config, randomly initialised, trained on masked language modelling."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM
from transformers.models.bert.modeling_bert import BertLayer

from scaling.workload import IGNORED, Tensors, Workload, check_sizes
from scaling.workload.attention import ATTENTION
from scaling.workload.masking import hidden_positions
from scaling.workload.text import BYTES
from scaling.workload.transformer import check_heads, summed_cross_entropy

MASK_TOKEN = BYTES  # the first token that no byte of a text is


def bert(
    *,
    layers: int,
    hidden_size: int,
    heads: int,
    mlp_size: int,
    vocabulary: int,
    positions: int,
    sequence_length: int,
    dropout: float,
) -> Workload:
    """A BERT encoder with the masked-language-model head on all positions, decoder tied to the embeddings."""
    check_sizes(layers=layers, hidden_size=hidden_size, heads=heads, mlp_size=mlp_size, positions=positions)
    check_heads(hidden_size, heads)
    if not isinstance(vocabulary, int) or vocabulary <= MASK_TOKEN:
        raise ValueError(f"model.args.vocabulary={vocabulary}: must hold {BYTES} bytes and a token that masks them")
    if sequence_length > positions:
        raise ValueError(f"model.sequence_length={sequence_length}: this BERT has {positions} positions")
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        intermediate_size=mlp_size,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation=ATTENTION,
    )
    return Workload(
        module=BertForMaskedLM(config).train(),
        loss=masked_token_loss,
        synthetic=_masked_random_tokens(vocabulary, sequence_length),
        block_types=(BertLayer,),
        sequence_length=sequence_length,
        vocabulary=vocabulary,
        mask_token=MASK_TOKEN,
    )


def masked_token_loss(module: nn.Module, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in fp32 over the positions to predict, and their number.

    `inputs` and `targets` are [samples, positions], targets of -100 are not predicted; `attended`, of the same shape
    and only there with padding, is True on the positions of the sample.
    """
    attended, targets = tensors.get("attended"), tensors["targets"]
    mask = None if attended is None else attended[:, None, None, :]  # 4-D: transformers hands it through as it is
    logits = module(input_ids=tensors["inputs"], attention_mask=mask).logits
    return summed_cross_entropy(logits, targets), (targets != IGNORED).sum()


def _masked_random_tokens(vocabulary: int, length: int) -> Callable[[int, torch.Generator], Tensors]:
    def synthetic(samples: int, generator: torch.Generator) -> Tensors:
        device, shape = generator.device, (samples, length)
        tokens = torch.randint(vocabulary, shape, generator=generator, device=device)
        order = torch.rand(shape, generator=generator, device=device).argsort(dim=1)
        hidden = order < hidden_positions(length)  # as many in every sample, at random places
        return {
            "inputs": tokens.masked_fill(hidden, MASK_TOKEN),
            "targets": tokens.masked_fill(~hidden, IGNORED),
        }

    return synthetic

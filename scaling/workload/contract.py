"""What a user's workload promises, checked before anything is measured; ours is held to it by tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from scaling.workload import Tensors, Workload


def check_synthetic(workload: Workload, made: Tensors, samples: int) -> None:
    """Raise ValueError unless these are tensors of so many samples, in the sizes that the workload names."""
    if not isinstance(made, Mapping) or not all(isinstance(tensor, Tensor) for tensor in made.values()):
        raise ValueError(f"synthetic({samples}, ...) has to give named tensors, not {type(made).__name__}")
    for name, tensor in made.items():
        if tensor.dim() < 1 or tensor.shape[0] != samples:
            raise ValueError(
                f"synthetic({samples}, ...) gave `{name}` of shape {tuple(tensor.shape)}: the first is samples"
            )
    named = {"sequence_length": ("inputs", workload.sequence_length), "image_size": ("images", workload.image_size)}
    for key, (name, size) in named.items():  # rates per token and FLOPs of real data follow from these
        if size is not None and name in made and made[name].shape[-1] != size:
            raise ValueError(
                f"synthetic({samples}, ...) gave `{name}` of shape {tuple(made[name].shape)}, but the Workload says "
                f"{key}={size}"
            )


def check_loss(workload: Workload, device: torch.device) -> None:
    """Raise ValueError unless the loss is a sum over samples with its count: the same samples twice give twice both."""
    once = workload.synthetic(1, torch.Generator(device=device).manual_seed(0))
    check_synthetic(workload, once, 1)
    given = losses(workload, [once, {name: torch.cat([tensor, tensor]) for name, tensor in once.items()}])
    sums, counts = [total for total, _ in given], [count for _, count in given]
    if counts[1] != 2 * counts[0] or not math.isclose(sums[1], 2 * sums[0], rel_tol=1e-2, abs_tol=1e-6):
        raise ValueError(
            f"the loss of model.target has to be a sum and its count: one sample gives {sums[0]:.6g} and {counts[0]}, "
            f"the same sample twice {sums[1]:.6g} and {counts[1]}; a mean would be divided twice"
        )


def check_count(workload: Workload, tensors: Tensors, targets: int) -> None:
    """Raise ValueError unless the loss of real data counts what the data says it has to predict."""
    [(_, count)] = losses(workload, [tensors])
    if count != targets:
        raise ValueError(
            f"the loss of model.target counts {count} terms where this data has {targets}: one for each position of a "
            "text with a target, or for each image"
        )


@torch.no_grad()
def losses(workload: Workload, batches: Sequence[Tensors]) -> list[tuple[float, int]]:
    """(sum, count) of each, without training: dropout off, batch statistics as they are. Raises ValueError for others.

    Whatever the user's own code raises comes out as RuntimeError, with the place where it happened.
    """
    workload.module.eval()
    try:
        pairs = [workload.loss(workload.module, tensors) for tensors in batches]
    except Exception as error:
        raise RuntimeError(f"the loss of model.target raised {type(error).__name__}: {error}") from error
    finally:
        workload.module.train()
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"the loss of model.target has to return (sum, count), not {type(pair).__name__}")
        if not isinstance(pair[0], Tensor) or pair[0].numel() != 1:
            raise ValueError("the loss of model.target has to return its sum as one number in a tensor")
    return [(float(total), int(count)) for total, count in pairs]

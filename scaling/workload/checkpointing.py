"""Activation checkpointing: each block keeps its input and is run again in backward."""

from __future__ import annotations

import functools

from torch.utils.checkpoint import checkpoint

from scaling.workload import Workload


def checkpoint_blocks(workload: Workload) -> None:
    """Let every block of `block_types` recompute what lies inside it. Raises ValueError where there is none.

    Batch normalisation counts such a batch twice in its running statistics, which training does not read.
    """
    blocks = [module for module in workload.module.modules() if isinstance(module, workload.block_types)]
    if not blocks:
        names = ", ".join(kind.__name__ for kind in workload.block_types) or "none"
        raise ValueError(
            f"checkpointing=true: the model has no blocks to recompute (its block_types: {names}); a Workload of yours "
            "names them: block_types=(MyLayer,)"
        )
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

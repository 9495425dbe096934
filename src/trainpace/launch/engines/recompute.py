"""Full activation checkpointing: everything but the input of each repeated block is computed again in the backward pass."""

from typing import Any

from torch import nn

from trainpace.trace import longest_chain

_SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def recompute_blocks(model: nn.Module) -> tuple[str, ...]:
    """Switch it on by the model's own function (transformers, timm), else around its longest chain of alike blocks.

    Returns notes: where the model has neither, nothing is recomputed, and a note says so.
    """
    for switch in _SWITCHES:  # transformers renamed it in 5.x
        if hasattr(model, switch):
            getattr(model, switch)({"use_reentrant": False})
            return ()
    if hasattr(model, "set_grad_checkpointing"):
        enable: Any = model.set_grad_checkpointing
        enable(True)
        return ()
    chain = longest_chain(model)
    if chain is None:
        name = type(model).__name__
        return (f"activation checkpointing did nothing: {name} has no switch for it and no chain of alike blocks.",)
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    members = {id(module) for module in chain.modules}
    apply_activation_checkpointing(model, checkpoint_wrapper, check_fn=lambda module: id(module) in members)
    return (f"activation checkpointing recomputes {len(members)} blocks ({chain.name} and on).",)

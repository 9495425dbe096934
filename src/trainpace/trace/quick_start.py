"""Half a second less before the first trace."""

from __future__ import annotations

import sys

import torch


def skip_dynamo_import() -> None:
    """Keep torch's optimizers from importing torch._dynamo, which takes longer than tracing most models.

    Optimizer methods are wrapped in `torch._compile._disable_dynamo`, which imports the compiler to be told to keep out
    of the way. Nothing is compiled in a trace, so the wrapped function itself can serve. Without effect where the
    compiler has been imported already, or where a torch release wraps them otherwise.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        wrapped = getattr(getattr(torch.optim.Optimizer, method), "__wrapped__", None)
        if wrapped is not None and not hasattr(wrapped, "__dynamo_disable"):
            setattr(wrapped, "__dynamo_disable", wrapped)  # noqa: B010 a plain assignment would be name-mangled

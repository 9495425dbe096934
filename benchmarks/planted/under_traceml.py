"""Runs a script with TraceML's documented lines added: `init()`, and `trace_step(model)` around the body of its loop.

    traceml run under_traceml.py --args SCRIPT [ARGS ...]

The body is what lies between two batches of the training loader. Lightning and Hugging Face need none of this.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader


class _Body:
    """Enters `trace_step` when a training batch has come and leaves it when the next is asked for."""

    def __init__(self) -> None:
        self.model: torch.nn.Module | None = None
        self.opened: AbstractContextManager[None] | None = None
        self.stepped = False

    def batch_asked(self) -> None:
        if self.opened and self.stepped:
            self.opened.__exit__(None, None, None)
            self.opened = None

    def batch_came(self) -> None:
        import traceml_ai  # type: ignore[import-not-found]

        if self.opened is None and self.model is not None:
            self.opened, self.stepped = traceml_ai.trace_step(self.model), False
            self.opened.__enter__()

    def optimizer_stepped(self, *_: Any) -> None:
        self.stepped = True


def _follow(body: _Body) -> None:
    def remember(module: torch.nn.Module, _: Any) -> None:
        if torch.is_grad_enabled():
            body.model = module
            first.remove()

    first = torch.nn.modules.module.register_module_forward_pre_hook(remember)
    register_optimizer_step_post_hook(body.optimizer_stepped)
    plain = dataloader._BaseDataLoaderIter.__next__

    def following(self: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(self)
        body.batch_asked()
        batch = plain(self)
        body.batch_came()
        return batch

    dataloader._BaseDataLoaderIter.__next__ = following  # type: ignore[method-assign]


def main() -> None:
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, os.path.dirname(script))
    if os.environ.get("TRACEML_BY_HAND") == "1":
        import traceml_ai

        traceml_ai.init(mode="auto")
        _follow(_Body())
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

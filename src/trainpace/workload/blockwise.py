"""The states and kernels of optimizers that quantise their states block by block, for a trace.

bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861) and torchao cannot run on the meta device. This optimizer has their states
in shape and dtype, and calls an operator of its own, without values, where they launch a kernel: one for each tensor, which reads
parameter, gradient and states, and writes all but the gradient.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

SMALLEST_QUANTISED = 4096
"""Tensors of fewer numbers keep 32-bit states: bitsandbytes' `min_8bit_size`, and torchao alike."""
SMALLEST_PAGED = 100_000
"""Smaller states stay on the device (bitsandbytes' get_state_buffer)."""
UPDATE = "blockwise_update_"

_library = torch.library.Library("trainpace", "FRAGMENT")
_library.define(
    f"{UPDATE}(Tensor(a!) parameter, Tensor gradient, Tensor(b!)[] states, Tensor(c!)[] scales)"
    " -> ()"
)
_library.impl(UPDATE, lambda *_: None, "Meta")


class StateLayout(NamedTuple):
    """states: for each number. bits: of each. block: numbers that share a scale, in fp32. needs_whole_blocks: a tensor that is no
    multiple of it stays in its own dtype (torchao), where bitsandbytes has a last short one."""

    states: int
    bits: int
    block: int = 256
    is_paged: bool = False
    needs_whole_blocks: bool = False


class BlockwiseOptimizer(torch.optim.Optimizer):
    """An optimizer with states of a layout, which makes no new values."""

    def __init__(self, parameters: Iterable[Any], layout: StateLayout) -> None:
        super().__init__(parameters, {"lr": 1e-4})
        self.layout = layout

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ):
            state = self.state[parameter]
            if not state:
                state["states"], state["scales"] = self._states(parameter)
            torch.ops.trainpace.blockwise_update_(
                parameter, parameter.grad, state["states"], state["scales"]
            )

    def _states(self, parameter: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        n, layout = parameter.numel(), self.layout
        empty = parameter.new_empty
        whole = not layout.needs_whole_blocks or n % layout.block == 0
        if layout.bits == 32 or n < SMALLEST_QUANTISED or not whole:
            dtype = parameter.dtype if layout.needs_whole_blocks else torch.float32
            return [empty(n, dtype=dtype) for _ in range(layout.states)], []
        numbers = [empty(n * layout.bits // 8, dtype=torch.uint8) for _ in range(layout.states)]
        return numbers, [
            empty(-(-n // layout.block), dtype=torch.float32) for _ in range(layout.states)
        ]

    def paged_bytes(self) -> float:
        """Bytes of states that CUDA pages to the host where the device is full."""
        if not self.layout.is_paged:
            return 0.0
        large = (s["states"] for p, s in self.state.items() if p.numel() >= SMALLEST_PAGED)
        return float(sum(t.numel() * t.element_size() for states in large for t in states))

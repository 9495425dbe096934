"""Steps with the model in bf16: an intervention that takes no cause away, and shows what a change saves.

The outermost module is called under torch.autocast, and what it gives is made fp32 again, so that losses written for fp32 bear it
(as accelerate does). A model that does not bear it is called again as it is, and none of these steps is counted.
"""

import sys
from collections.abc import Callable
from typing import Any

from trainpace.watch.inside.observers import product_gflops
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.together import process_group

PAIRS = 3
"""Blocks in bf16, each followed by one of plain steps."""
LEAST_GAIN = 1.2
"""Times the rate of fp32 that a large matrix product has to reach in bf16. A judgement: converting costs something, so that with
less there is little to gain."""


class InBf16:
    """Calls modules under autocast to bf16 while `recorder.calls_as` is `calls`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.seen = self.refused = False

    @property
    def applies(self) -> bool:
        """Whether modules were called in bf16, and all of them bore it."""
        return self.seen and not self.refused

    def may_gain(self) -> bool:
        """Whether the model computes in fp32 and this CPU multiplies faster in bf16. Compiled models would be compiled anew, and
        engines have settings of their own."""
        from trainpace.measure import in_use

        torch, recorder = sys.modules["torch"], self.recorder
        if (
            in_use() != "cpu"
            or _is_sharded()
            or recorder.compiled
            or recorder.step_is_the_engines
            or recorder.product_dtype is not torch.float32
        ):
            return False
        try:
            return product_gflops(torch.bfloat16) >= LEAST_GAIN * product_gflops(torch.float32)
        except Exception:  # a build of torch without such products
            return False

    def calls(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A module's `__call__` in bf16."""
        torch: Any = sys.modules["torch"]

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.refused:
                return plain(module, *args, **kwargs)
            try:
                with torch.autocast("cpu", torch.bfloat16):
                    output = plain(module, *args, **kwargs)
                self.seen = self.seen or any(p.requires_grad for p in module.parameters())
                return torch.utils._pytree.tree_map_only(torch.Tensor, _in_fp32, output)
            except Exception:  # whatever it is, either it is of bf16, or it is raised again
                self.refused = True
                self.recorder.trail.note({"refuses_bf16": True})
                return plain(module, *args, **kwargs)

        return call


def _is_sharded() -> bool:
    """Whether FSDP may be in use, whose modules cannot be called again in the middle of a step."""
    return process_group() is not None and any(
        name.startswith("torch.distributed.fsdp") for name in sys.modules
    )


def _in_fp32(tensor: Any) -> Any:
    return tensor.float() if tensor.dtype is sys.modules["torch"].bfloat16 else tensor

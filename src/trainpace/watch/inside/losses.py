"""The losses of a script's steps, as passed to backward, summed over the backward passes of a step."""

import functools
from collections.abc import Callable
from typing import Any

from trainpace.watch.inside.recorder import Recorder

Backward = Callable[..., Any]


class Losses:
    """Keeps losses on their device until the end, so that nothing waits for them. Under accumulation scripts divide
    their losses, so that the sum is the mean over the step; DeepSpeed divides them itself."""

    def __init__(self, torch: Any, recorder: Recorder) -> None:
        self.torch = torch
        self.steps: list[Any] = []
        self._sum: Any = None
        self._inside = False
        self._whole = True
        recorder.after_step.append(lambda step: self._ends_step())

    def within(self, backward: Backward, engine: bool = False) -> Backward:
        """A backward function that records its losses; calls inside it record nothing more."""

        @functools.wraps(backward)
        def call(*args: Any, **kwargs: Any) -> Any:
            outermost, self._inside = not self._inside, True
            if outermost:
                try:
                    self._take(args, kwargs, engine)
                except Exception:
                    self._whole = False
            try:
                return backward(*args, **kwargs)
            finally:
                self._inside = not outermost

        return call

    def _take(self, args: Any, kwargs: Any, engine: bool) -> None:
        parts = 1.0
        if engine:
            parts, args = float(args[0].gradient_accumulation_steps()), args[1:]
        loss = args[0] if args else kwargs.get("loss", kwargs.get("tensors"))
        loss = loss[0] if isinstance(loss, list | tuple) and len(loss) == 1 else loss
        given = args[1] if len(args) > 1 and not engine else kwargs.get("grad_tensors")
        if given is not None and any(g is not None for g in (given if isinstance(given, list | tuple) else (given,))):
            self._whole = False  # a part of a larger gradient, whose loss is nowhere
            return
        value = getattr(loss, "_trainpace_unscaled", loss).detach().float() / parts
        if value.numel() != 1:
            raise ValueError("no loss")
        value = value.reshape(())
        self._sum = value if self._sum is None else self._sum + value

    def _ends_step(self) -> None:
        self._whole = self._whole and self._sum is not None
        self.steps.append(self._sum)
        self._sum = None

    def scaled(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        """GradScaler.scale, with the unscaled loss remembered for its result."""

        @functools.wraps(scale)
        def call(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(result, self.torch.Tensor):
                result._trainpace_unscaled = outputs.detach()
            return result

        return call

    def per_step(self) -> list[float]:
        """One loss per step; empty where any step's loss was not seen."""
        return [float(value) for value in self.steps] if self._whole else []

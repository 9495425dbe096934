"""Steps that update by themselves, timed on a real device: which part of each is backward, and which the optimizers'."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainpace.core.errors import TrainpaceError
from trainpace.measure.device_clock import StepClock
from trainpace.measure.engine import PlainEngine
from trainpace.measure.sweep import Conditions
from trainpace.workload import WholeStep


def check_whole_step(conditions: Conditions, name: str) -> None:
    """Raise TrainpaceError for conditions that such a step cannot be measured under."""
    c = conditions
    asked = {
        "accumulation": c.accumulation > 1,
        "an optimizer": c.optimizer is not None,
        "compile": c.compile,
        "amp_fp16, which scales losses,": c.precision == "amp_fp16",
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise TrainpaceError(
                f"{name} has a step of its own: {what} cannot be put around it.",
                "Put it into the step.",
            )


class StepPhases:
    """Runs whole steps under a clock, and tells backward passes and updates from the rest by torch's own entries to them."""

    def __init__(self, clock: StepClock, engine: PlainEngine) -> None:
        self._clock, self._engine = clock, engine
        self._phase = "forward"
        self._phases: list[list[str]] = []

    def run(self, step: WholeStep, batch: Any) -> torch.Tensor:
        """One step. Gives the loss, where the step returns one, and 0 where it does not."""
        self._clock.start_step()
        self._phases.append([])
        hooks = [
            h
            for optimizer in step.optimizers
            for h in (
                optimizer.register_step_pre_hook(lambda *_: self._enter("optimizer")),
                optimizer.register_step_post_hook(lambda *_: self._enter("forward")),
            )
        ]
        try:
            with self._engine.autocast(), self._backward_told():
                value = step.run(batch)
        finally:
            for hook in hooks:
                hook.remove()
        self._enter("forward")
        if isinstance(value, dict):
            value = value.get("loss")
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return value.detach()
        return torch.tensor(float(value) if isinstance(value, int | float) else 0.0)

    def parts(self) -> list[tuple[float, float, float]]:
        """(forward, backward, optimizer) in ms of each settled step."""
        return [
            (_of("forward", *step), _of("backward", *step), _of("optimizer", *step))
            for step in zip(self._phases, self._clock.spans_ms, strict=False)
        ]

    def _enter(self, phase: str) -> None:
        """End the span of the phase until now."""
        self._clock.mark()
        self._phases[-1].append(self._phase)
        self._phase = phase

    @contextlib.contextmanager
    def _backward_told(self) -> Iterator[None]:
        owner: Any = torch.autograd
        saved = {name: getattr(owner, name) for name in ("backward", "grad")}

        def told(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self._enter("backward")
                try:
                    return function(*args, **kwargs)
                finally:
                    self._enter("forward")

            return run

        try:
            for name, function in saved.items():
                setattr(owner, name, told(function))
            yield
        finally:
            for name, function in saved.items():
                setattr(owner, name, function)


def _of(phase: str, phases: list[str], spans_ms: list[float]) -> float:
    return sum(ms for name, ms in zip(phases, spans_ms, strict=True) if name == phase)

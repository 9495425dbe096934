"""What the script trains, seen at the model's first call: for a forecast on other hardware with no further work."""

from __future__ import annotations

from typing import Any

from trainpace.watch.inside.recorder import Recorder


def first_call(recorder: Recorder, module: Any, model: Any, args: Any, kwargs: Any) -> None:
    """Note the model and what it is called with."""
    recorder.trail.note({
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "wrapped": type(module).__name__ if module is not model else None,
        "parameters": sum(p.numel() for p in model.parameters()),
    })  # fmt: skip


def write(recorder: Recorder) -> None:
    """Trace what was noted, on the meta device."""

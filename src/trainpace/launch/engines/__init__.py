"""Training engines that exist, behind one contract: one file an engine, loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainpace.launch.engines.rules import check_engine, engine_for

if TYPE_CHECKING:
    from trainpace.launch.engines.engine import Engine
    from trainpace.launch.trial import Trial

__all__ = ["check_engine", "engine_for", "load_engine"]


def load_engine(trial: Trial) -> Callable[[Trial, Any, Any], Engine]:
    """Import the trial's engine, and what makes it from the trial, a model and its optimizer, in a process that knows its
    rank (RANK, WORLD_SIZE, ...).

    Raises TrainpaceError where the engine is not installed, with the command that installs it.
    """
    import importlib

    module: Any = importlib.import_module(f"trainpace.launch.engines.{trial.engine}")
    module.load(trial.device)
    make: Callable[[Trial, Any, Any], Engine] = module.make
    return make

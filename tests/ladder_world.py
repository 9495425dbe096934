"""A simulated world for climbs: every setup has a step time and a loss curve, without real training."""

import math
from collections.abc import Callable

from trainpace.core.execution import Execution
from trainpace.core.outcome import Forecast, Interval
from trainpace.run.climbing import ClimbActions
from trainpace.run.ladder import Ladder, Rung, Setup
from trainpace.run.results import LadderResult
from trainpace.run.step_forecasts import StepForecast
from trainpace.run.trial import FailedTrial, TrialResult

LOSSES = tuple(0.7 * math.exp(-i / 30) for i in range(40))


def forecast_of_ms(
    ms: float | None, low: float | None = None, high: float | None = None, **execution
) -> Forecast:
    """A forecast of a step that consists of the forward pass."""
    from trainpace.core.outcome import StepTime

    step = None if ms is None else StepTime(forward_ms=ms)
    interval = (
        None
        if ms is None
        else Interval(low=low or ms / 1.2, high=high or ms * 1.2, coverage=0.9, basis="made up")
    )
    return Forecast(
        model="m",
        device="d",
        num_devices=1,
        execution=Execution(**execution),
        step=step,
        step_time_interval_ms=interval,
        memory=None,
        capacity_gib=None,
        fits=None,
        mfu=None,
        model_flops_per_step=None,
        provenance="fitted",
        reason="" if step is not None else "no such rate",
    )


def result(ms: float, losses=LOSSES) -> TrialResult:
    """A trial whose steps all take the same time."""
    return TrialResult(
        step_ms=(ms,) * 9,
        data_wait_ms=(ms / 2,) * 9,
        losses=tuple(losses),
        step_time_ms=ms,
        interval_ms=Interval(low=0.99 * ms, high=1.01 * ms, coverage=0.9, basis="made up"),
        samples_per_second=1e3 / ms,
        peak_memory_gib=0.25,
        start_up_s=1.0,
        world_size=1,
        environment={"cpu": "made-up CPU"},
    )


class World:
    """`ms_of` returns a setup's step time, a FailedTrial or a TrialResult. The lists record all calls."""

    def __init__(self, ms_of: Callable[[Setup], float | FailedTrial | TrialResult]) -> None:
        self.ms_of = ms_of
        self.tried: list[tuple[Setup, int, str]] = []
        self.kept: list[LadderResult] = []
        self.journal: list = []
        self.said: list[str] = []
        self.precomputed: list[str] = []

    def try_it(self, setup, seed, name):
        self.tried.append((setup, seed, name))
        found = self.ms_of(setup)
        return result(found) if isinstance(found, float | int) else found

    def forecast(self, setups, known):
        interval = Interval(low=90, high=110, coverage=0.9, basis="made up")
        return [
            StepForecast(step_ms=100.0, interval_ms=interval, basis=f"{len(known)} known")
            for _ in setups
        ]

    def precompute(self, spec):
        self.precomputed.append(spec)
        return "shards"

    def actions(self) -> ClimbActions:
        return ClimbActions(
            self.try_it,
            self.forecast,
            self.precompute,
            self.said.append,
            self.kept.append,
            self.journal.append,
        )


def ladder(*rungs: Rung, **options) -> Ladder:
    """A ladder of a task without a file, so there is no code to inspect."""
    return Ladder(
        start=Setup(task="resnet18", execution=Execution(micro_batch=16)), rungs=rungs, **options
    )


def rung(title: str, **changes) -> Rung:
    """A rung. Without changes it precomputes."""
    return Rung(title=title, changes=changes, precompute="" if changes else "train.py:photos")

"""The verbs of the command line as functions: same names, same options as keywords, same defaults; records as results.

Misuse raises `TrainpaceError`, a ValueError whose text says what to try. Progress and notes go to stderr, as on the command
line; nothing is printed to stdout. A model is a spec as in `trainpace forecast`, a `Workload`, or, for the verbs that
forecast, a live `nn.Module` with `example` and `loss`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from trainpace.report import TerminalProgress
from trainpace.verbs.request import request_of

if TYPE_CHECKING:
    from torch import nn

    from trainpace.diagnose import Diagnosis
    from trainpace.hardware import Device
    from trainpace.job import Answer
    from trainpace.journal import Journal
    from trainpace.ladder import LadderResult
    from trainpace.machine import MachineProfile
    from trainpace.offers import Offer, Ranking
    from trainpace.plan import Plan
    from trainpace.shards import Estimate, Precomputed
    from trainpace.verbs.forecast import Forecasts
    from trainpace.verbs.loader import MeasuredLoader
    from trainpace.verbs.measure import MeasuredSweep
    from trainpace.verbs.precompute import Verified
    from trainpace.verbs.validate import ValidatedRuns
    from trainpace.verify import Equivalence
    from trainpace.watch import Recording
    from trainpace.workload import Form, Workload

    Model = str | os.PathLike[str] | Workload | nn.Module


def trace(model: Model, *, forms: Sequence[Form] = ("fp32", "amp", "half"), **options: Any) -> Workload:
    """What one micro-batch of a model computes, for forecasts at any batch size. A spec is traced in a process of its own.

    A live `nn.Module` is traced here, without its weights, and stays as it is. It needs `example`, a batch of at least one sample
    as its training has it, and `loss`: of an example (input, ..., target) it takes (output, target); of a dict it may be left
    out where `model(**example)` returns something with a `.loss`. `task_optimizer`: its own optimizer, where it has one.
    """
    from trainpace.api.live import request_about
    from trainpace.verbs.traced import TraceRequest, run

    return run(request_about(TraceRequest, model, options, forms), TerminalProgress(), forms)


def forecast(model: Model, **options: Any) -> Forecasts:
    """Step time, memory and cost of a model on GPUs you don't have: a forecast for each `gpu` and `batch`.

    trainpace.forecast("resnet50", gpu=["T4", "A100"], batch=64, precision="amp_fp16").to_pandas()
    """
    from trainpace.api.live import request_about
    from trainpace.verbs.forecast import ForecastRequest, run

    return run(request_about(ForecastRequest, model, options), TerminalProgress())


def match(model: Model, **options: Any) -> Ranking:
    """Servers ranked by what the whole training costs or how long it takes.

    trainpace.match("resnet50", samples="1.28M", epochs=90, deadline="24h").matches[0].offer
    """
    from trainpace.api.live import request_about
    from trainpace.verbs.match import MatchRequest, run

    return run(request_about(MatchRequest, model, options), TerminalProgress()).ranking


def plan(model: Model, **options: Any) -> Plan:
    """What to change about a training, in which order, and what each change saves of the whole job.

    trainpace.plan("resnet50", gpu="A100", num_gpus=4, batch=64, samples="1.28M", epochs=90).changes
    """
    from trainpace.api.live import request_about
    from trainpace.verbs.plan import PlanRequest, run

    return run(request_about(PlanRequest, model, options), TerminalProgress()).plan


def measure(model: str, **options: Any) -> MeasuredSweep:
    """Real steps of a model on this machine over batch sizes, each probe in a process of its own, and kept in the journal.

    trainpace.measure("train.py:task", batch=[8, 16, 32]).to_pandas()
    """
    from trainpace.journal import program_command
    from trainpace.verbs.measure import MeasureRequest, run

    request = request_of(MeasureRequest, {"model": _spec_only(model), **options})
    return run(replace(request, command=program_command()), TerminalProgress())


def schedule(**options: Any) -> Answer:
    """Steps, hours and dollars of a training run, or whichever number is missing.

    trainpace.schedule(samples=1_281_167, epochs=90, global_batch=256, deadline="24h").step_time_s
    """
    from trainpace.verbs.schedule import ScheduleRequest, run

    return run(request_of(ScheduleRequest, options), TerminalProgress()).answer


def watch(command: str | Sequence[str], **options: Any) -> Recording:
    """Run an unchanged training script and record where its steps' time goes.

    trainpace.watch("python train.py --epochs 1").ranks[0]
    """
    from trainpace.verbs.watch import WatchRequest, run

    return run(request_of(WatchRequest, {"command": _words(command), **options}), TerminalProgress()).recording


def diagnose(command: str | Sequence[str] | os.PathLike[str], **options: Any) -> Diagnosis:
    """What slows a training script down, proved by taking one cause after another away; or of a recording's folder, unproved."""
    from trainpace.verbs.diagnose import DiagnoseRequest, run

    words = (str(command),) if _is_folder(command) else _words(cast("str | Sequence[str]", command))
    return run(request_of(DiagnoseRequest, {"command": words, **options}), TerminalProgress()).diagnosis


def loader(target: str, **options: Any) -> MeasuredLoader:
    """A DataLoader measured alone: samples/s over workers, what a sample costs, and the settings for this machine.

    trainpace.loader("train.py:make_dataset", batch=64).advice
    """
    from trainpace.verbs.loader import LoaderRequest, run

    return run(request_of(LoaderRequest, {"target": target, **options}), TerminalProgress())


def precompute(target: str | None = None, **options: Any) -> Precomputed | Estimate | Verified:
    """Compute a dataset's samples once, in parallel processes, into Parquet shards that `ShardDataset` reads back.

    trainpace.precompute("faces.py:Faces", out="shards").samples

    With `estimate=True` an `Estimate` of what that costs and saves; with `verify=True` which shards are damaged, as `Verified`.
    """
    from trainpace.verbs.precompute import PrecomputeRequest, run

    return run(request_of(PrecomputeRequest, {"target": target, **options}), TerminalProgress())


def calibrate(**options: Any) -> MachineProfile:
    """Measure what this machine's CPU can do, for a minute, and keep it for forecasts."""
    from trainpace.verbs.calibrate import CalibrateRequest, run

    return run(request_of(CalibrateRequest, options), TerminalProgress())


def verify(model: str, **options: Any) -> Equivalence:
    """Do accumulation, ranks and one big batch give the same training? The largest difference, and its cause."""
    from trainpace.verbs.verify import VerifyRequest, run

    return run(request_of(VerifyRequest, {"model": _spec_only(model), **options}), TerminalProgress())


def validate(runs: str | os.PathLike[str], **options: Any) -> ValidatedRuns:
    """Forecast measured runs, of a CSV or Parquet file, under their own conditions, and compare.

    trainpace.validate("runs.csv").overall.median
    """
    from trainpace.verbs.validate import ValidateRequest, run

    return run(request_of(ValidateRequest, {"runs": runs, **options}), TerminalProgress())


def run(ladder: str | os.PathLike[str], **options: Any) -> LadderResult:
    """Carry a ladder or a plan out rung by rung: forecast, measure, keep what helps, undo what does not."""
    from trainpace.verbs.run import RunRequest
    from trainpace.verbs.run import run as climb

    return climb(request_of(RunRequest, {"ladder": ladder, **options}), TerminalProgress())


def offers(**options: Any) -> list[Offer]:
    """Servers on offer, with their prices."""
    from trainpace.verbs.offers import OffersRequest, run

    return list(run(request_of(OffersRequest, options), TerminalProgress()).offers)


def gpus(hardware: str | None = None) -> list[Device]:
    """The hardware catalogue, each figure with its source; before it the devices of a file of one's own."""
    from trainpace.verbs.gpus import GpusRequest, run

    return list(run(request_of(GpusRequest, {"hardware": hardware}), TerminalProgress()).devices)


def journal(where: str | None = None, create: bool = True) -> Journal:
    """The journal at a path or URL, by default the user's own, to be used in a ``with`` block."""
    from trainpace.journal import Journal

    return Journal.open(where, create)


def _spec_only(model: object) -> str:
    from trainpace.errors import TrainpaceError

    if not isinstance(model, str):
        raise TrainpaceError(
            f"a {type(model).__name__} cannot go to a process of its own.",
            "Name the model: FILE.py:FUNCTION, or as in forecast.",
        )
    return model


def _words(command: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(shlex.split(command)) if isinstance(command, str) else tuple(map(str, command))


def _is_folder(command: object) -> bool:
    return isinstance(command, str | os.PathLike) and os.path.isdir(command)

"""The commands as Python functions, with the same names, options and defaults. They return records.

Invalid requests raise `TrainpaceError`, a subclass of ValueError. Its text says what to try.
Progress and notes go to stderr, as on the command line. Nothing is printed to stdout. A model is a
spec as in `trainpace forecast` or a `Workload`. Verbs that forecast also accept a live `nn.Module`
with `example` and `loss`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec.structs import replace

from trainpace import verbs
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record
from trainpace.report import TerminalProgress, html_of
from trainpace.verbs.request import Progress, Request, request_of

if TYPE_CHECKING:
    from torch import nn

    from trainpace.core.hardware import Device
    from trainpace.diagnose import Diagnosis, Examination, ProfiledTraining
    from trainpace.job import Answer
    from trainpace.journal import Journal
    from trainpace.measure import MachineProfile
    from trainpace.offers import Offer, Ranking
    from trainpace.plan import Plan
    from trainpace.run import Equivalence, LadderResult
    from trainpace.shards import Estimate, Precomputed
    from trainpace.verbs.checks import ValidatedRuns
    from trainpace.verbs.data import MeasuredLoader, Verified
    from trainpace.verbs.forecast import Forecasts
    from trainpace.verbs.look import Looked
    from trainpace.verbs.measure import MeasuredSweep
    from trainpace.verbs.traced import TracedRequest
    from trainpace.watch import Recording
    from trainpace.workload import Form, Task, Workload

    Model = str | os.PathLike[str] | Workload | nn.Module

R = TypeVar("R", bound="TracedRequest")
T = TypeVar("T")

setattr(Record, "_repr_html_", html_of)  # noqa: B010  # Notebooks show records as tables.


class Listed(list[T], Generic[T]):
    """List that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return html_of(self)


def trace(
    model: Model, *, forms: Sequence[Form] = ("fp32", "amp", "half"), **options: Any
) -> Workload:
    """Return the operators of one micro-batch, for forecasts at any batch size. A spec is traced in
    its own process.

    A live `nn.Module` is traced here, without its weights, and stays as it is. It needs `example`,
    a batch of at least one sample as its training has it, and `loss`: of an example (input, ...,
    target) it takes (output, target); of a dict it may be left out where `model(**example)` returns
    something with a `.loss`. `task_optimizer`: its own optimizer, where it has one.
    """
    from trainpace.verbs import traced

    return traced.workload_of(
        _request_about(traced.TraceRequest, model, options, forms), TerminalProgress(), forms
    )


def forecast(model: Model, **options: Any) -> Forecasts:
    """Forecast step time, memory and cost of a model on GPUs you don't have, for each `gpu` and
    `batch`.

    trainpace.forecast("resnet50", gpu=["T4", "A100"], batch=64, precision="amp_fp16").to_pandas()
    """
    return verbs.forecast.run(
        _request_about(verbs.forecast.ForecastRequest, model, options), TerminalProgress()
    )


def match(model: Model, **options: Any) -> Ranking:
    """Rank servers by what the whole training costs or how long it takes.

    trainpace.match("resnet50", samples="1.28M", epochs=90, deadline="24h").matches[0].offer
    """
    ranking = verbs.match.run(
        _request_about(verbs.match.MatchRequest, model, options), TerminalProgress()
    ).ranking
    setattr(type(ranking), "_repr_html_", html_of)  # noqa: B010
    return ranking


def plan(model: Model, **options: Any) -> Plan:
    """Recommend what to change about a training, in which order, and what each change saves of the
    whole job.

    trainpace.plan("resnet50", gpu="A100", num_gpus=4, batch=64, samples="1.28M", epochs=90).changes
    """
    return verbs.plan.run(
        _request_about(verbs.plan.PlanRequest, model, options), TerminalProgress()
    ).plan


def measure(model: str, **options: Any) -> MeasuredSweep:
    """Measure real steps of a model on this machine over batch sizes, each in its own process, into
    the journal.

    trainpace.measure("train.py:task", batch=[8, 16, 32]).to_pandas()
    """
    from trainpace.journal import program_command

    request = request_of(verbs.measure.MeasureRequest, {"model": _spec_only(model), **options})
    return verbs.measure.run(replace(request, command=program_command()), TerminalProgress())


def schedule(**options: Any) -> Answer:
    """Compute steps, hours and dollars of a training run, or whichever number is missing.

    trainpace.schedule(samples=1_281_167, epochs=90, global_batch=256, deadline="24h").step_time_s
    """
    return _ask(verbs.schedule.run, verbs.schedule.ScheduleRequest, options).answer


def look(command: str | Sequence[str], **options: Any) -> Looked:
    """Let a script train for some seconds and report how long it will take, what slows it down, and
    its cost elsewhere.

    trainpace.look("train.py --epochs 30").interval_s
    """
    return _ask(verbs.look.run, verbs.look.LookRequest, {"command": _words(command), **options})


def watch(command: str | Sequence[str], **options: Any) -> Recording:
    """Run an unchanged training script and record where its steps' time goes.

    trainpace.watch("python train.py --epochs 1").ranks[0]
    """
    return _ask(
        verbs.watch.run, verbs.watch.WatchRequest, {"command": _words(command), **options}
    ).recording


def diagnose(
    command: str | Sequence[str] | os.PathLike[str], **options: Any
) -> Diagnosis | ProfiledTraining:
    """Find what slows a training script down and prove it by removing one suspect at a time. Of a
    profiler's trace, or a folder with one for each rank: a `ProfiledTraining`, with what each
    change could save at most.

    trainpace.diagnose("trace.json.gz").bounds
    """
    is_place = isinstance(command, str | os.PathLike) and os.path.exists(command)
    words = (str(command),) if is_place else _words(command)
    answer = _ask(verbs.diagnose.run, verbs.diagnose.DiagnoseRequest, {"command": words, **options})
    if isinstance(answer, verbs.watch.Watched):
        raise TrainpaceError(
            "the first of the tasks has the diagnosis, for all of them; it is recorded in"
            f" {answer.folder}."
        )
    return answer.training if isinstance(answer, verbs.diagnose.Profiled) else answer.diagnosis


def loader(target: str, **options: Any) -> MeasuredLoader:
    """Measure a DataLoader alone: samples/s over workers, the cost of a sample, and settings for
    this machine.

    trainpace.loader("train.py:make_dataset", batch=64).advice
    """
    return _ask(verbs.data.time_loader, verbs.data.LoaderRequest, {"target": target, **options})


def precompute(target: str | None = None, **options: Any) -> Precomputed | Estimate | Verified:
    """Compute a dataset's samples once, in parallel processes, into Parquet shards that
    `ShardDataset` reads back.

    trainpace.precompute("faces.py:Faces", out="shards").samples

    With `estimate=True` an `Estimate` of what that costs and saves; with `verify=True` which shards
    are damaged, as `Verified`.
    """
    return _ask(verbs.data.precompute, verbs.data.PrecomputeRequest, {"target": target, **options})


def calibrate(**options: Any) -> MachineProfile:
    """Measure what this machine's CPU can do, for a minute, and save it for forecasts."""
    return _ask(verbs.machine.calibrate_machine, verbs.machine.CalibrateRequest, options)


def doctor(**options: Any) -> Examination:
    """Examine this machine and whether it can be measured: `checks`, and `is_well`."""
    return _ask(verbs.machine.examine_machine, verbs.machine.DoctorRequest, options)


def verify(model: str, **options: Any) -> Equivalence:
    """Compare accumulation, ranks and one big batch: the largest difference and its cause."""
    return _ask(
        verbs.checks.verify, verbs.checks.VerifyRequest, {"model": _spec_only(model), **options}
    )


def validate(runs: str | os.PathLike[str], **options: Any) -> ValidatedRuns:
    """Forecast measured runs, of a CSV or Parquet file, under their own conditions, and compare.

    trainpace.validate("runs.csv").overall.median
    """
    return _ask(verbs.checks.validate, verbs.checks.ValidateRequest, {"runs": runs, **options})


def run(ladder: str | os.PathLike[str], **options: Any) -> LadderResult:
    """Try a ladder or a plan step by step: forecast, measure, keep what helps, undo what does
    not."""
    return _ask(verbs.run.run, verbs.run.RunRequest, {"ladder": ladder, **options})


def offers(**options: Any) -> list[Offer]:
    """List servers on offer with their prices."""
    return Listed(_ask(verbs.match.list_offers, verbs.match.OffersRequest, options).offers)


def gpus(hardware: str | None = None) -> list[Device]:
    """List the devices of your own file and the hardware catalogue, with the source of each
    figure."""
    return Listed(_ask(verbs.machine.list_gpus, verbs.machine.GpusRequest, {"hardware": hardware}))


def journal(where: str | None = None, create: bool = True) -> Journal:
    """Open the journal at a path or URL, by default the user's own, for a ``with`` block."""
    from trainpace.journal import Journal

    return Journal.open(where, create)


def _ask(
    run: Callable[[Any, Progress], Any], kind: type[Request], options: Mapping[str, Any]
) -> Any:
    return run(request_of(kind, options), TerminalProgress())


def _spec_only(model: object) -> str:
    if not isinstance(model, str):
        raise TrainpaceError(
            f"A {type(model).__name__} cannot move to another process.",
            "Give the model as FILE.py:FUNCTION, or as in forecast.",
        )
    return model


def _words(command: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(shlex.split(command)) if isinstance(command, str) else tuple(map(str, command))


def _request_about(
    kind: type[R], model: object, options: Mapping[str, Any], forms: Sequence[Form] | None = None
) -> R:
    """Create a request about a model. A live model is traced in this process."""
    of_task = {name: options.get(name) for name in ("example", "loss", "task_optimizer")}
    options = {name: value for name, value in options.items() if name not in of_task}
    # If the model is a live module, torch has already been imported.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        request = request_of(kind, {"model": type(model).__name__, **options})
        return _about_module(request, model, of_task, forms)
    if any(value is not None for value in of_task.values()):
        raise TrainpaceError(
            "example, loss and task_optimizer need a live nn.Module.", "Leave them out."
        )
    return request_of(kind, {"model": model, **options})


def _about_module(
    request: R, model: nn.Module, of_task: Mapping[str, Any], forms: Sequence[Form] | None
) -> R:
    """Return the request with the workload of a live module."""
    from trainpace.workload import trace_task

    if request.adapter is not None:
        raise TrainpaceError(
            "`adapter` needs a model given by name.",
            "Adapt the module itself: peft.get_peft_model(module, ...).",
        )
    for name in ("sequence_length", "image_size"):
        if getattr(request, name) not in (None, ()):
            raise TrainpaceError(
                f"The {name} of a live model is its example's.", f"Leave {name} out."
            )
    task = _task(model, *of_task.values(), request.variant.mode)
    return replace(request, model=trace_task(task, forms or request.forms, request.variant))


def _task(model: nn.Module, example: Any, loss: Any, optimizer: Any, mode: str) -> Task:
    from torch.utils._pytree import tree_leaves, tree_map

    from trainpace.workload import Task

    import torch  # isort: skip

    if isinstance(example, Mapping):  # tree_leaves does not look into Hugging Face's BatchEncoding.
        example = dict(example)
    tensors = [t for t in tree_leaves(example) if isinstance(t, torch.Tensor) and t.dim()]
    _check_example(example, tensors, loss, mode)
    size = len(tensors[0])

    def make_batch(n: int) -> Any:
        rows = [i % size for i in range(n)]
        return tree_map(
            lambda t: t[rows] if isinstance(t, torch.Tensor) and t.dim() else t, example
        )

    def forward(model: nn.Module, batch: Any) -> Any:
        if isinstance(batch, dict):
            return model(**batch)
        return model(*(batch if loss is None else batch[:-1]))

    def loss_of(model: nn.Module, batch: Any) -> Any:
        out = forward(model, batch)
        if loss is not None:
            return loss(out, batch["labels"] if isinstance(batch, dict) else batch[-1])
        value = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
        if not isinstance(value, torch.Tensor):
            raise TrainpaceError(
                "model(**example) returns no loss.", "Put labels into the example, or give `loss`."
            )
        return value

    ids = example.get("input_ids") if isinstance(example, dict) else None
    length = int(ids.shape[1]) if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None
    shape = " x ".join(map(str, tensors[0].shape[1:])) or "number"
    return Task(
        type(model).__name__,
        model,
        forward,
        loss_of,
        make_batch,
        optimizer,
        f"{length} tokens" if length else shape,
        length,
        # With a dataset, meta_batch makes the batch here and then moves it. The example's tensors
        # are not on the meta device.
        dataset=(example,),
    )


def _check_example(example: Any, tensors: Sequence[Any], loss: Any, mode: str) -> None:
    """Raise TrainpaceError if a live model cannot be trained on the example."""
    is_dict = isinstance(example, dict)
    if not isinstance(example, dict | tuple | list) or len({len(t) for t in tensors}) != 1:
        raise TrainpaceError(
            "An nn.Module needs `example`: a batch as in training, (input, ..., target) or a dict"
            " of tensors.",
            "Every tensor's first dimension is the batch.",
        )
    if mode == "inference":
        return
    if loss is None and not is_dict:
        raise TrainpaceError(
            "An nn.Module needs a loss to train.",
            "Pass `loss`, a function of (output, target), or mode='inference'.",
        )
    if loss is not None and is_dict and "labels" not in example:
        raise TrainpaceError(
            "`loss` takes (output, labels), and the example has no labels.",
            "Add labels to it, or leave `loss` out if the model returns its own.",
        )

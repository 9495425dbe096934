"""Requests about a model, and its workload: traced as the request says, or saved, where both must agree."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from trainpace.errors import Contradiction
from trainpace.trace import is_saved, load_workload, workload_on_its_way
from trainpace.verbs.fields import ImageSize, Optimizer, SequenceLength
from trainpace.verbs.progress import Progress
from trainpace.verbs.request import Argument, Field, Misuse, Request
from trainpace.verbs.units import DURATION
from trainpace.workload import Form, Mode, Variant, Workload

Model = Annotated[
    str | Workload,
    Argument("A name, FILE.py:FUNCTION, a saved WORKLOAD.json, or from Python a workload.", metavar="MODEL"),
]
EVERY_FORM: tuple[Form, ...] = ("fp32", "amp", "half")


class TracedRequest(Request):
    """A request about a model. `save_workload` is where faces want the workload to be saved, in every number format."""

    model: Model
    optimizer: Optimizer = None
    sequence_length: SequenceLength = None
    image_size: ImageSize = None
    timeout: Annotated[float, Field("Give up tracing after this.", DURATION)] = 300.0
    save_workload: str | None = None

    @property
    def forms(self) -> tuple[Form, ...]:
        """The number formats in which the model has to be traced."""
        return EVERY_FORM

    @property
    def variant(self) -> Variant:
        """How the model has to be traced."""
        mode: Mode = getattr(self, "mode", None) or "train"
        return Variant(self.optimizer, self.sequence_length, self.image_size, mode=mode)

    @property
    def model_name(self) -> str:
        return self.model if isinstance(self.model, str) else self.model.model


class TraceRequest(TracedRequest):
    """What to trace of a model."""

    mode: Annotated[Mode | None, Field("How much of a step.  [default: train]")] = None


def run(request: TraceRequest, progress: Progress, forms: Sequence[Form] = EVERY_FORM) -> Workload:
    return workload_of(request, progress, forms)


def workload_of(
    request: TracedRequest,
    progress: Progress,
    forms: Sequence[Form] | None = None,
    variant: Variant | None = None,
    recompute: bool = False,
) -> Workload:
    """The workload of the request's model. `recompute`: full activation checkpointing is wanted; where no repeated blocks are
    found to which it could be applied afterwards, the model is traced with it.

    Raises Contradiction where the request asks of a saved workload what it was not traced with.
    """
    with workload_started(request, progress, forms, variant, recompute) as workload:
        return workload()


@contextlib.contextmanager
def workload_started(
    request: TracedRequest,
    progress: Progress,
    forms: Sequence[Form] | None = None,
    variant: Variant | None = None,
    recompute: bool = False,
) -> Iterator[Callable[[], Workload]]:
    """Start on what `workload_of` gives, and give what waits for it, so that a verb can prepare the rest meanwhile."""
    model, variant = request.model, variant or request.variant
    forms = EVERY_FORM if request.save_workload else forms or request.forms
    name = model if isinstance(model, str) else f"this workload of {model.model}"
    if is_saved(model) and request.save_workload:
        raise Misuse(f"`save_workload` needs a model to trace, and {name} is a saved workload already.")
    with workload_on_its_way(model, forms, variant, request.timeout) as traced:

        def workload() -> Workload:
            with progress.work(f"tracing {request.model_name}"):
                result = traced()
            if is_saved(model):
                check_agrees(name, result, request)
            if recompute and not recomputes(result):
                if is_saved(model):
                    raise Contradiction(
                        f"{name} was traced without activation checkpointing and has no repeated blocks that could be"
                        " recomputed.",
                        "`checkpointing` needs a new trace, from the model.",
                    )
                result = load_workload(model, forms, variant._replace(checkpointing=True), request.timeout)
            if request.save_workload:
                from trainpace.records import save

                save(result, request.save_workload)
            return result

        yield workload


def recomputes(workload: Workload) -> bool:
    """Was it traced with recomputation, or has it blocks to which it can be applied in every form?"""
    return workload.checkpointed or all(form.blocks is not None for form in workload.forms.values())


def check_agrees(name: str, workload: Workload, request: TracedRequest) -> None:
    """Raise Contradiction for the first field of the request that differs from what a saved workload was traced with."""
    side = re.search(r"(\d+) x (\d+) image$", workload.sample)
    sides = {int(length) for length in side.groups()} if side else set()
    traced = {
        "mode": workload.mode, "optimizer": workload.optimizer, "sequence_length": workload.sequence_length,
        "image_size": sides.pop() if len(sides) == 1 else None,
    }  # fmt: skip
    for setting, was in traced.items():
        value = getattr(request, setting, None)
        if value is None or value == was:
            continue
        shown = was if was is not None else f"none ({workload.sample})"
        raise Contradiction(
            f"{name} was traced with `{setting}` {shown}, and `{setting}` {value} needs a new trace, from the model.",
            "Leave the option out, or name the model.",
        )

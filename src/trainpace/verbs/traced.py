"""Requests about a model, and its workload, traced or saved."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal, Self

from trainpace.core.errors import Contradiction
from trainpace.core.execution import optimizer_called
from trainpace.core.records import save
from trainpace.verbs.request import AT_LEAST_1, DURATION, Argument, Field, Misuse, Progress, Request
from trainpace.workload import (
    AS_IT_IS,
    Adaptation,
    Form,
    Mode,
    ModelSpec,
    Variant,
    Workload,
    load_workload,
    workload_on_its_way,
)

ModelArgument = Annotated[str, Argument("The model, as in trainpace forecast.", metavar="MODEL")]
Optimizer = Annotated[
    str | None,
    Field(
        "sgd, adamw, adamw_8bit, lion, adafactor, muon, ...  [default: the task's own, else adamw"
        " for tokens, sgd_momentum]"
    ),
]
SequenceLength = Annotated[int | None, Field("Tokens in a sample, for transformers.", AT_LEAST_1)]
ImageSize = Annotated[int | None, Field("Side in pixels, for image models.", AT_LEAST_1)]
ChannelsLast = Annotated[bool, Field("NHWC tensors (memory_format=torch.channels_last).")]
Model = Annotated[
    str | Workload,
    Argument(
        "A name, FILE.py:FUNCTION, a saved WORKLOAD.json, or from Python a workload.",
        metavar="MODEL",
    ),
]
PRECISION_HELP = (
    "Number format.  [default: as a transformers configuration's dtype says, else torch's own fp32,"
    " which lets convolutions use TF32 on cards that have it]"
)
EVERY_FORM: tuple[Form, ...] = ("fp32", "amp", "half")


class TracedRequest(Request):
    """A request about a model. `save_workload` is where faces want the workload to be saved, in every number format."""

    model: Model
    optimizer: Optimizer = None
    sequence_length: SequenceLength = None
    image_size: ImageSize = None
    adapter: Annotated[
        Literal["lora", "dora"] | None,
        Field("Train small adapters beside frozen weights, as peft does."),
    ] = None
    lora_rank: Annotated[int | None, Field("Rank of the adapters.  [default: 16]", AT_LEAST_1)] = (
        None
    )
    lora_targets: Annotated[
        str | None,
        Field(
            "Linear layers that get adapters: q_proj,v_proj, ...  [default: all-linear, but the"
            " head]"
        ),
    ] = None
    weights: Annotated[
        Literal["nf4", "fp4", "nf4_double", "gptq"] | None,
        Field(
            "Format of frozen weights under adapters, as bitsandbytes keeps them; double: its"
            " scales in 8 bits too; gptq: 4 bits as AutoGPTQ keeps them."
        ),
    ] = None
    fp32_weights: Annotated[
        Literal["all", "norms", "none"] | None,
        Field(
            "Beside packed weights, what stays in fp32: all as peft's"
            " prepare_model_for_kbit_training leaves it, norms as TRL's SFTTrainer in bf16, none as"
            " under FSDP.  [default: all; none under gptq]"
        ),
    ] = None
    whole_modules: Annotated[
        str | None,
        Field(
            "Modules trained whole beside the adapters, peft's modules_to_save:"
            " embed_tokens,lm_head."
        ),
    ] = None
    timeout: Annotated[float, Field("Give up tracing after this.", DURATION)] = 300.0
    save_workload: str | None = None

    @property
    def forms(self) -> tuple[Form, ...]:
        """The number formats in which to trace the model."""
        return EVERY_FORM

    @property
    def variant(self) -> Variant:
        mode: Mode = getattr(self, "mode", None) or "train"
        optimizer = None if self.optimizer is None else optimizer_called(self.optimizer)
        return Variant(
            optimizer,
            self.sequence_length,
            self.image_size,
            mode=mode,
            adaptation=adaptation_of(self),
        )

    def settled(self, workload: Workload) -> Self:
        """With what the workload's own trainer or loader says, where the request says nothing of it."""
        return self

    @property
    def recomputes(self) -> bool:
        """Whether full activation checkpointing is wanted."""
        return False

    @property
    def model_name(self) -> str:
        return self.model if isinstance(self.model, str) else self.model.model


def adaptation_of(request: TracedRequest) -> Adaptation:
    """How the model is trained without training its own weights. Raises Misuse for what does nothing without adapters."""
    r = request
    if r.adapter is None:
        for name in ("lora_rank", "lora_targets", "weights", "fp32_weights", "whole_modules"):
            if getattr(r, name) is not None:
                raise Misuse(f"`{name}` does nothing without `adapter`.")
        return AS_IT_IS
    if r.fp32_weights is not None and r.weights is None:
        raise Misuse("`fp32_weights` does nothing without `weights`.")
    chosen = AS_IT_IS._replace(
        adapter=r.adapter, rank=r.lora_rank or AS_IT_IS.rank, weights=r.weights or ""
    )
    # peft's prepare_model_for_kbit_training leaves GPTQ's models as they are
    usual = "none" if r.weights == "gptq" else AS_IT_IS.fp32_weights
    chosen = chosen._replace(fp32_weights=r.fp32_weights or usual, whole=r.whole_modules or "")
    return chosen._replace(targets=r.lora_targets or AS_IT_IS.targets)


class TraceRequest(TracedRequest):
    mode: Annotated[Mode | None, Field("How much of a step.  [default: train]")] = None


def workload_of(
    request: TracedRequest,
    progress: Progress,
    forms: Sequence[Form] | None = None,
    variant: Variant | None = None,
) -> Workload:
    """The workload of the request's model, in other forms or another variant than the request's where these are given."""
    with workload_started(request, progress, forms, variant) as workload:
        return workload()


@contextlib.contextmanager
def workload_started(
    request: TracedRequest,
    progress: Progress,
    forms: Sequence[Form] | None = None,
    variant: Variant | None = None,
) -> Iterator[Callable[[], Workload]]:
    """Start tracing the request's model, and give what waits for its workload, so that a verb can prepare the rest meanwhile.

    Raises Contradiction where the request asks of a saved workload what it was not traced with.
    """
    model, variant = request.model, variant or request.variant
    forms = EVERY_FORM if request.save_workload else request.forms if forms is None else forms
    spec = ModelSpec.of(model)
    name = spec.in_words
    if spec.is_saved and request.save_workload:
        raise Misuse(
            f"`save_workload` needs a model to trace, and {name} is a saved workload already."
        )
    with workload_on_its_way(model, forms, variant, request.timeout) as traced:

        def workload() -> Workload:
            with progress.work(f"tracing {request.model_name}"):
                result = traced()
            if spec.is_saved:
                check_agrees(name, result, request)
            # a forecast applies recomputation to repeated blocks; a model without them is traced with it
            able = result.checkpointed or all(
                form.blocks is not None for form in result.forms.values()
            )
            if request.settled(result).recomputes and not able:
                if spec.is_saved:
                    raise Contradiction(
                        f"{name} was traced without activation checkpointing and has no repeated"
                        " blocks to recompute.",
                        "`checkpointing` needs a new trace, from the model.",
                    )
                result = load_workload(
                    model, forms, variant._replace(checkpointing=True), request.timeout
                )
            if request.save_workload:
                save(result, request.save_workload)
            return result

        yield workload


def check_agrees(name: str, workload: Workload, request: TracedRequest) -> None:
    """Raise Contradiction for the first field of the request that differs from what a saved workload was traced with."""
    traced = {
        "mode": workload.mode,
        "optimizer": workload.optimizer,
        "sequence_length": workload.sequence_length,
        "image_size": workload.image_side,
    }
    for setting, was in traced.items():
        value = getattr(request, setting, None)
        value = next(iter(value), None) if isinstance(value, tuple) else value
        value = optimizer_called(value) if setting == "optimizer" and value else value
        if value is None or value == was:
            continue
        shown = was if was is not None else f"none ({workload.sample})"
        raise Contradiction(
            f"{name} was traced with `{setting}` {shown}, and `{setting}` {value} needs a new"
            " trace, from the model.",
            "Leave the option out, or name the model.",
        )
    wanted = adaptation_of(request).in_words
    if wanted and wanted != workload.adaptation:
        raise Contradiction(
            f"{name} was traced with {workload.adaptation or 'no adapters'}, and {wanted} needs a"
            " new trace, from the model.",
            "Leave the option out, or name the model.",
        )

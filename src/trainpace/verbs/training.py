"""Requests about a whole training: what it does besides its steps."""

from typing import Annotated, Any

from trainpace.job import JobConditions, stated_conditions
from trainpace.units import hours_from_s
from trainpace.verbs.request import Field, Misuse, fields_of
from trainpace.verbs.traced import TracedRequest
from trainpace.verbs.units import ABOVE_0_S, COUNT, DURATION, EPOCHS, GB_PER_S, SAMPLE_BYTES, within


class TrainingRequest(TracedRequest):
    """A model, and the training that is to be done."""

    epochs: Annotated[float | None, Field("Passes over the data.", EPOCHS)] = None
    startup: Annotated[float | None, Field("Until the first step.  [default: 60s, assumed]", DURATION)] = None
    evaluation_samples: Annotated[int, Field("Samples evaluated after every epoch.", COUNT)] = 0
    checkpoint_every: Annotated[float | None, Field("Between checkpoints.  [default: what loses least]", ABOVE_0_S)] = (
        None
    )
    mtbf: Annotated[
        float | None, Field("Mean time between failures of one GPU.  [default: 50000h, arXiv:2407.21783]", ABOVE_0_S)
    ] = None
    step_variation: Annotated[
        float, Field("Deviation of a node's step over its mean: 0.03.", within("share", 0, 10))
    ] = 0.0
    data_gb: Annotated[float, Field("Data to copy to the servers first.", within("GB", 0, 1e9))] = 0.0
    download: Annotated[
        float | None, Field("Speed of that copy.  [default: 0.125, assumed]", GB_PER_S, metavar="GB/S")
    ] = None
    sample_bytes: Annotated[
        int, Field("Bytes read per sample; slow storage then shows as data wait.", SAMPLE_BYTES)
    ] = 0
    storage: Annotated[
        float | None,
        Field("Shared storage: checkpoints, samples.  [default: 1, assumed]", GB_PER_S, metavar="GB/S"),
    ] = None  # fmt: skip


def conditions_of(request: TrainingRequest, **more: Any) -> JobConditions:
    """What a request says of the training besides its steps, and `more`; what nobody said is as assumed."""
    r = request
    values = {
        "startup_s": r.startup, "evaluation_samples": r.evaluation_samples, "step_variation": r.step_variation,
        "checkpoint_every_s": r.checkpoint_every, "device_mtbf_h": None if r.mtbf is None else hours_from_s(r.mtbf),
        "data_gb": r.data_gb, "download_gb_per_s": r.download, "sample_bytes": float(r.sample_bytes),
        "storage_gb_per_s": r.storage, **more,
    }  # fmt: skip
    return stated_conditions(values)


def check_no_training(request: TrainingRequest) -> None:
    """Raise Misuse for what a request says of a training that it does not describe."""
    for name, field in fields_of(TrainingRequest).items():
        if name not in fields_of(TracedRequest) and getattr(request, name) != field.default:
            raise Misuse(f"`{name}` does nothing without `samples` and `epochs`.")

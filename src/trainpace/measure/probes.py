"""One batch size, measured from outside: in a fresh process, so that a crash or a hang costs that probe alone."""

from typing import Literal, TypeVar

import msgspec

from trainpace import records
from trainpace.errors import OutOfMemory, TimedOut, TrainpaceError, UserCodeError
from trainpace.execution import Execution, Precision
from trainpace.outcome import FailedProbe, MeasuredNoiseScale, Measurement, ProbeFailure
from trainpace.process import run_isolated
from trainpace.records import Record

R = TypeVar("R", bound=Record)


class Conditions(Record):
    """The conditions under which a model is measured: everything but the batch size. A sweep and its resumption share them.

    `seconds` is the training time of one probe; `memory_limit_gib` the most memory that its process may map (CPU only);
    `optimizer` None is the task's own, or sgd_momentum.
    """

    model: str
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "fp32"
    optimizer: str | None = None
    accumulation: int = 1
    sequence_length: int | None = None
    image_size: int | None = None
    channels_last: bool = False
    compile: bool = False
    seconds: float = 2.0
    timeout_s: float = 600.0
    memory_limit_gib: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and self.timeout_s > 0 and self.accumulation >= 1):
            raise TrainpaceError("a probe needs seconds of 0 or more, a time-out above 0 and 1 or more micro-batches.")
        if self.memory_limit_gib is not None and not self.memory_limit_gib > 0:
            raise TrainpaceError("a memory limit is above 0 GiB.")
        if self.memory_limit_gib is not None and self.device == "cuda":
            raise TrainpaceError("a memory limit is for probes on the CPU.", "A GPU's own memory is the limit there.")

    def execution(self, batch_size: int, optimizer: str) -> Execution:
        """How a probe at this batch size is executed."""
        return Execution(
            micro_batch=batch_size, accumulation=self.accumulation, precision=self.precision, optimizer=optimizer,
            channels_last=self.channels_last, compile=self.compile,
        )  # fmt: skip


def measure(conditions: Conditions, batch_size: int) -> Measurement:
    """Real training steps at one batch size on this machine. Raises `UserCodeError` and its kin where they fail."""
    return _answer(Measurement, "measuring", conditions, batch_size)


def measure_noise_scale(conditions: Conditions, batch_size: int) -> MeasuredNoiseScale:
    """The gradient noise scale over some steps on the task's own data. Raises as `measure` does, and where there is no data."""
    return _answer(MeasuredNoiseScale, "gathering gradients of", conditions, batch_size)


def _answer(kind: type[R], verb: str, conditions: Conditions, batch_size: int) -> R:
    """The worker's answer, which is a record of that kind."""
    request = {"record": kind.__name__, "conditions": msgspec.to_builtins(conditions), "batch_size": batch_size}
    what = f"{verb} {conditions.model} at batch {batch_size}"
    answer = run_isolated("trainpace.measure.worker", request, conditions.timeout_s, what)
    return records.from_json(answer, kind, "the answer of the measuring process")


def probe(conditions: Conditions, batch_size: int, device: str) -> Measurement | FailedProbe:
    """Measure; a failure of the user's code or a lack of memory is an answer, on the named device."""
    try:
        return measure(conditions, batch_size)
    except OutOfMemory as error:
        failure: ProbeFailure = "out_of_memory"
        reason = error.message
    except TimedOut as error:
        failure, reason = "timeout", error.message
    except UserCodeError as error:
        failure, reason = "crashed", str(error)
    return FailedProbe(
        model=conditions.model, device=device, failure=failure, reason=reason, environment={},
        execution=conditions.execution(batch_size, conditions.optimizer or "sgd_momentum"),
        sequence_length=conditions.sequence_length, image_size=conditions.image_size,
    )  # fmt: skip

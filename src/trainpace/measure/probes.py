"""One batch size, measured from outside: in a fresh process, so that a crash or a hang costs that probe alone."""

import msgspec

from trainpace import records
from trainpace.errors import OutOfMemory, TimedOut, UserCodeError
from trainpace.execution import Execution
from trainpace.measure.conditions import Conditions
from trainpace.outcome import FailedProbe, MeasuredNoiseScale, Measurement, ProbeFailure
from trainpace.process import run_isolated


def measure(conditions: Conditions, batch_size: int) -> Measurement:
    """Real training steps at one batch size on this machine. Raises `UserCodeError` and its kin where they fail."""
    request = {"verb": "measure", "conditions": msgspec.to_builtins(conditions), "batch_size": batch_size}
    what = f"measuring {conditions.model} at batch {batch_size}"
    answer = run_isolated("trainpace.measure.worker", request, conditions.timeout_s, what)
    return records.from_json(answer, Measurement, "the measurement")


def measure_noise_scale(conditions: Conditions, batch_size: int) -> MeasuredNoiseScale:
    """The gradient noise scale over some steps on the task's own data. Raises as `measure` does, and where there is no data."""
    request = {"verb": "noise_scale", "conditions": msgspec.to_builtins(conditions), "batch_size": batch_size}
    what = f"gathering gradients of {conditions.model} at batch {batch_size}"
    answer = run_isolated("trainpace.measure.worker", request, conditions.timeout_s, what)
    return records.from_json(answer, MeasuredNoiseScale, "the noise scale")


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
        model=conditions.model,
        device=device,
        execution=Execution(
            micro_batch=batch_size,
            accumulation=conditions.accumulation,
            precision=conditions.precision,
            optimizer=conditions.optimizer or "sgd_momentum",
            channels_last=conditions.channels_last,
            compile=conditions.compile,
        ),
        failure=failure,
        reason=reason,
        environment={},
        sequence_length=conditions.sequence_length,
        image_size=conditions.image_size,
    )

"""`verify`: is it the same training?"""

from typing import Annotated, Literal

from trainpace.run import Equivalence, Question, verify
from trainpace.verbs.request import (
    ABOVE_0,
    AT_LEAST_1,
    COUNT,
    DURATION,
    Field,
    Progress,
    Request,
    within,
)
from trainpace.verbs.traced import ImageSize, ModelArgument, SequenceLength

Way = Literal["accumulate", "data_parallel", "ddp", "fsdp2", "deepspeed"]
EVERYWHERE: tuple[Way, ...] = ("accumulate", "data_parallel", "ddp", "fsdp2")
"""Ways that need torch alone."""
DIFFERENCE = within("difference", ABOVE_0, 0.1)


class VerifyRequest(Request):
    model: ModelArgument
    batch: Annotated[int, Field("Samples per update.", AT_LEAST_1)] = 8
    accumulate: Annotated[int, Field("Micro-batches of accumulation.", COUNT)] = 4
    ranks: Annotated[int, Field("Processes, or replicas of DataParallel.", COUNT)] = 2
    steps: Annotated[int, Field("Updates.", AT_LEAST_1)] = 10
    way: Annotated[
        tuple[Way, ...], Field("Only this one; several.  [default: all but deepspeed]")
    ] = ()
    precision: Annotated[Literal["fp32", "bf16", "amp_bf16"], Field("Number format.")] = "fp32"
    optimizer: Annotated[
        str | None, Field("As in trainpace forecast.  [default: the task's own, or sgd_momentum]")
    ] = None
    sequence_length: SequenceLength = None
    image_size: ImageSize = None
    tolerance: Annotated[
        float, Field("Up to this relative difference it is rounding.", DIFFERENCE)
    ] = 1e-5
    seed: Annotated[int, Field("Decides weights and samples.")] = 0
    timeout: Annotated[float, Field("Give up on a training after this.", DURATION)] = 600.0


def run(request: VerifyRequest, progress: Progress) -> Equivalence:
    r = request
    question = Question(
        model=r.model,
        batch=r.batch,
        parts=r.accumulate,
        ranks=r.ranks,
        steps=r.steps,
        ways=r.way or EVERYWHERE,
        precision=r.precision,
        optimizer=r.optimizer,
        sequence_length=r.sequence_length,
        image_size=r.image_size,
        tolerance=r.tolerance,
        seed=r.seed,
        timeout_s=r.timeout,
    )
    with progress.work(f"verifying {r.model}") as work:
        return verify(question, work.say)

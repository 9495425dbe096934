"""Requests about several sequence lengths: a workload for each of them."""

from collections.abc import Sequence

from trainpace.verbs.request import Misuse, Progress
from trainpace.verbs.traced import workload_of
from trainpace.verbs.training import ExecutedRequest
from trainpace.workload import Variant, Workload, load_workloads


def workloads_of(
    request: ExecutedRequest, lengths: Sequence[int], progress: Progress, variant: Variant
) -> tuple[tuple[int | None, Workload], ...]:
    """The workload of the request's model at each length; at its usual one, beside None, where no length is given.

    Raises Misuse where several are to be saved, and TrainpaceError where the model has a length of its own.
    """
    if len(lengths) < 2:
        length = lengths[0] if lengths else None
        return (
            (
                length,
                workload_of(request, progress, variant=variant._replace(sequence_length=length)),
            ),
        )
    if request.save_workload:
        raise Misuse(
            "`save_workload` keeps the trace of one sequence length, and this forecast needs"
            " several."
        )

    def found(variant: Variant) -> dict[int, Workload]:
        with progress.work(f"tracing {request.model_name} at {len(lengths)} lengths"):
            return load_workloads(request.model, request.forms, variant, lengths, request.timeout)

    workloads = found(variant)
    able = all(
        form.blocks is not None
        for workload in workloads.values()
        for form in workload.forms.values()
    )
    if not able and request.settled(workloads[lengths[0]]).recomputes:
        workloads = found(
            variant._replace(checkpointing=True)
        )  # a model without repeated blocks is traced with it
    return tuple(workloads.items())

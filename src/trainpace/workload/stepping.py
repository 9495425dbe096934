"""One update of an optimizer on the meta device, recorded as every later one is."""

import contextlib
from collections.abc import Iterable
from dataclasses import replace

import torch

from trainpace.workload.blockwise import BlockwiseOptimizer
from trainpace.workload.recorder import Recorder
from trainpace.workload.task_optimizers import ScalarsReadAsOne, is_torchs
from trainpace.workload.tensors import tensors_in


def launch_together(stepper: torch.optim.Optimizer, together: bool) -> None:
    """Let an optimizer launch kernels for many tensors at once, CUDA's default since torch 2.0, or tensor by tensor.

    Adafactor goes tensor by tensor unless told otherwise, since what is temporary is as large as the parameters at once.
    """
    if is_torchs(stepper) and type(stepper).__name__ == "Adafactor":
        return
    for group in stepper.param_groups:
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = together


def step_like(first: Recorder, recorder: Recorder) -> None:
    """Note the step that another batch size's recorder saw: an update does not depend on the batch."""
    shift = recorder.activation_bytes - first.before_update
    for one in first.recorded:
        if one.phase == "optimizer":
            recorder.recorded.append(
                replace(one, activation_bytes=max(0.0, one.activation_bytes + shift))
            )
    recorder.optimizer_bytes, recorder.paged_bytes = first.optimizer_bytes, first.paged_bytes


def step_once(stepper: torch.optim.Optimizer, recorder: Recorder) -> None:
    """Record one step, and note the bytes of its states."""
    recorder.phase, recorder.before_update = "optimizer", recorder.activation_bytes
    with ScalarsReadAsOne() if is_torchs(stepper) else contextlib.nullcontext():
        recorder.recording = False
        stepper.step()  # creates the states, which is no part of later steps
        recorder.recording = True
        stepper.step()
    recorder.optimizer_bytes = storage_bytes(
        tensors_in([dict(state) for state in stepper.state.values()])
    )
    recorder.paged_bytes = stepper.paged_bytes() if isinstance(stepper, BlockwiseOptimizer) else 0.0
    # the states were made during this step, but are there before it in every other one
    for recorded in recorder.recorded:
        if recorded.phase == "optimizer":
            recorded.activation_bytes = max(
                0.0, recorded.activation_bytes - recorder.optimizer_bytes
            )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> float:
    """The bytes of meta tensors, of which some may share their storage."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if t.device.type == "meta"
    }
    return float(sum(storages.values()))

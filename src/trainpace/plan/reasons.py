"""Why a choice is right, in the sentence that an expert would say, and what may go wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec.structs import replace

from trainpace.core.execution import Execution
from trainpace.core.outcome import Forecast
from trainpace.core.units import format_count, format_number
from trainpace.forecast import needed_gib
from trainpace.plan.changes import Outlook
from trainpace.plan.evaluate import Judge, Setting
from trainpace.plan.search import SearchResult
from trainpace.plan.simplicity import TIGHT
from trainpace.workload import Workload

HIDDEN = 0.05
"""Share of a step below which the exchange of gradients is called hidden."""


def because(setting: Setting, judge: Judge, result: SearchResult, best: tuple[int, int]) -> str:
    """One sentence: the devices, how the model is divided over them, and what decides it."""
    e = result.choice(best).execution
    f = judge.forecast(e)
    assert not isinstance(f, str)
    parameters = f"{format_count(setting.workload.parameters)} parameters"
    if e.world_size == 1:
        said = f"one GPU holds all of {parameters}, so there is nothing to divide"
        if e.offload_optimizer or e.offload_parameters:
            said = (
                f"{parameters} do not fit on one GPU, so that a part of their states stays in the"
                " host's memory"
            )
    else:
        said = " and ".join(_divided(setting, judge, e, f, result.room_gib, parameters))
    if e.activation_checkpointing != "none":
        said += f"; {_recomputed(setting, judge, e, result.room_gib)}"
    return f"{_devices(setting, e)}: {said}."


def cautions(chosen: Outlook, room_gib: float, workload: Workload) -> tuple[str, ...]:
    """What may go wrong with the recommended choice."""
    found = []
    e = chosen.choice.execution
    if math.isfinite(room_gib) and chosen.needed_gib > TIGHT * room_gib:
        found.append(
            f"it fills {chosen.needed_gib / room_gib:.0%} of a GPU's usable memory, and forecasts"
            " of memory err by a tenth: try the first steps before you leave it alone"
        )
    if e.pp > 1:
        found.append(
            "a pipeline needs a model that can be cut into stages, and an engine that runs them"
            " (torchtitan, Megatron)"
        )
    elif e.tp > 1 or e.cp > 1 or e.ep > 1:
        found.append(
            "the model's code, or its engine, has to divide the layers (DTensor, Megatron)"
        )
    return tuple(found)


def _devices(setting: Setting, e: Execution) -> str:
    device = setting.cluster.device
    count = "one" if e.world_size == 1 else str(e.world_size)
    link = ""
    if e.nproc_per_node > 1:
        link = " with NVLink" if device.link_gb_per_s is not None else " over PCIe"
    over = ""
    network = setting.cluster.network_gb_per_s_per_device
    if e.nnodes > 1 and network is not None:
        over = f" on {e.nnodes} nodes"
    return f"{count} x {device.name}{link}{over}"


def _divided(
    setting: Setting, judge: Judge, e: Execution, f: Forecast, room_gib: float, parameters: str
) -> Iterator[str]:
    assert f.step is not None
    states = _states_gib(f)
    if e.tp * e.pp * e.cp * e.ep == 1:
        whole = states if e.zero_stage == 0 else _states_gib(judge.forecast(_plain(e)))
        if e.zero_stage == 0:
            of_room = f"states take {format_number(states or 0.0)} of {format_number(room_gib)} GiB"
            waits = f.step.communication_ms / f.step.total_ms
            exchanged = "gradients are exchanged during the backward pass"
            if waits > HIDDEN:
                exchanged = f"exchange of gradients takes {waits:.0%} of a step"
            yield f"plain DDP is right for {parameters}, whose {of_room} and whose {exchanged}"
            return
        name = f"ZeRO-{e.zero_stage}" if e.zero_stage < 3 else "full sharding (FSDP, ZeRO-3)"
        if whole is not None and states is not None:
            yield (
                f"{name}, as the states of {parameters} take {format_number(whole)} GiB of every"
                f" GPU unsharded, of {format_number(room_gib)}, and {format_number(states)} so"
            )
        else:
            yield f"{name} for {parameters}, which no GPU holds alone"
        return
    sharded = (
        f" with {'FSDP' if e.zero_stage == 3 else f'ZeRO-{e.zero_stage}'} over the rest"
        if e.zero_stage
        else ""
    )
    if e.tp > 1:
        yield f"tensor parallelism over {e.tp} GPUs of a node, which have the fastest links"
    if e.ep > 1:
        yield f"the experts divided over {e.ep} GPUs"
    if e.cp > 1:
        yield (
            f"the sequence of {setting.workload.sequence_length or 0:,} tokens divided over {e.cp}"
            " GPUs"
        )
    if e.pp > 1:
        yield f"a pipeline of {e.pp} stages, which exchanges least between nodes"
    yield f"{format_number(states or 0.0)} GiB of states a GPU of {parameters}{sharded}"


def _recomputed(setting: Setting, judge: Judge, e: Execution, room_gib: float) -> str:
    kept = judge.forecast(replace(e, activation_checkpointing="none"))
    if isinstance(kept, str) or kept.memory is None:
        return "activations are computed again, to make room"
    return (
        "activations are computed again, as all of them would need"
        f" {format_number(float(needed_gib(kept.memory)))} GiB"
    )


def _plain(e: Execution) -> Execution:
    return replace(
        e,
        zero_stage=0,
        shard_size=None,
        reshard_after_forward=True,
        offload_optimizer=False,
        offload_parameters=False,
    )


def _states_gib(f: Forecast | str) -> float | None:
    """Parameters, gradients and optimizer states on one device."""
    if isinstance(f, str) or f.memory is None:
        return None
    return f.memory.parameters_gib + f.memory.gradients_gib + f.memory.optimizer_states_gib

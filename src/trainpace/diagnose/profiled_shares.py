"""Where the time of a step went on the device, and why the device was idle. The parts of a step add up to it.

Each moment counts once, to the first of these that holds: a kernel computes; a kernel exchanges between ranks, which is then
*exposed*; a copy runs. Otherwise the device is idle, for the reason that the host gives at that moment:

- it waits for its loader;
- the pause began while it waited for the device (`.item()`, `cudaStreamSynchronize`), so that it could not launch ahead;
- it launches: an operator or a call of the runtime library runs, or both are at most 0.1 ms away;
- it does something else, which no trace of operators names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainpace.diagnose.interval_arithmetic import closed, sweep, union, union_of
from trainpace.diagnose.profiled_steps import Windows
from trainpace.diagnose.spans import Spans, Trace
from trainpace.measure import (
    KERNEL_KINDS,
    OPTIMIZER_RANGE,
    exchanges,
    kind_of,
    kind_of_copy,
    waits_for_data,
    waits_for_device,
)

BETWEEN_OPERATORS_US = 100.0
"""Python between two operators is a part of launching them."""
PARTS = (
    *KERNEL_KINDS,
    "communication",
    "host_to_device",
    "optimizer",
    "data",
    "logging",
    "launch",
    "own_code",
)
"""Of a step, in the words of `diagnose`; computing by kinds of kernels."""

Mask = npt.NDArray[np.bool_]


class Split(NamedTuple):
    """Milliseconds by window. `parts` add up to `step_ms`. Of the others, which overlap: `communication_ms` and `copies_ms` are
    all of these, hidden ones too; `busy_ms` is the device with work of any kind; `waits_ms` what the host spent in its loader
    ("data"), waiting for the device ("logging") and launching ("launch"), the device busy or not.
    """

    step_ms: npt.NDArray[np.float64]
    parts_ms: dict[str, npt.NDArray[np.float64]]
    communication_ms: npt.NDArray[np.float64]
    copies_ms: npt.NDArray[np.float64]
    busy_ms: npt.NDArray[np.float64]
    waits_ms: dict[str, npt.NDArray[np.float64]]


def split(trace: Trace, windows: Windows) -> Split:
    """The parts of each window."""
    by_kind = {kind: union(*spans) for kind, spans in _device_work(trace).items()}
    waiting = union_of(_named(trace, trace.calls, waits_for_device))
    data = union_of(_named(trace, trace.ranges, waits_for_data))
    # a call that waits for the device is no launch
    launching = _named(trace, trace.calls, lambda name: not waits_for_device(name))
    host = closed(
        union(
            *(np.concatenate(pair) for pair in zip(launching[:2], trace.operators[:2], strict=True))
        ),
        BETWEEN_OPERATORS_US,
    )
    update = union_of(
        _named(trace, trace.ranges, lambda name: name.lower().startswith(OPTIMIZER_RANGE))
    )
    exchange = union_of(_named(trace, trace.operators, exchanges))
    sets = [*by_kind.values(), data, waiting, host, update, exchange]
    low, high = float(windows.start_us[0]), float(windows.end_us[-1])
    cut = sweep(low, high, sets, np.concatenate((windows.start_us, windows.end_us)))
    *on_device, in_data, in_wait, in_host, in_update, in_exchange = cut.within
    work = dict(zip(by_kind, on_device, strict=True))
    if len(trace.kernels):
        masks = _on_device(work)
        masks |= _idle(~(np.logical_or.reduce(list(work.values()))), in_data, in_wait, in_host)
    else:
        masks = _on_host(in_data, in_update, in_exchange, in_host)
    number = np.searchsorted(windows.start_us, cut.start_us, side="right") - 1
    inside = (number >= 0) & (cut.start_us < windows.end_us[np.maximum(number, 0)])

    def ms(mask: Mask) -> npt.NDArray[np.float64]:
        chosen = mask & inside
        return np.bincount(
            number[chosen], cut.width_us[chosen] / 1e3, len(windows.start_us)
        ).astype(np.float64)

    everything = np.ones(len(cut.start_us), bool)
    none = np.zeros(len(cut.start_us), bool)
    return Split(
        step_ms=ms(everything),
        parts_ms={part: ms(masks.get(part, none)) for part in PARTS},
        communication_ms=ms(work["communication"]),
        copies_ms=ms(work["copy"]),
        busy_ms=ms(np.logical_or.reduce(list(work.values()))),
        waits_ms={
            "data": ms(in_data),
            "logging": ms(in_wait & ~in_data),
            "launch": ms(in_host & ~in_wait & ~in_data),
        },
    )


def _device_work(
    trace: Trace,
) -> dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
    """Starts and ends by kind: of kernels that compute, of communication and of copies."""
    kinds = (*KERNEL_KINDS, "communication", "copy")
    of_kernels, of_copies = (
        np.array([of(name) for name in trace.names] or [""]) for of in (kind_of, kind_of_copy)
    )
    found = {}
    for kind in kinds:
        pairs = (trace.kernels, of_kernels), (trace.copies, of_copies)
        spans = [column.where(kinds_of[column.name] == kind) for column, kinds_of in pairs]
        found[kind] = (
            np.concatenate([s.start_us for s in spans]),
            np.concatenate([s.end_us for s in spans]),
        )
    return found


def _named(trace: Trace, spans: Spans, counts: Callable[[str], bool]) -> Spans:
    return spans.of(i for i, name in enumerate(trace.names) if counts(name))


def _on_device(work: dict[str, Mask]) -> dict[str, Mask]:
    masks, taken = {}, np.zeros_like(work["communication"])
    for kind in (*KERNEL_KINDS, "communication", "copy"):
        masks["host_to_device" if kind == "copy" else kind] = work[kind] & ~taken
        taken = taken | work[kind]
    return masks


def _idle(idle: Mask, in_data: Mask, in_wait: Mask, in_host: Mask) -> dict[str, Mask]:
    """Idle pieces by the host's reason."""
    begins = idle & ~np.concatenate(([False], idle[:-1]))
    run = np.cumsum(begins) - 1
    waited = in_wait[begins]
    after_wait = idle & (waited[np.maximum(run, 0)] if len(waited) else idle)
    data = idle & in_data
    logging = after_wait & ~data
    launch = idle & in_host & ~data & ~logging
    return {
        "data": data,
        "logging": logging,
        "launch": launch,
        "own_code": idle & ~data & ~logging & ~launch,
    }


def _on_host(in_data: Mask, in_update: Mask, in_exchange: Mask, in_host: Mask) -> dict[str, Mask]:
    """A step without a device: what the host computes is all that there is."""
    data, update = in_data, in_update & ~in_data
    exchange = in_exchange & ~data & ~update
    other = in_host & ~data & ~update & ~exchange
    rest = ~(data | update | exchange | other)
    return {
        "data": data,
        "optimizer": update,
        "communication": exchange,
        "other": other,
        "own_code": rest,
    }

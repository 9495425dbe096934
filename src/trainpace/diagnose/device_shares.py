"""A step's causes where a device computes beside the host that only launches, and what its kernels do."""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from trainpace.core.units import format_number
from trainpace.measure import KERNEL_KINDS, kind_of
from trainpace.watch import Rank

INTERRUPTIONS = ("communication", "straggler", "checkpoint", "evaluation")
"""What interrupts training, and exchange between ranks."""
BUSY = 0.9
"""A device that is busy in a smaller share of the step is taken to wait for the host: a judgement that one training bore out."""
LEAST_KIND = 0.02
"""A kind of kernels that takes less of the device's time is not named."""


def beside_a_device(
    host: dict[str, float],
    busy_ms: float,
    copies_ms: float,
    synchronisation_ms: float,
    update_ms: float,
) -> dict[str, float]:
    """A step's causes where the host only launches what a device computes, from the host's own time by cause.

    The device's `busy_ms` are computing, but for `copies_ms`, in which it only took data from the host, and for the optimizer's
    `update_ms` at most. Without waiting for the device (`synchronisation_ms`, a part of logging, and copies) the step would take
    as long as the later of the two; what it takes longer is lost by waiting. The host's time beyond the device's is charged to
    what can be left out before launching, and the rest to the optimizer and to launching, as the host was seen in them.
    The parts that interrupt training, and exchange between ranks, stay as they are.
    """
    step = math.fsum(ms for cause, ms in host.items() if cause not in INTERRUPTIONS)
    waits = {
        "host_to_device": host["host_to_device"],
        "logging": min(synchronisation_ms, host["logging"]),
    }
    waiting = math.fsum(waits.values())
    computing = min(busy_ms, step)
    # the step that was recorded may be longer than the mean one
    copies = min(computing, copies_ms * computing / busy_ms) if busy_ms else 0.0
    lost = step - max(computing, step - waiting)
    left = max(0.0, step - computing - lost)
    by_cause = dict.fromkeys(host, 0.0) | {cause: host[cause] for cause in INTERRUPTIONS}
    for cause in ("data", "logging", "own_code", "trainpace"):
        by_cause[cause] = min(left, host[cause] - waits.get(cause, 0.0))
        left -= by_cause[cause]
    for cause, ms in waits.items():
        by_cause[cause] += lost * ms / waiting if waiting else 0.0
    by_cause["host_to_device"] += copies
    updating = min(update_ms, computing - copies)
    model = host["launch"] + host["compute"]
    launching_updates = (
        left * host["optimizer"] / (model + host["optimizer"]) if model + host["optimizer"] else 0.0
    )
    by_cause["launch"] = left - launching_updates
    by_cause["optimizer"] = updating + launching_updates
    by_cause["compute"] = max(0.0, computing - copies - updating)
    return by_cause


def kernels_ms(ranks: Sequence[Rank]) -> dict[str, float]:
    """Milliseconds of a mean step by kind of kernel (KERNEL_KINDS), the mean of these ranks; empty where none were recorded."""
    seen = [rank for rank in ranks if rank.device_kernels_ms and rank.device_busy_ms]
    by_kind: defaultdict[str, float] = defaultdict(float)
    for rank in seen:
        assert rank.device_busy_ms is not None
        longer = max(1.0, rank.device_busy_ms / _uninterrupted_ms(rank))
        for name, ms in rank.device_kernels_ms.items():
            by_kind[kind_of(name)] += ms / longer
    return {kind: by_kind[kind] / len(seen) for kind in KERNEL_KINDS} if seen else {}


def _uninterrupted_ms(rank: Rank) -> float:
    return (
        math.fsum(ms for part, ms in rank.parts_ms.items() if part not in INTERRUPTIONS)
        or rank.step_ms
    )


def sets_the_pace(ranks: Sequence[Rank]) -> bool:
    """Whether a device is busy, copies included, in nearly all of the step, so that shorter kernels make it shorter.

    Several ranks are taken to be: their devices also wait for each other, and kernels that exchange are in no busy time.
    """
    busy_ms = fmean(r.device_busy_ms or 0.0 for r in ranks)
    return _exchange(ranks) or busy_ms >= BUSY * fmean(map(_uninterrupted_ms, ranks))


def _exchange(ranks: Sequence[Rank]) -> bool:
    return ranks[0].world_size > 1


def device_in_words(ranks: Sequence[Rank], step_ms: float) -> list[str]:
    """How much of the step the device is busy, and with what kinds of kernels, as sentences; empty where nobody looked."""
    busy = [r.device_busy_ms for r in ranks if r.device_busy_ms is not None]
    if not busy:
        return []
    share = min(1.0, fmean(busy) / step_ms)
    by_kind = [
        (ms, KERNEL_KINDS[kind])
        for kind, ms in kernels_ms(ranks).items()
        if ms >= LEAST_KIND * fmean(busy)
    ]
    kinds = [f"{format_number(ms)} ms in {words}" for ms, words in sorted(by_kind, reverse=True)]
    words = (
        f"The device is busy in {share:.0%} of the step{': ' if kinds else ''}{', '.join(kinds)}."
    )
    if _exchange(ranks):
        words += " The exchange between ranks is not counted in that."
    elif not sets_the_pace(ranks):
        words += " The host sets the pace: faster kernels alone shorten no step."
    return [words]

"""A sweep over batch sizes in sentences: its jumps, whether the step time is linear, from where on throughput stops growing."""

from collections.abc import Mapping, Sequence

from trainpace.core.outcome import Jump
from trainpace.core.stats import KNEE, Trend
from trainpace.report.phrases import number, plural

MOST_JUMPS = 6
"""Jumps that are told one by one."""
ROUNDS_TO_1 = 0.99995


def jumps_in_words(jumps: Sequence[Jump], rates: Mapping[int, float | None]) -> list[str]:
    """Each jump with its cause and the better sizes. rates: samples/s by batch size, as far as they are known."""
    lines = [_jump(jump, rates) for jump in jumps[:MOST_JUMPS]]
    others = [str(jump.before) for jump in jumps[MOST_JUMPS:]]
    if others:
        more = f"{plural(len(others), 'more jump')}, after batch {', '.join(others)}"
        lines.append(f"{more}; --json has the causes of each.")
    return lines


def jumps_in_brief(jumps: Sequence[Jump]) -> str:
    """Where the jumps are, and how large."""
    shown = [
        f"{jump.before:,} (+{100 * jump.excess_ms / jump.before_ms:.1f} %)"
        for jump in jumps[:MOST_JUMPS]
    ]
    more = f" and {len(jumps) - MOST_JUMPS} more" if len(jumps) > MOST_JUMPS else ""
    return (
        f"a step jumps after batch {', '.join(shown)}{more}, beyond what one more sample usually"
        " costs."
    )


def _jump(jump: Jump, rates: Mapping[int, float | None]) -> str:
    def rate(batch: int, unit: str = "") -> str:
        known = rates.get(batch)
        return "" if known is None else f" ({number(known)}{unit})"

    causes = "".join(
        f" {'Also' if i else 'Cause'}: {cause}." for i, cause in enumerate(jump.causes)
    )
    good = jump.next_good
    onward = (
        f"the next good batch size is {good or 0:,}"
        if good
        else "no larger size of the sweep that fits does as well"
    )
    # where a step hardly grows at all, the size behind a jump may still be the better one
    pays = jump.before / jump.before_ms > jump.batch / jump.after_ms
    before, after = (
        f"batch {jump.before:,}{rate(jump.before, ' samples/s')}",
        f"{jump.batch:,}{rate(jump.batch)}",
    )
    advice = (
        f"Better than {after}: {before}"
        if pays
        else f"Throughput at {after} is still that of {before}"
    )
    added = jump.batch - jump.before
    where, usual = f"after batch {jump.before:,}", "one more sample usually costs"
    if added > 1:
        where, usual = (
            f"between batch {jump.before:,} and {jump.batch:,}",
            f"{added:,} more samples usually cost",
        )
    return (
        f"Jump {where}: from {number(jump.before_ms)} to {number(jump.after_ms)} ms at batch"
        f" {jump.batch:,}, {number(jump.excess_ms)} ms ({100 * jump.excess_ms / jump.before_ms:.1f}"
        f" %) more than {usual}.{causes} {advice}; {onward}{rate(good or 0)}."
    )


def is_whole(batches: Sequence[int]) -> bool:
    """Whether every size between the ends is among them."""
    return batches[-1] - batches[0] < len(batches)


def no_jumps(batches: Sequence[int], trend: Trend | None) -> str:
    """What is said of a forecast curve without jumps."""
    first, last = batches[0], batches[-1]
    if not is_whole(batches):
        return (
            f"No jumps show at these sizes, which leave some out; --batch {first}:{last} looks at"
            " every one."
        )
    steps = (
        []
        if trend is None
        else [f"{100 * share:.1f} % after batch {before}" for before, share in trend.uneven]
    )
    most = f" The largest steps beyond the usual: {', '.join(steps)}." if steps else ""
    return (
        "No jumps: nowhere does one more sample cost three times what it costs around it, and 2 %"
        f" of the step.{most}"
    )


def trend_in_words(t: Trend) -> list[str]:
    """Is the step time linear, how well does a line fit, and where does throughput stop growing?"""
    best = (
        f"Throughput is best at batch {t.best_batch:,} ({number(t.best_samples_per_second)}"
        " samples/s)"
    )
    if t.knee_batch == t.best_batch:
        return [shape_in_words(t), f"{best}; every smaller batch has over {100 * KNEE:.0f} % less."]
    return [
        shape_in_words(t),
        f"{best} and hardly grows from batch {t.knee_batch:,} on, {knee(t)}.",
    ]


def shape_in_words(t: Trend) -> str:
    """Is the step time linear, and how well does a line fit?"""
    line, parabola, cubic = (f"{100 * error:.1f} %" for error in t.mean_errors)
    shape = {"none of these": "neither linear nor quadratic nor cubic"}.get(t.shape, t.shape)
    r_squared = f"{t.r_squared:.4f}" if t.r_squared < ROUNDS_TO_1 else "over 0.9999"
    return (
        f"Step time over batch {t.first_batch:,} to {t.last_batch:,} is {shape}. Fitted line:"
        f" {number(t.fixed_ms)} ms + {number(t.ms_per_sample)} ms a sample (R² {r_squared}), {line}"
        f" off on average and {100 * abs(t.worst_error):.0f} % at most, at batch {t.worst_batch:,};"
        f" a quadratic curve is {parabola} off, a cubic one {cubic}."
    )


def knee(t: Trend) -> str:
    """What the smallest sufficient batch is."""
    return (
        f"the smallest within {100 * KNEE:.0f} % of it ({number(t.knee_samples_per_second)}"
        " samples/s)"
    )

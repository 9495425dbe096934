"""A folder of event logs as one recording: the command, its ranks, and what they do to each other."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import UnreadableInput
from trainpace.core.intake import read_json
from trainpace.core.records import Record
from trainpace.watch.command import COMMAND_FILE
from trainpace.watch.event_logs import ProcessLog, fetches_of, process_logs, readable, records_of
from trainpace.watch.inside.event_log import DATA, FORWARD, Span, Step
from trainpace.watch.ranks import Rank, rank_of
from trainpace.watch.stragglers import Together, link_rates, rank_steps, together
from trainpace.workload import LARGEST

STEP_IN_WORDS = (
    "A step is an update of the parameters by a torch optimizer, by an engine, or by the script's"
    " own code."
)


class _Ended(msgspec.Struct):
    """What `watch` notes of its command (COMMAND_FILE)."""

    command: tuple[str, ...]
    seconds: float | None
    exit_code: int | None
    unended: str = ""
    together_by: str = ""
    busy: str = ""
    restored: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class Recording(Record):
    """A watched command: its words, its end, and its ranks. `seen`: without ranks, what ran instead; with them, what is left
    out (of several processes with the same rank, all but the one with the most steps) or missing (ranks, tasks of srun). `busy`:
    that other programs kept the machine busy when it began, in words. `together`: what its ranks do to each other; None for one
    alone, where some are missing, and where the host does not wait for collectives. `restored`: files of earlier runs
    that were put back after `look` had ended the command; `left`: those that were not, since another program writes them too.
    `together_by`: what started the tasks or nodes that recorded together, srun or torchrun; empty for one alone.
    """

    command: tuple[str, ...]
    seconds: float | None
    exit_code: int | None
    ranks: tuple[Rank, ...]
    seen: str = ""
    busy: str = ""
    together: Together | None = None
    restored: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    together_by: str = ""

    @property
    def proved_by(self) -> list[str]:
        """The words of the command that tries interventions on this training."""
        diagnose = ["trainpace", "diagnose", "--", *self.command]
        if self.together_by == "torchrun":  # on each node
            return [*diagnose[:2], "--output", "FOLDER", *diagnose[2:]]
        return [self.together_by, *diagnose] if self.together_by else diagnose


def read_recording(folder: Path) -> Recording:
    """Read the folder that `watch` wrote, also for a command that was killed.

    Raises UnreadableInput for a folder without a recording.
    """
    if not (folder / COMMAND_FILE).is_file():
        raise UnreadableInput(
            f"{folder} holds no recording.", "Make one: trainpace watch -- python train.py"
        )
    try:
        about = read_json(folder / COMMAND_FILE)
        ended = msgspec.convert(about, _Ended)
    except msgspec.ValidationError:
        raise UnreadableInput(
            f"{folder / COMMAND_FILE} is damaged.", "Record the command again."
        ) from None
    logs = [(log, list(records_of(log.path))) for log in process_logs(folder)]
    found: list[tuple[Rank, list[Any]]] = []
    for log, records in logs:
        if sum(isinstance(r, Step) for r in records) > 1:
            with readable(log.path):
                workers = [list(fetches_of(path)) for path, _ in log.workers]
                found.append((_undamaged(rank_of(log.header, records, workers)), records))
    ranks = [rank for rank, _ in found]
    by_rank = {
        rank.rank: (rank, records)
        for rank, records in sorted(found, key=lambda pair: pair[0].steps)
    }
    longest = {
        n: replace(rank, beside=_beside(rank, records, found))
        for n, (rank, records) in by_rank.items()
    }
    seen = _left_out(ranks, set(longest)) if ranks else _seen([records for _, records in logs])
    # a task that failed is why there are no ranks
    seen = " ".join(filter(None, (seen, ended.unended) if ranks else (ended.unended, seen)))
    return Recording(
        command=ended.command,
        seconds=ended.seconds,
        exit_code=ended.exit_code,
        ranks=tuple(r for _, r in sorted(longest.items())),
        seen=seen,
        busy=ended.busy,
        restored=ended.restored,
        left=ended.left,
        together_by=ended.together_by,
        together=_together(
            folder, longest, {n: records for n, (_, records) in by_rank.items()}, _wall_ms(logs)
        ),
    )


def _beside(rank: Rank, records: Sequence[Any], found: Sequence[tuple[Rank, Sequence[Any]]]) -> int:
    """How many other processes trained as the same rank on the same host at the same time."""

    def span(of: Sequence[Any]) -> tuple[int, int]:
        steps = [r for r in of if isinstance(r, Step)]
        return steps[0].start_ns, steps[-1].end_ns

    begin, end = span(records)
    others = [
        span(r)
        for other, r in found
        if r is not records and (other.rank, other.host) == (rank.rank, rank.host)
    ]
    return sum(first < end and last > begin for first, last in others)


def _together(
    folder: Path,
    ranks: Mapping[int, Rank],
    records: Mapping[int, Sequence[Any]],
    wall_ms: Mapping[str, float],
) -> Together | None:
    """`wall_ms`: by host, what the time of day is ahead of the clock of its trails."""
    if not 1 < len(ranks) == max(r.world_size for r in ranks.values()):
        return None
    nodes = {number: rank.host for number, rank in ranks.items()}
    with readable(folder):
        found = together(
            {r: rank_steps(each) for r, each in records.items()}, nodes, link_rates(records, nodes)
        )
    if found is None:
        return None
    first = wall_ms.get(nodes[min(nodes)], 0.0)
    return replace(
        found,
        clocks=tuple(
            replace(c, wall_ms=c.offset_ms + wall_ms.get(c.node, first) - first)
            for c in found.clocks
        ),
    )


def _wall_ms(logs: Sequence[tuple[ProcessLog, Any]]) -> dict[str, float]:
    return {
        log.header["host"]: float(log.header.get("clock_to_wall_ns", 0)) / 1e6 for log, _ in logs
    }


def _undamaged(rank: Rank) -> Rank:
    """The same. Raises for fields of other types than the record's, and for numbers that no recorder writes."""
    plain = msgspec.to_builtins(rank)
    msgspec.convert(plain, Rank)
    if (
        not _finite(plain)
        or rank.step_ms <= 0
        or rank.world_size < 1
        or rank.micro_steps < 0
        or rank.samples_per_step < 0
    ):
        raise ValueError("it is damaged")
    return rank


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return abs(value) < LARGEST
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return all(map(_finite, items))


def _left_out(ranks: Sequence[Rank], found: set[int]) -> str:
    """What a recording with ranks lacks."""
    again, world = len(ranks) - len(found), max(r.world_size for r in ranks)
    absent = sorted(set(range(world)) - found)
    who = f"{again} more processes" if again > 1 else "1 more process"
    also = (
        f"{who} trained with the same rank, or with none, for no more steps; those steps are not"
        " counted."
    )
    which = (
        f"{'ranks' if len(absent) > 1 else 'rank'}"
        f" {', '.join(map(str, absent[:8]))}{', ...' if len(absent) > 8 else ''}"
    )
    lacks = f"{which} of {world} left no training step here."
    return " ".join([also] * bool(again) + [lacks] * bool(absent))


def _seen(processes: Sequence[Sequence[Any]]) -> str:
    """What a command that trained no steps did instead; `processes` holds the records of each."""
    if not processes:
        return (
            "No Python process of this command imported torch. (A Python started with -I, -E or -S,"
            " or in a container or on another machine, is not seen.)"
        )
    records = [r for process in processes for r in process]
    spans = Counter(r.part for r in records if isinstance(r, Span))
    steps = sum(isinstance(r, Step) for r in records)
    counts = (
        (spans[DATA], "batch", "es"),
        (spans[FORWARD], "model call", "s"),
        (steps, "optimizer step", "s"),
    )
    what = [
        f"{count} {name}{'' if count == 1 else plural}" for count, name, plural in counts if count
    ]
    many = f"{len(processes)} process{'es' if len(processes) > 1 else ''} imported torch"
    of_two = ", where a recording needs two steps" if steps else ""
    return (
        f"{many}; seen:"
        f" {', '.join(what) or 'no batch of a DataLoader, no model call, no optimizer step'}{of_two}."
    )

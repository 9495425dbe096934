"""Read a folder of event logs as one recording: the command and its ranks."""

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
from trainpace.watch.event_logs import ProcessLog, process_logs, readable, records_of
from trainpace.watch.inside.event_log import DATA, FORWARD, Span, Step
from trainpace.watch.ranks import Rank, rank_of
from trainpace.watch.stragglers import Together, link_rates, rank_steps, together
from trainpace.workload import LARGEST

STEP_IN_WORDS = (
    "A step is an update of the parameters by a torch optimizer, by an engine, or by the script's"
    " own code."
)


class _Ended(msgspec.Struct):
    """Content of the file `COMMAND_FILE`."""

    command: tuple[str, ...]
    seconds: float | None
    exit_code: int | None
    unended: str = ""
    together_by: str = ""
    busy: str = ""
    restored: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class Recording(Record):
    """A watched command, how it ended, and its ranks.

    Attributes:
        seen: Without ranks: the events that were recorded instead. With ranks: the ranks or tasks
            that are missing, and the processes that are not counted. Of several processes with the
            same rank, only the one with the most steps counts.
        busy: Sentence on other programs that kept the machine busy when the recording began.
        together: Effects of the ranks on each other. None for a single rank, if ranks are missing,
            or if the host does not wait for collectives.
        restored: Files of earlier runs that were put back after `look` had ended the command.
        left: Files that were not put back, because another program writes them too.
        together_by: Launcher of the tasks or nodes that recorded together: "srun" or "torchrun".
            Empty for a single task.
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
        """Words of the command that tests interventions on this training."""
        diagnose = ["trainpace", "diagnose", "--", *self.command]
        # torchrun is started on each node, and all nodes need the same folder.
        if self.together_by == "torchrun":
            return [*diagnose[:2], "--output", "FOLDER", *diagnose[2:]]
        return [self.together_by, *diagnose] if self.together_by else diagnose


def read_recording(folder: Path) -> Recording:
    """Read the folder that `watch` wrote. The command may have been killed.

    Raises:
        UnreadableInput: The folder holds no recording, or it is damaged.
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
    found = [(_rank(log, records), records) for log, records in logs if _trains(records)]
    found.sort(key=lambda pair: pair[0].steps)
    records_of_rank = {rank.rank: records for rank, records in found}
    ranks = {rank.rank: rank for rank, _ in found}
    for number, rank in ranks.items():
        ranks[number] = replace(rank, beside=_beside(rank, records_of_rank[number], found))
    fields = msgspec.structs.asdict(ended)
    unended = fields.pop("unended")
    if found:
        notes = (_missing([rank for rank, _ in found], set(ranks)), unended)
    else:  # The failure of a task explains why no ranks were recorded.
        notes = (unended, _seen([records for _, records in logs]))
    return Recording(
        **fields,
        ranks=tuple(rank for _, rank in sorted(ranks.items())),
        seen=" ".join(filter(None, notes)),
        together=_together(folder, ranks, records_of_rank, _wall_ms(logs)),
    )


def _trains(records: Sequence[Any]) -> bool:
    return sum(isinstance(r, Step) for r in records) > 1


def _rank(log: ProcessLog, records: Sequence[Any]) -> Rank:
    with readable(log.path):
        workers = [list(records_of(path)) for path, _ in log.workers]
        return _undamaged(rank_of(log.header, records, workers))


def _beside(rank: Rank, records: Sequence[Any], found: Sequence[tuple[Rank, Sequence[Any]]]) -> int:
    """Return the number of other processes that trained as the same rank on this host meanwhile."""

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
    """Compare the ranks.

    Args:
        folder: Folder of the recording, for error messages.
        ranks: Ranks by number.
        records: Records of each rank's event log.
        wall_ms: By host, how far the time of day is ahead of the log's clock, in milliseconds.

    Returns:
        The comparison, or None if ranks are missing or cannot be compared.
    """
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
    """Raise if a field of a rank has a wrong type, or a value that no recorder writes."""
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
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_finite, value))


def _missing(ranks: Sequence[Rank], found: set[int]) -> str:
    """Describe which ranks a recording lacks, and which processes are not counted."""
    again, world = len(ranks) - len(found), max(r.world_size for r in ranks)
    sentences = []
    if again:
        who = f"{again} more processes" if again > 1 else "1 more process"
        sentences.append(
            f"{who} trained with the same rank, or with none, for no more steps. Those steps are"
            " not counted."
        )
    if absent := sorted(set(range(world)) - found):
        numbers = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        kind = "ranks" if len(absent) > 1 else "rank"
        sentences.append(f"{kind} {numbers} of {world} recorded no training step.")
    return " ".join(sentences)


def _seen(processes: Sequence[Sequence[Any]]) -> str:
    """Describe the events of a command without training steps, from the records of each process."""
    if not processes:
        return (
            "No Python process of this command imported torch. (Python processes started with -I,"
            " -E or -S, in a container or on another machine are not recorded.)"
        )
    records = [r for process in processes for r in process]
    spans = Counter(r.part for r in records if isinstance(r, Span))
    steps = sum(isinstance(r, Step) for r in records)
    what = (
        _count(spans[DATA], "batch", "batches"),
        _count(spans[FORWARD], "model call", "model calls"),
        _count(steps, "optimizer step", "optimizer steps"),
    )
    seen = ", ".join(filter(None, what)) or (
        "no batch of a DataLoader, no model call, no optimizer step"
    )
    who = _count(len(processes), "process", "processes")
    return f"{who} imported torch; seen: {seen}{'. A recording needs two steps' if steps else ''}."


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}" if count else ""

"""What ranks that train together do to each other, for the terminal: a row a rank, one a collective, clocks and links."""

from collections.abc import Iterator

from trainpace.diagnose import faults_in_words
from trainpace.report.phrases import number
from trainpace.report.screen import in_details
from trainpace.report.terminal import Column, print_lines, print_table, words
from trainpace.watch import Recording, Together


def print_among_ranks(recording: Recording) -> None:
    """Nothing for one rank alone, and where nobody could say."""
    found = recording.together
    if found is None:
        return
    print_lines(*faults_in_words(recording))
    with in_details("each rank's waiting and transfer, by collective"):
        print_table(_RANKS, [_rank(*row) for row in _rows(found)])
        print_table(_COLLECTIVES, [
            [c.name, number(c.per_step), number(c.exposed_ms), number(c.waiting_ms), number(c.transfer_ms)]
            for c in found.collectives
        ])  # fmt: skip
        print_lines(*_clocks_and_links(found))


_RANKS = (
    words("rank and node", least=12), Column("step ms"), Column("computing"), Column("data"), Column("host", 1),
    Column("waiting for the last"), Column("transfer"), Column("other exchange", 2), Column("input", 3),
)  # fmt: skip
_COLLECTIVES = (
    words("collective", least=10), Column("a step"), Column("exposed ms"), Column("waiting for the last"), Column("transfer"),
)  # fmt: skip


def _rows(found: Together) -> Iterator[tuple[str, tuple[float, ...]]]:
    for r in found.ranks:
        yield f"{r.rank} on {r.node}", (
            r.step_ms, r.compute_ms, r.data_ms, r.host_ms, r.waiting_ms, r.transfer_ms, r.undivided_ms, r.input_elements,
        )  # fmt: skip


def _rank(name: str, values: tuple[float, ...]) -> list[str]:
    return [name, *map(number, values)]


def _clocks_and_links(found: Together) -> Iterator[str]:
    for c in found.clocks:
        yield f"Clock of {c.node}: {number(c.offset_ms)} ms ahead of the first rank's node, within {number(c.uncertainty_ms)} ms."
    for link in found.links:
        yield (
            f"Link from {link.sender} to {link.receiver}: {number(link.mb_per_step)} MB a step, at {number(link.mbit_per_s)}"
            " Mbit/s while it sends."
        )

"""What ranks that train together do to each other, for the terminal: a row a rank, one a collective, clocks and links."""

from collections.abc import Iterator

from trainpace.diagnose import faults_in_words
from trainpace.report.charts import BarChart, BarGroup, bar
from trainpace.report.phrases import number
from trainpace.report.screen import in_details
from trainpace.report.terminal import Column, print_lines, print_table, words
from trainpace.watch import Recording, Together


def print_among_ranks(recording: Recording) -> None:
    """Who is behind, and each rank's step. Nothing for one rank alone, and where nobody could say."""
    if recording.together is not None:
        print_lines(*faults_in_words(recording))
        print_ranks(recording.together)


def print_ranks(found: Together) -> None:
    with in_details("each rank's waiting and transfer, by collective"):
        print_table(_RANKS, [_rank(*row) for row in _rows(found)])
        print_table(
            _COLLECTIVES,
            [
                [
                    c.name,
                    number(c.per_step),
                    number(c.exposed_ms),
                    number(c.waiting_ms),
                    number(c.transfer_ms),
                ]
                for c in found.collectives
            ],
        )
        print_lines(*_clocks_and_links(found))


def ranks_chart(found: Together | None) -> BarChart | None:
    """The mean step of each rank by what it does; where there are many, of those that wait least and are waited for."""
    if found is None:
        return None
    shown = sorted(
        sorted(found.ranks, key=lambda r: r.waiting_ms)[:MOST_BARS], key=lambda r: r.rank
    )
    least = min(found.ranks, key=lambda r: r.waiting_ms)
    bars = [
        bar(
            f"rank {r.rank} on {r.node}",
            f"{number(r.step_ms)} ms, {number(r.waiting_ms)} of them waiting",
            [(name, tone, getattr(r, field)) for field, name, tone in _PARTS],
        )
        for r in shown
    ]
    more = len(found.ranks) - len(shown)
    return BarChart(
        title="Each rank's step",
        label="mean step",
        unit="ms",
        groups=(BarGroup(bars=tuple(bars)),),
        finding=(
            f"Rank {least.rank} on {least.node} waits least for the others:"
            f" {number(least.waiting_ms)} ms of a step."
        ),
        note=(
            f"Over {found.steps} steps. A rank waits from its own arrival at a collective to that"
            " of the last one."
        )
        + (f" {more} ranks that wait longer are not drawn." if more else ""),
    )


MOST_BARS = 16
_PARTS = (
    ("compute_ms", "computing", "forward"),
    ("data_ms", "waiting for data", "data"),
    ("host_ms", "host", "host_overhead"),
    ("waiting_ms", "waiting for the last rank", "idle"),
    ("transfer_ms", "transfer", "communication"),
    ("undivided_ms", "other exchange", "muted"),
)
_RANKS = (
    words("rank and node", least=12),
    Column("step ms"),
    Column("computing"),
    Column("data"),
    Column("host", 1),
    Column("waiting for the last"),
    Column("transfer"),
    Column("other exchange", 2),
    Column("input", 3),
)
_COLLECTIVES = (
    words("collective", least=10),
    Column("a step"),
    Column("exposed ms"),
    Column("waiting for the last"),
    Column("transfer"),
)


def _rows(found: Together) -> Iterator[tuple[str, tuple[float, ...]]]:
    for r in found.ranks:
        yield (
            f"{r.rank} on {r.node}",
            (
                r.step_ms,
                r.compute_ms,
                r.data_ms,
                r.host_ms,
                r.waiting_ms,
                r.transfer_ms,
                r.undivided_ms,
                r.input_elements,
            ),
        )


def _rank(name: str, values: tuple[float, ...]) -> list[str]:
    return [name, *map(number, values)]


def _clocks_and_links(found: Together) -> Iterator[str]:
    for c in found.clocks:
        side = "ahead of" if c.wall_ms >= 0 else "behind"
        yield (
            f"The clock of {c.node} is {number(abs(c.wall_ms))} ms {side} that of the first rank's"
            f" node, give or take {number(c.uncertainty_ms)} ms."
        )
    for link in found.links:
        yield (
            f"Link from {link.sender} to {link.receiver}: {number(link.mb_per_step)} MB a step, at"
            f" {number(link.mbit_per_s)} Mbit/s while it sends."
        )

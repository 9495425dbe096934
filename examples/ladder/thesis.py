"""The table of the thesis that Trainpace grew from, by the renderer that `trainpace run` uses: 713
days to 33.

Its numbers, not ours: 32 models x 50 epochs x 10.7 h on one machine, and in total 3.63, 13.29 and
21.53 times as fast. The speed-up of a rung and the days follow from these. It states no spread,
memory, price or forecast, so there are no such columns.

    python examples/ladder/thesis.py
"""

from trainpace.report.run import LadderTable, markdown
from trainpace.run import LadderRow

EPOCH_MS = 10.7 * 3600 * 1e3
EPOCHS = 32 * 50
TOTALS = (
    ("baseline", 1.0),
    ("4 nodes (data parallelism)", 3.63),
    ("preprocessing offline", 13.29),
    ("ZeRO + fp16", 21.53),
)


def thesis_table() -> LadderTable:
    """Rung by rung, each over the one before."""
    rows, before = [], 1.0
    for title, total in TOTALS:
        epoch_ms = EPOCH_MS / total
        rows.append(
            LadderRow(
                title=title,
                measured_ms=epoch_ms,
                ratio=None if not rows else total / before,
                total=total,
                job_s=EPOCHS * epoch_ms / 1e3,
            )
        )
        before = total
    return LadderTable(
        title="The thesis' Table 1 (its numbers, not measured here)",
        what="an epoch",
        rows=tuple(rows),
    )


if __name__ == "__main__":
    print(markdown(thesis_table()), end="")

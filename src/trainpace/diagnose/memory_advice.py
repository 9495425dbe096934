"""Memory that a training on a CPU gives back to the system and asks for again in every step."""

from collections.abc import Iterator, Sequence

from trainpace.core.units import format_number
from trainpace.diagnose.changes import Advice
from trainpace.diagnose.shares import Split
from trainpace.watch import Rank

LEAST_SHARE = 0.03
"""Of a step, from which on page faults are worth a word. A judgement."""
VARIABLES: dict[str, int | str] = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647"}
"""Of glibc (mallopt(3)): no tensor has a mapping of its own, and the top of the heap is not given back below 2 GiB."""


def keep_memory(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """The page faults of a step, each as long as one takes that only writes to new pages. Faults of mapped files are counted too,
    and where threads share the work of clearing pages, less is saved. Of the GPT on characters it told 41 of 690 ms where 45 were
    saved (docs/log.md, 2026-11-26)."""
    rank, computing = ranks[0], split.by_cause["compute"] + split.by_cause["launch"]
    spent = rank.page_faults * rank.page_fault_ns / 1e6
    if rank.accelerator or spent < LEAST_SHARE * sum(split.by_cause.values()):
        return
    words = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    yield Advice(
        cause="compute",
        title="keep freed memory in the process",
        how=(
            f"A step has {rank.page_faults:,.0f} page faults,"
            f" {format_number(rank.page_fault_ns / 1e3)} us each: glibc gives the memory of large"
            " tensors back to the system when they are freed, and the system clears every page"
            f" before it hands it out again. Start the training with {words} in its environment, or"
            " with another allocator, such as jemalloc. The process then holds on to the most"
            " memory that it has needed."
        ),
        saves_ms=min(spent, computing),
        ceiling_ms=computing,
        basis="page faults of a step, and the time of one here",
        settings=dict(VARIABLES),
        at_most=True,
    )

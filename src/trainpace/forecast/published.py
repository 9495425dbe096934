"""The packaged measurements of others: one record a run, read once.

`public_runs.json.gz` is written by `python -m fitting public-journal` (fitting/public_journal.py), with what makes runs near beside them;
SOURCES.md in this folder names every source and its licence.
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from trainpace.core.intake import read_bytes
from trainpace.core.records import Record

FOLDER = Path(__file__).parent
RUNS_FILE, TRACES_FILE = FOLDER / "public_runs.json.gz", FOLDER / "traces.json.xz"


class PublicRun(Record):
    """One measured step of somebody else, with its source, and the forecast of this version under the same conditions.

    id: stable, of its source, its place there and its conditions. model: as the source calls it. model_kind: convolutions,
    transformers, experts, other. device: the catalogue's name. gpus: in all. micro_batch: 0 where the source states none. date:
    when it was measured or published, as far as the source tells. trust: A to C, docs/evidence.md says what each means.
    forecast_ms, low_ms, high_ms: under the same conditions, with the ends of the 90 % interval. in_fit: constants or an interval
    were fitted on it, so that its error says little. why_no_forecast: empty where there is one. collection: which of the
    collections in docs/evidence.md. assumed: what the forecast took for granted that the source leaves open.
    """

    id: str
    model: str
    model_kind: str
    device: str
    gpus: int
    nodes: int
    mode: str
    micro_batch: int
    accumulation: int
    sequence_length: int | None
    image_size: int | None
    precision: str
    compile: str
    optimizer: str | None
    parallelism: str | None
    software: str
    step_time_ms: float
    peak_memory_gib: float | None
    source: str
    url: str
    licence: str
    date: str | None
    trust: str
    notes: str
    forecast_ms: float | None
    low_ms: float | None
    high_ms: float | None
    in_fit: bool
    why_no_forecast: str
    global_batch: int = 0
    memory_format: str = ""
    collection: str = ""
    assumed: str = ""

    @property
    def samples_per_second(self) -> float | None:
        """Of all GPUs; None where the source states no batch."""
        return 1e3 * self.global_batch / self.step_time_ms if self.global_batch else None

    @property
    def error_pct(self) -> float | None:
        """(forecast - measured) / measured."""
        return (
            None if self.forecast_ms is None else 100 * (self.forecast_ms / self.step_time_ms - 1)
        )


class CardFigures(NamedTuple):
    """What makes cards near: the architecture, TFLOP/s in fp32 and in 16 bits, GB/s of memory."""

    architecture: str
    fp32_tflops: float
    half_tflops: float
    gb_per_s: float


class PublicJournal(Record):
    """All runs; fingerprint: of the constants that the forecasts were made with. signatures: of the traced workloads, as
    `signature_of` makes them. signature_of_run: for each run the place of its workload among them, -1 for none.
    """

    fingerprint: str
    runs: tuple[PublicRun, ...]
    signatures: tuple[tuple[float, ...], ...]
    signature_of_run: tuple[int, ...]
    cards: dict[str, CardFigures]


@cache
def public_journal() -> PublicJournal:
    """Everything that is packaged but the traces. Takes some 30 ms the first time."""
    return msgspec.json.decode(gzip.decompress(read_bytes(RUNS_FILE)), type=PublicJournal)


def public_runs() -> tuple[PublicRun, ...]:
    """Every packaged run, in the order of collections, models, cards and batches."""
    return public_journal().runs

"""The packaged measurements of others, one record per run.

fitting/public_journal.py writes `public_runs.json.gz`. SOURCES.md in this folder lists every source
and its license.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from trainpace.core.intake import read_bytes
from trainpace.core.records import Record

FOLDER = Path(__file__).parent
RUNS_FILE, TRACES_FILE = FOLDER / "public_runs.json.gz", FOLDER / "traces.json.xz"


class PublicRun(Record):
    """One step that somebody else measured, with its source and this version's forecast.

    id: stable; made of the source, the place there and the conditions. model: as the source calls
    it. model_kind: convolutions, transformers, experts or other. device: the catalogue's name.
    gpus: in all. micro_batch: 0 if the source gives none. date: of the measurement or publication,
    if known. trust: A to C, explained in docs/evidence.md. forecast_ms, low_ms, high_ms: forecast
    under the same conditions and its 90% interval. in_fit: constants or an interval were fitted on
    the run, so its error proves little. why_no_forecast: the reason, or empty. collection: one of
    those in docs/evidence.md. assumed: assumptions of the forecast.
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
        """Samples per second of all GPUs, None if the source gives no batch."""
        return 1e3 * self.global_batch / self.step_time_ms if self.global_batch else None

    @property
    def error_pct(self) -> float | None:
        """(forecast - measured) / measured in percent."""
        return (
            None if self.forecast_ms is None else 100 * (self.forecast_ms / self.step_time_ms - 1)
        )


class CardFigures(NamedTuple):
    """Figures that decide how near two cards are."""

    architecture: str
    fp32_tflops: float
    half_tflops: float
    gb_per_s: float


class PublicJournal(Record):
    """All runs, and the constants' fingerprint of their forecasts.

    signatures: of the traced workloads, by `signature_of`. signature_of_run: the position of each
    run's workload among them, -1 for none.
    """

    fingerprint: str
    runs: tuple[PublicRun, ...]
    signatures: tuple[tuple[float, ...], ...]
    signature_of_run: tuple[int, ...]
    cards: dict[str, CardFigures]


@cache
def public_journal() -> PublicJournal:
    """Read everything packaged except the traces. Takes about 30 ms the first time."""
    return msgspec.json.decode(gzip.decompress(read_bytes(RUNS_FILE)), type=PublicJournal)


def public_runs() -> tuple[PublicRun, ...]:
    """Return every packaged run, by collections, models, cards and batches."""
    return public_journal().runs


def fingerprint_of_constants() -> str:
    """Return 12 hex digits of the installed constants, intervals and kernel models."""
    digest = hashlib.sha256()
    for file in sorted(FOLDER.rglob("*.json")):
        digest.update(file.relative_to(FOLDER).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]

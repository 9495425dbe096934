"""Published measurements that ship with the package, one record per run.

fitting/public_journal.py writes `public_runs.json.gz`. SOURCES.md in this folder lists all sources
and their licenses.
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
    """One published step time, with its source and its forecast by this version.

    Attributes:
        id: Stable id, from the source, the place in the source and the conditions.
        model: Name of the model in the source.
        model_kind: "convolutions", "transformers", "experts" or "other".
        device: Name of the GPU in the catalog.
        gpus: Number of GPUs on all nodes.
        micro_batch: Micro-batch, or 0 if the source gives none.
        date: Date of the measurement or publication, if known.
        trust: Trust level A, B or C, explained in docs/evidence.md.
        forecast_ms: Forecast under the same conditions. low_ms and high_ms are its 90% interval.
        in_fit: True if constants or intervals were fitted on the run. Its error then proves little.
        why_no_forecast: Reason why there is no forecast, or "".
        collection: Name of the collection in docs/evidence.md.
        assumed: Assumptions of the forecast.
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
        """Samples per second on all GPUs, or None if the source gives no batch."""
        return 1e3 * self.global_batch / self.step_time_ms if self.global_batch else None

    @property
    def error_pct(self) -> float | None:
        """(forecast - measured) / measured in percent."""
        return (
            None if self.forecast_ms is None else 100 * (self.forecast_ms / self.step_time_ms - 1)
        )


class CardFigures(NamedTuple):
    """Figures of a card that determine its distance from other cards."""

    architecture: str
    fp32_tflops: float
    half_tflops: float
    gb_per_s: float


class PublicJournal(Record):
    """All published runs, with data to find similar ones.

    Attributes:
        fingerprint: Fingerprint of the constants with which the runs were forecast.
        runs: The runs.
        signatures: Signatures of the traced workloads (see `nearness.signature_of`).
        signature_of_run: Index in `signatures` of each run's workload, or -1.
        cards: Figures of the cards by name.
    """

    fingerprint: str
    runs: tuple[PublicRun, ...]
    signatures: tuple[tuple[float, ...], ...]
    signature_of_run: tuple[int, ...]
    cards: dict[str, CardFigures]


@cache
def public_journal() -> PublicJournal:
    """Read all published runs. This takes about 30 ms the first time."""
    return msgspec.json.decode(gzip.decompress(read_bytes(RUNS_FILE)), type=PublicJournal)


def public_runs() -> tuple[PublicRun, ...]:
    """Return all published runs, sorted by collection, model, card and batch."""
    return public_journal().runs


def fingerprint_of_constants() -> str:
    """Return a hash of the installed constants, intervals and kernel models, as 12 hex digits."""
    digest = hashlib.sha256()
    for file in sorted(FOLDER.rglob("*.json")):
        digest.update(file.relative_to(FOLDER).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]

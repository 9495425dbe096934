"""What a request says of packed rows: the documents that fill them, and the same documents in padded batches."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from trainpace.core.errors import Contradiction, UnreadableInput
from trainpace.core.outcome import Forecast, forecast_row
from trainpace.core.records import Record
from trainpace.verbs.request import ABOVE_0, EXISTING_FILE, Field, Misuse, within
from trainpace.verbs.training import ExecutedRequest
from trainpace.workload import Documents, nearest_multiple

PADDED_TO = 32
"""Padded lengths are forecast at the nearest multiple of it, so that few are traced."""
LENGTH_COLUMNS = (
    "length",
    "lengths",
    "tokens",
    "num_tokens",
    "n_tokens",
    "token_count",
    "input_ids",
)
COUNT_COLUMNS = ("count", "counts", "documents", "n")
MEAN_LENGTH = within("tokens", ABOVE_0, 1e9)


class PackingRequest(ExecutedRequest):
    packed: Annotated[
        bool,
        Field(
            "Several documents in a row of `sequence_length` tokens, with attention of variable"
            " length."
        ),
    ] = False
    lengths: Annotated[
        str | None,
        Field(
            "Token counts of the documents, with `packed`: a text of numbers, or a CSV or Parquet"
            " file with a column length (and count) or input_ids.",
            EXISTING_FILE,
            metavar="FILE",
        ),
    ] = None
    mean_length: Annotated[
        float | None,
        Field(
            "In place of `lengths`, their mean; they are then taken to be exponentially"
            " distributed.",
            MEAN_LENGTH,
        ),
    ] = None


class PaddedBatch(Record):
    """What about as many documents as one packed forecast has would take in a padded batch.

    documents: of a GPU's padded micro-batch. length: tokens to which all of them are padded. padding: share of the batch's
    tokens; packed_padding: of the packed rows'. packed_tokens, padded_tokens: of documents, in a GPU's micro-batch; they differ,
    as a padded batch holds whole documents. packed, padded: the forecasts.
    """

    documents: int
    length: int
    padding: float
    packed_padding: float
    packed_tokens: float
    padded_tokens: float
    packed: Forecast
    padded: Forecast

    @property
    def saved(self) -> float | None:
        """The share of a document token's time in padded batches that packing saves; below 0 where it costs time."""
        if self.packed.step is None or self.padded.step is None:
            return None
        packed_ms, padded_ms = (
            self.packed.step.total_ms / self.packed_tokens,
            self.padded.step.total_ms / self.padded_tokens,
        )
        return 1.0 - packed_ms / padded_ms

    @property
    def packed_rate(self) -> float | None:
        """Tokens of documents per second of all devices in packed rows."""
        return _document_rate(self.packed, self.packed_tokens)

    @property
    def padded_rate(self) -> float | None:
        """Tokens of documents per second of all devices in padded batches."""
        return _document_rate(self.padded, self.padded_tokens)

    def as_json(self) -> dict[str, Any]:
        """Return an entry of `padded` in `trainpace forecast --json`."""
        return {
            "documents": self.documents,
            "length": self.length,
            "padding": self.padding,
            "packed_padding": self.packed_padding,
            "packed_document_tokens": self.packed_tokens,
            "padded_document_tokens": self.padded_tokens,
            "saved": self.saved,
            "packed_document_tokens_per_second": self.packed_rate,
            "padded_document_tokens_per_second": self.padded_rate,
            "padded": forecast_row(self.padded),
        }


def _document_rate(forecast: Forecast, document_tokens: float) -> float | None:
    if forecast.step is None:
        return None
    e = forecast.execution
    return 1e3 * document_tokens * e.accumulation * e.data_parallel_size / forecast.step.total_ms


def documents_of(request: PackingRequest) -> Documents | None:
    """The documents that are packed; None where nothing is. Raises Misuse for what says too little or does nothing."""
    r = request
    if not r.packed:
        for name in ("lengths", "mean_length"):
            if getattr(r, name) is not None:
                raise Misuse(f"`{name}` does nothing without `packed`.")
        return None
    if not r.sequence_length:
        raise Misuse("`packed` needs `sequence_length`: how many tokens a row has.")
    if (r.lengths is None) == (r.mean_length is None):
        raise Misuse(
            "`packed` needs to know how long documents are: `lengths` FILE, or `mean_length`"
            " TOKENS, one of them."
        )
    if r.attention == "eager":
        raise Contradiction(
            "eager attention has no kernel for packed rows.",
            "Leave --attention out, or name flash2.",
        )
    if r.mean_length is not None:
        return Documents.with_mean(r.mean_length)
    assert r.lengths is not None, "one of the two is there"
    return Documents.of(_lengths_in(Path(r.lengths)), f"the lengths in {Path(r.lengths).name}")


def padded_batch(documents: Documents, row: int, batch: int) -> tuple[int, int]:
    """(documents, length): of the padded batch that holds about as many documents as `batch` packed rows."""
    n = max(1, round(batch * documents.packed(row).documents))
    return n, min(nearest_multiple(documents.longest_of(n, row), PADDED_TO), row)


def compared(documents: Documents, packed: Forecast, padded: Forecast) -> PaddedBatch:
    """The two forecasts beside each other."""
    row, length, n = packed.sequence_length, padded.sequence_length, padded.execution.micro_batch
    assert row is not None, "packed rows have a length"
    assert length is not None, "and so do padded batches"
    packed_row, padded_tokens = documents.packed(row), n * documents.mean_up_to(row)
    return PaddedBatch(
        documents=n,
        length=length,
        padding=max(0.0, 1.0 - padded_tokens / (n * length)),
        packed_padding=1.0 - packed_row.fill,
        packed_tokens=packed.execution.micro_batch * row * packed_row.fill,
        padded_tokens=padded_tokens,
        packed=packed,
        padded=padded,
    )


def _lengths_in(path: Path) -> Counter[int]:
    """The token counts in a file, each as often as it counts. Raises UnreadableInput for a file that has none."""
    from trainpace.forecast import read_table  # late, as most forecasts read no table

    columns, rows = read_table(path)
    names = [column.strip().casefold() for column in columns]
    at = next((names.index(name) for name in LENGTH_COLUMNS if name in names), None)
    counted = next((names.index(name) for name in COUNT_COLUMNS if name in names), None)
    found: Counter[int] = Counter()
    if at is None:  # a text of numbers has no heading: its first line is one of them
        if len(columns) > 1 or not columns or not _is_count(columns[0]):
            raise UnreadableInput(
                f"{path} has no column of token counts: {', '.join(columns[:8]) or 'it is empty'}.",
                f"Name it {', '.join(LENGTH_COLUMNS)}, or give one number a line.",
            )
        found[int(float(columns[0]))] += 1
        at = 0
    for number, row in enumerate(rows, 2):
        times = 1 if counted is None else _count(path, number, row.get(columns[counted]))
        found[_count(path, number, row.get(columns[at]))] += times
    if not any(length > 0 and times > 0 for length, times in found.items()):
        raise UnreadableInput(f"{path} holds no token count above 0.")
    return found


def _is_count(value: Any) -> bool:
    try:
        return 0 <= float(value) < 1e12 and float(value) == int(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _count(path: Path, row: int, value: Any) -> int:
    if isinstance(value, list):
        return len(value)
    if value is None:
        raise UnreadableInput(
            f"{path}, row {row}: a value is missing.", "Give every row a value for each column."
        )
    if not _is_count(value):
        raise UnreadableInput(f"{path}, row {row}: {str(value)[:40]!r} is not a count of tokens.")
    return int(float(value))

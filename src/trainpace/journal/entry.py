"""The records of the journal: a measured run, and the sweep that it may belong to."""

import datetime
import hashlib
import math
import re
import uuid
from collections.abc import Iterator
from typing import Any, Literal, get_args

import msgspec

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.outcome import FailedProbe, Interval, Measurement, StepTime
from trainpace.core.records import Record

Kind = Literal["measure", "watch", "run", "import"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Outcome = Literal["ok", "out_of_memory", "timeout", "crashed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
_ID = re.compile(r"[0-9a-f]{32}")
_LARGEST = 2**53
"""Larger whole numbers differ between readers of JSON."""


class Entry(Record):
    """One run. `created_at` is UTC in a form that sorts as text, ``2026-11-21T07:45:36.000000Z``.

    `step_time_ms` is the median step; `step` and `step_times_ms` are its parts and the single steps, where measured.
    `forecast_*` is the forecast for this very run, made before it was measured; `forecast_factor` is the correction
    that it already contains from earlier runs in the journal, and `forecast_shares` what the step is made of, by
    `forecast.intervals.PARTS` (empty where not kept). `workload_key` is equal for runs that compute the same.
    `source` names the file that an import came from, and `loss` the loss, where it is known.
    """

    id: str
    created_at: str
    kind: Kind
    outcome: Outcome
    model: str
    device: str
    execution: Execution
    reason: str = ""
    num_devices: int = 1
    sequence_length: int | None = None
    image_size: int | None = None
    mode: str = "train"
    step_time_ms: float | None = None
    interval_ms: Interval | None = None
    step: StepTime | None = None
    step_times_ms: tuple[float, ...] = ()
    warmup_ms: tuple[float, ...] = ()
    losses: tuple[float | None, ...] = ()
    peak_memory_gib: float | None = None
    reserved_memory_gib: float | None = None
    sweep: str | None = None
    forecast_ms: float | None = None
    forecast_low_ms: float | None = None
    forecast_high_ms: float | None = None
    forecast_factor: float = 1.0
    forecast_basis: str = ""
    forecast_shares: tuple[float, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    seed: int | None = None
    commit: str | None = None
    command: str = ""
    notes: str = ""
    source: str = ""
    workload_key: str | None = None
    loss: str | None = None

    def __post_init__(self) -> None:
        _check_head(self.id, self.created_at)
        if self.kind not in KINDS or self.outcome not in OUTCOMES:
            raise TrainpaceError(
                f"a run of kind {self.kind!r} with outcome {self.outcome!r} is not known."
            )
        if (self.outcome == "ok") != (self.step_time_ms is not None):
            raise TrainpaceError("a run has a step time if its outcome is ok, and only then.")
        if not 0 < self.forecast_factor < _LARGEST:
            raise TrainpaceError(
                f"a forecast is not corrected by a factor of {self.forecast_factor}."
            )
        _check_plain(self)

    @property
    def samples_per_second(self) -> float | None:
        """Throughput at the median step."""
        return 1e3 * self.execution.global_batch / self.step_time_ms if self.step_time_ms else None


class Sweep(Record):
    """Several batch sizes measured together. An unfinished sweep with the same `key` may be resumed."""

    id: str
    created_at: str
    key: str
    model: str
    device: str
    batches: tuple[int, ...]
    command: str = ""
    finished_at: str | None = None

    def __post_init__(self) -> None:
        _check_head(self.id, self.created_at)
        if self.finished_at is not None and not _TIME.fullmatch(self.finished_at):
            raise TrainpaceError(
                f"{self.finished_at!r} is not a time such as 2026-11-21T07:45:36.000000Z."
            )
        _check_plain(self)


def new_id() -> str:
    """A random id of 32 hexadecimal digits."""
    return uuid.uuid4().hex


def content_id(content: str | bytes) -> str:
    """The id of imported content: equal content has an equal id, so importing it twice adds nothing."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[
        :32
    ]


def now_utc() -> str:
    return utc_text(datetime.datetime.now(datetime.UTC))


def utc_text(moment: datetime.datetime) -> str:
    """A time in the form of `created_at`; UTC where it states no time zone."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    return (
        aware.astimezone(datetime.UTC)
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z")
        .rjust(27, "0")
    )


def entry_of(
    probe: Measurement | FailedProbe, *, keep_identity: bool = False, **rest: Any
) -> Entry:
    """The entry of a measurement or a failed probe; `rest` sets or overrides other fields of `Entry`.

    Without `keep_identity`, paths, user names and host names are removed (see `identity.anonymous`).
    """
    from trainpace.journal.identity import anonymous_entry

    fields: dict[str, Any] = {
        "id": new_id(),
        "created_at": now_utc(),
        "kind": "measure",
        "num_devices": probe.execution.world_size,
    }
    fields |= _shared(probe, Entry)
    if isinstance(probe, Measurement):
        losses = tuple(loss if math.isfinite(loss) else None for loss in probe.losses)
        fields |= {"outcome": "ok", "step_time_ms": probe.median_ms, "losses": losses}
    else:
        fields |= {"outcome": probe.failure, "reason": printable(probe.reason)}
    entry = Entry(**fields | rest)
    return entry if keep_identity else anonymous_entry(entry)


def probe_of(entry: Entry) -> Measurement | FailedProbe:
    """The measurement or failed probe that an entry was made from. Raises TrainpaceError for a run without parts."""
    if entry.outcome != "ok":
        return FailedProbe(**_shared(entry, FailedProbe), failure=entry.outcome)
    if entry.step_time_ms is None or entry.step is None or entry.interval_ms is None:
        raise TrainpaceError(
            f"run {entry.id[:8]} is not a complete measurement: its step time, parts or interval"
            " are missing."
        )
    losses = tuple(math.nan if loss is None else loss for loss in entry.losses)
    return Measurement(
        **_shared(entry, Measurement) | {"median_ms": entry.step_time_ms, "losses": losses}
    )


def _shared(record: Record, kind: type[Record]) -> dict[str, Any]:
    """The fields of a record that another kind of record has under the same names."""
    return {
        name: getattr(record, name)
        for name in record.__struct_fields__
        if name in kind.__struct_fields__
    }


def printable(text: str) -> str:
    """Text without control characters (as a crashed process may print) and lone surrogates, which no database stores."""
    clean = "".join(
        c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else " " for c in text
    )
    return clean.encode("utf-8", "replace").decode()


def is_text(text: str) -> bool:
    """Whether a database can store the text: no NUL, no lone surrogates (as in arguments that are not UTF-8)."""
    return "\x00" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def _check_head(id_: str, created_at: str) -> None:
    if not _ID.fullmatch(id_):
        raise TrainpaceError(f"{id_[:40]!r} is not an id of 32 hexadecimal digits.")
    if not _TIME.fullmatch(created_at):
        raise TrainpaceError(
            f"{created_at[:40]!r} is not a time such as 2026-11-21T07:45:36.000000Z."
        )


def _check_plain(record: Record) -> None:
    """Raises TrainpaceError for values that a database or JSON would change."""
    for name in record.__struct_fields__:
        for value in _leaves(msgspec.to_builtins(getattr(record, name))):
            if isinstance(value, float) and not (
                math.isfinite(value) and (value >= 0 or name == "losses")
            ):
                raise TrainpaceError(f"{name} of a run is {value}; it should be finite and from 0.")
            if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
                raise TrainpaceError(f"{name} of a run is beyond 2**53.")
            if isinstance(value, str) and not is_text(value):
                raise TrainpaceError(f"{name} of a run is {value[:40]!r}, which is not valid text.")


def _leaves(value: Any) -> Iterator[Any]:
    """The texts and numbers in nested dicts and lists."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value

"""Entries of the journal: measured runs, sweeps, and the removal of private names from both.

Journals are made to be shared. Paths are cut to their last component. Home folders, user names,
host names, addresses, secrets in commands and serial numbers of devices are removed. A folder with
a space in its name is only recognized inside quotes. Names of public models (``timm:resnet50``)
stay.
"""

import contextlib
import datetime
import functools
import getpass
import hashlib
import math
import os
import re
import socket
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.host import home_folder, user_folder
from trainpace.core.outcome import FailedProbe, Interval, Measurement, StepTime
from trainpace.core.records import Record

UNKNOWN = "unknown"
"""Value of a condition that the source does not state.

The condition is not guessed, because forecasts would use the guess.
"""
Kind = Literal["measure", "watch", "run", "import"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Outcome = Literal["ok", "out_of_memory", "timeout", "crashed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
_ID = re.compile(r"[0-9a-f]{32}")
_LARGEST = 2**53
"""Largest integer that every JSON reader parses exactly."""


class Entry(Record):
    """One measured run.

    Attributes:
        created_at: UTC time in a form that sorts as text: ``2026-11-21T07:45:36.000000Z``.
        step_time_ms: Median step time. `step` has its parts and `step_times_ms` has the single
            steps, if they were measured.
        forecast_ms: Forecast for this run with its interval, made before the measurement.
        forecast_factor: Correction in the forecast that came from earlier runs in the journal.
        forecast_shares: Parts of the forecast (`forecast.PARTS`). Empty if not stored.
        workload_key: Key that is equal for runs that compute the same.
        source: File that an import came from.
        loss: Name of the loss, if known.
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
            raise TrainpaceError(f"unknown kind {self.kind!r} or outcome {self.outcome!r}.")
        if (self.outcome == "ok") != (self.step_time_ms is not None):
            raise TrainpaceError(
                "a run has a step time if its outcome is ok; any other run has none."
            )
        if not 0 < self.forecast_factor < _LARGEST:
            raise TrainpaceError(f"the forecast factor {self.forecast_factor} is not above 0.")
        _check_plain(self)

    @property
    def samples_per_second(self) -> float | None:
        """Throughput at the median step time, or None if there is no step time."""
        return 1e3 * self.execution.global_batch / self.step_time_ms if self.step_time_ms else None


class Sweep(Record):
    """Several batch sizes that were measured together.

    An unfinished sweep with the same `key` can be resumed.
    """

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
        if self.finished_at is not None:
            _check_head(self.id, self.finished_at)
        _check_plain(self)


def new_id() -> str:
    """Return a random id of 32 hexadecimal digits."""
    return uuid.uuid4().hex


def content_id(content: str | bytes) -> str:
    """Return the id of imported content.

    Equal content has the same id, so a second import adds nothing.
    """
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[
        :32
    ]


def now_utc() -> str:
    """Return the current time in the form of `created_at`."""
    return utc_text(datetime.datetime.now(datetime.UTC))


def utc_text(moment: datetime.datetime) -> str:
    """Return a time in the form of `created_at`. A time without a zone counts as UTC."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    text = aware.astimezone(datetime.UTC).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z").rjust(27, "0")


def entry_of(
    probe: Measurement | FailedProbe, *, keep_identity: bool = False, **rest: Any
) -> Entry:
    """Return the entry of a measurement or of a failed probe.

    Args:
        probe: Measurement or failed probe.
        keep_identity: If True, keep paths, user names and host names (see `anonymous`).
        rest: Other fields of `Entry`.
    """
    fields: dict[str, Any] = {
        "id": new_id(),
        "created_at": now_utc(),
        "kind": "measure",
        "num_devices": probe.execution.world_size,
    }
    fields |= shared_fields(probe, Entry)
    if isinstance(probe, Measurement):
        losses = tuple(loss if math.isfinite(loss) else None for loss in probe.losses)
        fields |= {"outcome": "ok", "step_time_ms": probe.median_ms, "losses": losses}
    else:
        fields |= {"outcome": probe.failure, "reason": printable(probe.reason)}
    entry = Entry(**fields | rest)
    return entry if keep_identity else anonymous_entry(entry)


def probe_of(entry: Entry) -> Measurement | FailedProbe:
    """Return the measurement or failed probe that an entry was made from.

    Raises:
        TrainpaceError: If the run has no parts or no interval.
    """
    if entry.outcome != "ok":
        return FailedProbe(**shared_fields(entry, FailedProbe), failure=entry.outcome)
    if entry.step_time_ms is None or entry.step is None or entry.interval_ms is None:
        raise TrainpaceError(
            f"run {entry.id[:8]} is not a complete measurement: its step time, parts or interval"
            " are missing."
        )
    losses = tuple(math.nan if loss is None else loss for loss in entry.losses)
    return Measurement(
        **shared_fields(entry, Measurement) | {"median_ms": entry.step_time_ms, "losses": losses}
    )


def shared_fields(record: Record, kind: type[Record]) -> dict[str, Any]:
    """Return the fields of a record that another kind of record has under the same name."""
    return {
        name: getattr(record, name)
        for name in record.__struct_fields__
        if name in kind.__struct_fields__
    }


def printable(text: str) -> str:
    """Replace control characters and lone surrogates, which a crashed process may print."""
    clean = "".join(
        c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else " " for c in text
    )
    return clean.encode("utf-8", "replace").decode()


def is_text(text: str) -> bool:
    """Return True if a database can store the text. It cannot store NUL or lone surrogates."""
    return "\x00" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def _check_head(id_: str, created_at: str) -> None:
    if not _ID.fullmatch(id_):
        raise TrainpaceError(f"{id_[:40]!r} is not an id of 32 hexadecimal digits.")
    if not _TIME.fullmatch(created_at):
        text = f"{created_at[:40]!r} is not a time such as 2026-11-21T07:45:36.000000Z."
        raise TrainpaceError(text)


def _check_plain(record: Record) -> None:
    """Raise TrainpaceError if a database or JSON would change a value of the record."""
    for name in record.__struct_fields__:
        for value in _leaves(msgspec.to_builtins(getattr(record, name))):
            if problem := _problem_of(value, may_be_negative=name == "losses"):
                raise TrainpaceError(f"{name} of a run {problem}.")


def _problem_of(value: Any, may_be_negative: bool) -> str:
    if isinstance(value, str):
        return "" if is_text(value) else f"is {value[:40]!r}, which is not valid text"
    if isinstance(value, float):
        if not math.isfinite(value):
            return f"is {value}, which is not finite"
        return "" if value >= 0 or may_be_negative else f"is {value}, which is below 0"
    return "is beyond 2**53" if isinstance(value, int) and abs(value) > _LARGEST else ""


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the text and number values in nested dicts and lists."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


MEASURED_BY = "TRAINPACE_MEASURED_BY"
"""Environment variable that names who measured a run: a person, a group or a machine."""
LONGEST_NAME = 80
_NOBODY = {
    "root",
    "user",
    "users",
    "home",
    "host",
    "localhost",
    "admin",
    "ubuntu",
    "debian",
    "runner",
    "nobody",
    "me",
}
"""User and host names that identify nobody. Removing them would only garble sentences."""

ROUNDS = 10
_IDENTIFYING_KEYS = re.compile(
    r"(^|[_.\-])(host|hostname|nodename|node|nodelist|user|username|logname|login|home|cwd|pwd|path|dir|email|mail|ip|addr|address|mac"
    r"|serial|uuid|token|secret|password|passwd|key)s?$",
    re.IGNORECASE,
)
_SECRET = re.compile(
    r"(?<![\w-])(?P<name>[\w-]*(?:token|api[-_]?key|secret|passw(?:or)?d)[\w-]*)(?P<equals>\s*[=:]\s*|\s+)(?P<value>(?:\"[^\"]*\"|'[^']*')\S*|[^\s-]\S*)",
    re.IGNORECASE,
)
_HOST_OPTION = re.compile(
    r"(?P<name>(?<![\w-])--?[\w-]*(?:addr|address|endpoint|host|hostname|nodelist|server)|\b(?:MASTER_ADDR|HOSTNAME))"
    r"(?P<equals>=|\s+)(?P<value>[^\s-]\S*)",
    re.IGNORECASE,
)
_URL = re.compile(r"(?<![a-z0-9+.\-])[a-z][a-z0-9+.\-]*://[^\s\"'<>]+", re.IGNORECASE)
_AT = re.compile(r"(?<![\w.+\-])[\w.+\-]+@[\w.\-]+")
_PRIVATE_IP = re.compile(
    r"(?<![\w.])(?:10|127|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}(?![\w.])|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?=:\d)"
)
_DEVICE_UUID = re.compile(
    r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE
)
_MAC = re.compile(r"\b[0-9a-f]{2}(?::[0-9a-f]{2}){5}\b", re.IGNORECASE)
# A home folder's name may contain spaces if another path separator follows it.
_SPACED_HOME = re.compile(
    r"(?i)(?:[a-z]:)?[\\/]+(?:users|home|documents and settings)[\\/]+"
    r"[^\\/\s\"':=,;]{1,60}(?: [^\\/\s\"':=,;\-][^\\/\s\"':=,;]{0,60}){0,2}(?=[\\/])"
)
_HOME_ITSELF = re.compile(
    r"(?i)(?:[a-z]:)?[\\/]+(?:users|home|documents and"
    r" settings)[\\/]+[^\\/\s\"':=,;]+[\\/]*(?![\w\\/.\-])"
)
_STOP = r"\s\"'`<>|;,=()\[\]{}"
_QUOTED = re.compile(
    r"(?P<quote>[\"'`])(?P<path>(?:[A-Za-z]:(?=[\\/])|~[\w.\-]*(?=/))?[\\/][^\"'`\n]*)(?P=quote)"
)
_ABSOLUTE = re.compile(
    rf"(?<![\w.~])(?:[A-Za-z]:(?=[\\/])|~[\w.\-]*(?=/)|\\(?=\\))?[\\/][^{_STOP}:]+"
)
_RELATIVE = re.compile(rf"(?<![^{_STOP}:])(?:[^{_STOP}:/\\]+[\\/])+[^{_STOP}:/\\]*")
_FILE_ENDING = re.compile(r"\.[A-Za-z]\w{0,7}$")
_PUBLIC_SPEC = re.compile(r"(?:timm|torchvision):[\w.\-]+")


def anonymous(text: str, names: Iterable[str] | None = None) -> str:
    """Return `text` without paths, names, addresses and secrets.

    `names` are the user and host names to remove. By default, they are this machine's. A second
    call does not change the text again.
    """
    patterns = _patterns(tuple(this_machines_names() if names is None else names))
    for _ in range(ROUNDS):  # A shortened path may reveal another path.
        before, text = text, _pass(text, patterns)
        if text == before:
            break
    return text


def _pass(text: str, names: tuple[re.Pattern[str], ...]) -> str:
    """Remove private parts of a text once."""
    text = _DEVICE_UUID.sub("GPU", text)
    text = _SECRET.sub(lambda m: f"{m['name']}{m['equals']}***", text)
    text = _HOST_OPTION.sub(lambda m: f"{m['name']}{m['equals']}host", text)
    text = _URL.sub(_short_url, text)
    text = _AT.sub("user", text)
    text = _MAC.sub("host", _PRIVATE_IP.sub("host", text))
    text = _SPACED_HOME.sub("/~", text)
    text = _HOME_ITSELF.sub("~", text)
    text = _QUOTED.sub(lambda m: f"{m['quote']}{_last_of(m['path'])}{m['quote']}", text)
    text = _ABSOLUTE.sub(lambda m: _last_of(m[0]), text)
    text = _RELATIVE.sub(lambda m: _last_of(m[0]) if _is_file_path(m[0]) else m[0], text)
    for pattern in names:
        text = pattern.sub("user", text)
    return text


def anonymous_entry(entry: Entry, names: Iterable[str] | None = None) -> Entry:
    """Return the entry with anonymized text and without identifying facts on the environment."""
    clean = functools.partial(anonymous, names=None if names is None else tuple(names))
    return replace(
        entry,
        model=entry.model if _PUBLIC_SPEC.fullmatch(entry.model) else clean(entry.model),
        loss=None if entry.loss is None else clean(entry.loss),
        **{
            name: clean(getattr(entry, name))
            for name in ("device", "reason", "command", "notes", "source")
        },
        environment={
            clean(key): clean(value)
            for key, value in entry.environment.items()
            if not _IDENTIFYING_KEYS.search(key)
        },
    )


def signed(entry: Entry, keep_identity: bool = False) -> Entry:
    """Return a run that says who measured it ($TRAINPACE_MEASURED_BY).

    With `keep_identity`, this machine's name is added. Shared runs have neither.
    """
    who = printable(os.environ.get(MEASURED_BY, "")).strip()[:LONGEST_NAME]
    said = {"measured_by": who} if who and is_text(who) else {}
    if keep_identity:
        said["hostname"] = socket.gethostname()
    return replace(entry, environment={**entry.environment, **said}) if said else entry


@functools.cache
def this_machines_names() -> tuple[str, ...]:
    """Return the user and host names of this machine, the longest first."""
    names = {
        os.environ.get(name, "")
        for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "HOSTNAME")
    }
    with contextlib.suppress(
        OSError, KeyError, ImportError
    ):  # A container's user may have no name.
        names.add(getpass.getuser())
    if (home := home_folder()) is not None:
        names.add(home.name)
    names.add(socket.gethostname())
    names |= {name.split(".")[0] for name in names}
    return tuple(
        sorted(
            (n for n in names if len(n) > 1 and n.casefold() not in _NOBODY), key=len, reverse=True
        )
    )


@functools.cache
def _patterns(names: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(
        re.compile(rf"(?<![A-Za-z0-9]){re.escape(n)}(?![A-Za-z0-9])", re.IGNORECASE)
        for n in names
        if n
    )


def _short_url(match: re.Match[str]) -> str:
    """Return the scheme and the last component of a URL, without host, query and password."""
    scheme, _, rest = match[0].partition("://")
    folder, slash, name = re.split(r"[?#]", rest)[0].rstrip("/").rpartition("/")
    is_person = "@" in name or re.search(r"(?i)(^|/)(home|users)$", folder)
    return f"{scheme}:{name}" if slash and name and not is_person else scheme


def _last_of(path: str) -> str:
    """Return the last component of a path, or ~ for a home folder."""
    parts = [part for part in re.split(r"[\\/]+", path) if part not in ("", ".", "..")]
    return "~" if not parts or parts[-1].startswith("~") else parts[-1]


def _is_file_path(text: str) -> bool:
    """Return True for a path, and False for a name like facebook/opt-125m, 3/4 or tokens/s."""
    return (
        text.startswith((".", "~"))
        or "\\" in text
        or len(re.findall(r"[\\/]", text)) > 1
        or bool(_FILE_ENDING.search(text))
    )


def default_place() -> str:
    """Return $TRAINPACE_JOURNAL, or journal.db in the user's data folder."""
    return os.environ.get("TRAINPACE_JOURNAL") or str(user_folder("data") / "journal.db")

"""Conversion of any answer to sections, and anonymous pages to share.

Answers of verbs have their own section builders. Any other record is shown generically: values with
the unit in their name, an interval next to its value, and rows as a table. Values that all rows
share are listed above the table.

A shared answer (`--share FILE.html`) is the same answer without private texts, as in shared runs
(`trainpace.journal.sharing`). `public` uses an allow-list. Numbers stay. A text stays only if
Trainpace knows it: a card or CPU of the catalogue, a public model, an optimizer, an offer of the
packaged price list, a word of a closed choice, or a library version.
"""

from __future__ import annotations

import datetime
import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import msgspec
import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import OPTIMIZERS, PRECISIONS, Checkpointing, Engine
from trainpace.core.hardware import Figure, catalogue, host_catalogue
from trainpace.core.outcome import STEP_PARTS, Interval, Provenance
from trainpace.core.units import format_number
from trainpace.diagnose import IN_WORDS, Status
from trainpace.forecast import Near, Nearness, RooflinePoint
from trainpace.journal import OWN_MODEL, SHARED_LIBRARIES, public_name
from trainpace.offers import Closest, Match, snapshot
from trainpace.plan import Plan, Problem
from trainpace.report.match import match_page_json
from trainpace.report.pages import page, rendered
from trainpace.report.phrases import given, sentence
from trainpace.report.sections import (
    Headline,
    Lines,
    Next,
    Notes,
    Section,
    Table,
    Verbatim,
    named,
    say,
    words,
)
from trainpace.report.streams import visible
from trainpace.verbs.forecast import Sweep
from trainpace.verbs.match import Matches
from trainpace.verbs.plan import Planned
from trainpace.verbs.request import Rows
from trainpace.watch import PARTS
from trainpace.workload import Workload

_BUILDERS = {
    "Answer": "match.schedule_sections",
    "Comparison": "journal.comparison_sections",
    "Diagnosis": "diagnosis.diagnosis_sections",
    "Equivalence": "run.equivalence_sections",
    "Examination": "machine.examination_sections",
    "Forecasts": "forecast.forecast_sections",
    "LadderResult": "run.result_sections",
    "Looked": "watch.look_sections",
    "Matches": "match.match_sections",
    "MeasuredSweep": "measurement.sweep_sections",
    "Planned": "plan.plan_sections",
    "ProfiledTraining": "diagnosis.profiled_sections",
    "Recording": "watch.recording_sections",
}
"""Module and function that build the sections of an answer, by the answer's type."""


def sections_of(answer: object) -> Iterator[Section]:
    """Return the sections of any answer, by its own builder or else generically."""
    kind = type(answer)
    builder = _BUILDERS.get(kind.__name__, "") if kind.__module__.startswith("trainpace.") else ""
    if not builder:
        return record_sections(answer)
    module, function = builder.split(".")
    sections: Iterator[Section] = getattr(
        importlib.import_module(f"trainpace.report.{module}"), function
    )(answer)
    return sections


DEEPEST = 4
MOST_ROWS, MOST_COLUMNS, MOST_FIELDS = 20, 10, 60
MOST_SECTIONS = 100
IN_NOTEBOOKS = (Headline, Lines, Notes, Table, Verbatim)
LONGEST_TEXT = 300
FEW = 8
"""Sequences of at most this many numbers are shown in full. Longer ones are summarized."""
UNITS = {
    "_usd_per_hour": "$/hour",
    "_usd_per_kwh": "$/kWh",
    "_gb_per_s": "GB/s",
    "_per_second": "",
    "_per_s": "",
    "_cpu_s": "",
    "_tflops": "TFLOP/s",
    "_mhz": "MHz",
    "_gib": "GiB",
    "_mib": "MiB",
    "_kib": "KiB",
    "_bytes": "bytes",
    "_usd": "$",
    "_pct": "%",
    "_ms": "ms",
    "_us": "µs",
    "_s": "s",
    "_nm": "nm",
    "_w": "W",
    "_bits": "bits",
}
FIRST: Mapping[str, Sequence[str]] = {
    "Match": (
        "offer.device",
        "offer.count",
        "nodes",
        "offer.provider",
        "hours",
        "usd",
        "offer.price_usd_per_hour",
        "offer.instance_type",
    ),
    "RungResult": ("title", "kept", "reason"),
}
"""Table columns for these record types. Their other fields are not shown."""


def record_sections(value: Any, depth: int = 0, heading: str = "") -> Iterator[Section]:
    """Show a record: its rows, then its plain fields, then its nested records."""
    if _is_sequence(value):
        yield from _table(value, heading)
        return
    fields = fields_of(value)
    if isinstance(value, Rows):
        # `to_dicts` can have fewer rows than `rows`: a sweep has several measurements per batch.
        yield from _table(value.to_dicts(), heading)
        fields.pop("rows", None)
    plain = {name: v for name, v in fields.items() if _is_plain(v)}
    shown = [(_named(name), text) for name, cell in _merged(plain).items() if (text := _cell(cell))]
    yield named("", shown[:MOST_FIELDS], aside=heading)
    inside = [name for name in fields if name not in plain and _has_content(fields[name])]
    for name in inside[: MOST_FIELDS * (depth < DEEPEST)]:
        place = ", ".join(filter(None, (heading, _named(name))))
        yield from record_sections(fields[name], depth + 1, place)


def _table(values: Sequence[Any], heading: str) -> Iterator[Section]:
    """Show the differences between rows as columns. Common values are listed above the table."""
    shown = _columns(values[:MOST_ROWS])
    same = [name for name, cells in shown.items() if len(cells) > 1 and len(set(cells)) == 1]
    common = "; ".join(f"{_named(name)} {shown[name][0]}" for name in same[:MOST_COLUMNS])
    yield replace(say(given(common, "All: {}")), aside=heading)
    columns = [name for name in shown if name not in same][:MOST_COLUMNS]
    cells = list(zip(*(shown[name] for name in columns), strict=True))
    yield Table([words(_named(name)) for name in columns], cells, aside=heading)
    if len(values) > MOST_ROWS:
        yield Lines([f"{MOST_ROWS} of {len(values):,} are shown."], aside=heading)


def _columns(values: Sequence[Any]) -> dict[str, list[str]]:
    """Return the cells of each column that is not empty."""
    rows = [_merged(row_of(value)) for value in values]
    names = dict.fromkeys(name for row in rows for name in row)
    texts = {name: [_cell(row.get(name)) for row in rows] for name in names}
    return {name: cells for name, cells in texts.items() if any(cells)}


def fields_of(value: object) -> dict[str, Any]:
    """Return the fields of a record, a named tuple or a mapping.

    Omits fields that have their default value.
    """
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in value.items()}
    if isinstance(value, msgspec.Struct):
        names, defaults = value.__struct_fields__, value.__struct_defaults__
        usual = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        values = {name: getattr(value, name) for name in names}
        return {name: own for name, own in values.items() if own is not usual.get(name)}
    return value._asdict() if isinstance(value, tuple) and hasattr(value, "_asdict") else {}


def _is_sequence(value: object) -> bool:
    return isinstance(value, tuple | list) and not hasattr(value, "_fields")


def row_of(value: object) -> dict[str, Any]:
    """Return a record's plain fields, and those of its nested records as "name.field"."""
    fields = fields_of(value)
    if not fields:
        return {"": value}
    flat = {}
    for name, inner in fields.items():
        if _is_plain(inner):
            flat[name] = inner
        elif not isinstance(inner, Mapping):
            flat |= {f"{name}.{n}": v for n, v in fields_of(inner).items() if _is_plain(v)}
    leading = FIRST.get(type(value).__name__, flat)
    return {name: flat[name] for name in leading if name in flat}


def _merged(row: Mapping[str, Any]) -> dict[str, Any]:
    """Combine NAME, NAME_low and NAME_high into one text; likewise job_s and job_low_s."""
    done = dict(row)
    for low in [name for name in row if "_low" in name]:
        name, high = low.replace("_low", "", 1), low.replace("_low", "_high", 1)
        ends = [row.get(end) for end in (name, low, high)]
        if all(isinstance(end, int | float) for end in ends):
            done[name] = f"{_number(ends[0])} ({_number(ends[1])} to {_number(ends[2])})"
            del done[low], done[high]
    return done


def _is_plain(value: Any) -> bool:
    if _is_sequence(value):
        return all(isinstance(v, str | int | float) for v in value)
    return isinstance(value, Interval | Figure | str | int | float | None)


def _has_content(value: Any) -> bool:
    """Return True for records, mappings and sequences of records. Arrays are not shown."""
    return any(map(fields_of, value)) if _is_sequence(value) else bool(fields_of(value))


def _cell(value: Any) -> str:
    match value:
        case Figure():
            return _number(value.value)
        case Interval():
            return f"{_number(value.low)} to {_number(value.high)}"
        case bool():
            return "yes" if value else "no"
        case str():
            return value if len(value) <= LONGEST_TEXT else f"{value[: LONGEST_TEXT - 3]}..."
        case int() | float():
            return _number(value)
        case list() | tuple():
            return _list_cell(value)
    return ""


def _list_cell(values: Sequence[Any]) -> str:
    if len(values) > FEW and not any(isinstance(v, str) for v in values):
        return f"{len(values):,} values, {_number(min(values))} to {_number(max(values))}"
    return ", ".join(map(_cell, values[:MOST_ROWS]))


def _number(value: Any) -> str:
    return format_number(value) if math.isfinite(value) else str(value)


def _named(name: str) -> str:
    """Convert a field name to text: `step_time_ms` becomes "step time, ms"."""
    end = next((end for end in UNITS if name.endswith(end)), "")
    base, unit = (name.removesuffix(end), f", {UNITS[end]}") if UNITS.get(end) else (name, "")
    return base.replace("_", " ").replace(".", " ") + unit


def html_of(answer: object) -> str:
    """Return an answer as plain HTML for a notebook. Never raises.

    The HTML has no scripts, style sheets or links. All text is escaped.
    """
    try:
        name = type(answer).__name__
        if isinstance(answer, list) and answer:
            name = f"{type(answer[0]).__name__}s"
        title = sentence(re.sub(r"(?<=[a-z])([A-Z])", r" \1", name).lower())
        shown = [
            s
            for s in sections_of(answer)
            if isinstance(s, IN_NOTEBOOKS) and s.only not in ("brief", "page") and s.size != 0
        ]
        more = len(shown) > MOST_SECTIONS
        return rendered("notebook.html", title=title, sections=shown[:MOST_SECTIONS], more=more)
    except Exception:  # Otherwise a notebook would print a stack trace in place of the answer.
        try:
            text = repr(answer)
        except Exception:
            text = f"a {type(answer).__name__}, which cannot be shown"
        return f"<pre>{escape(visible(text))}</pre>"


SHARED = (
    "This page holds numbers, settings, and names of public cards, processors, models and offers."
    " Paths, commands, notes and names of people, machines and scripts were removed. Look through"
    " it before you share it."
)
HIDDEN = "..."
"""Replacement for a private text."""
OWN_DEVICE = "own device"
RELEASE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){0,2}")
"""Library versions of at most three parts. A version of four parts could be an IP address."""
DATE = re.compile(r"\d{4}-\d\d-\d\d")
CHANGES = ("torch.compile", "channels-last")
"""Titles of changes that are only switched on and contain no value."""
CLOSED = ("bound", "kind", "mechanism", "phase", "shape", "unit")
"""Fields that contain only Trainpace's own words."""


def shared_page(answer: object, title: str) -> str:
    """Return the HTML page to share for any answer. `title` must not contain private text."""
    shown = public(answer)
    # Next commands may contain file names.
    sections = (part for part in sections_of(shown) if not isinstance(part, Next))
    if isinstance(shown, Matches):
        data = match_page_json(shown, datetime.date.today())
    elif hasattr(shown, "as_json"):
        data = shown.as_json()
    else:
        data = msgspec.to_builtins(shown, enc_hook=lambda _: None, str_keys=True)
    return page(title, [Lines([SHARED]), *sections], data)


def public(value: Any, name: str = "") -> Any:
    """Return a copy of a value without private texts. `name` is the name of its field."""
    match value:
        case bool() | int() | float() | None:
            return value
        case str():
            return _public_text(value, name)
        case msgspec.Struct():
            return _public_record(value)
        case Mapping():
            return _public_mapping(value)
        case tuple() if hasattr(value, "_fields"):
            return _public_named_tuple(value)
        case np.ndarray() if value.dtype.kind in "biuf":
            return value
        case list() | tuple():
            every = [public(inner, name) for inner in value]
            if all(isinstance(inner, str) for inner in value):  # Other tuples keep their positions.
                every = [text for text in every if text is not HIDDEN]
            return type(value)(every)
    return None


def _public_record(record: msgspec.Struct) -> Any:
    match record:
        case Interval() | Near():  # Nearby runs come from the public journal.
            return record
        case Nearness() if record.device not in _known_words():
            # The differences contain the name of the card.
            return replace(record, model=OWN_MODEL, device=OWN_DEVICE, runs=(), closest=None)
        case Figure():
            return replace(record, source="")
        case Workload():  # Operators contain module names.
            return None
        case Matches():
            return replace(_public_fields(record), workload=_public_workload(record.workload))
        case Planned() if record.setting.cluster.device.name in _known_words():
            # The sentences of a plan contain no names except those of the device and settings.
            return replace(_public_fields(record), plan=_public_plan(record.plan))
    return _public_fields(record)


def _public_plan(plan: Plan) -> Plan:
    """Remove the model's name, and the names of files from the reasons of alternatives."""
    own = "not compared"
    rejected = (
        replace(entry, why=own) if entry.why.startswith(f"{own}: ") else entry
        for entry in plan.rejected
    )
    model = _public_text(plan.model, "model")
    return replace(plan, model=model, rejected=tuple(rejected), corrected="")


def _public_text(text: str, name: str) -> str:
    known = all(part in _known_words() for part in text.split(" instead of "))
    if known or not text or DATE.fullmatch(text) or name in CLOSED:
        return text
    model = public_name(text)
    role = text.partition(" of ")[0]  # The role may be "convolutions of MODULE".
    own = {"device": OWN_DEVICE, "gpu": OWN_DEVICE, "role": role, "name": model or HIDDEN}
    own |= dict.fromkeys(("model", "model_name"), model or OWN_MODEL)
    return own.get(name, HIDDEN)


def _public_fields(record: msgspec.Struct) -> Any:
    closed = _closed_fields(type(record))
    fields = {
        name: value if value in closed.get(name, ()) else public(value, name)
        for name, value in msgspec.structs.asdict(record).items()
    }
    try:
        return replace(record, **fields)
    except TrainpaceError:  # The record's own checks fail, and it means nothing without its names.
        return None


@cache
def _closed_fields(kind: type) -> dict[str, tuple[str, ...]]:
    """Return the allowed words of each field with a closed choice."""
    try:
        fields = msgspec.structs.fields(kind)
    except NameError:  # Some types are imported only for type checkers.
        return {}
    return {
        field.name: tuple(word for word in _literals(field.type) if isinstance(word, str))
        for field in fields
    }


def _literals(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    for inner in get_args(hint):
        yield from _literals(inner)


def _public_mapping(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Keep known keys, and the versions of shared libraries. Other text keys are dropped."""
    kept: dict[Any, Any] = {}
    for key, value in mapping.items():
        if key in SHARED_LIBRARIES and isinstance(value, str):
            version = value.partition("+")[0]
            kept |= {key: version} if RELEASE.fullmatch(version) else {}
        elif not isinstance(key, str) or key in _known_words():
            kept[key] = public(value, str(key))
    return {key: value for key, value in kept.items() if value != HIDDEN}


def _public_named_tuple(value: Any) -> Any:
    if isinstance(value, RooflinePoint):  # The name is "MODULE, kind, phase".
        return value._replace(name=", ".join(value.name.split(", ")[-2:]))
    if isinstance(value, Closest):
        # Reasons of other limits may contain the name of the model or of a card.
        named = value.binding != "memory" or value.choice.offer.device not in _known_words()
        reason = "" if named and not isinstance(value.choice, Match) else value.reason
        return value._replace(reason=reason, choice=public(value.choice))
    if isinstance(value, Problem):  # Charts need the problem. Pages do not show it.
        device = replace(value.cluster.device, name=public(value.cluster.device.name, "device"))
        cluster, workload = replace(value.cluster, device=device), _public_workload(value.workload)
        return value._replace(workload=workload, cluster=cluster, forecaster=None)
    fields = {name: public(inner, name) for name, inner in value._asdict().items()}
    if isinstance(value, Sweep):
        inside = value.forecaster
        fields["forecaster"] = SimpleNamespace(
            workload=_public_workload(inside.workload),
            target=inside.target,
            roofline=lambda execution: public(inside.roofline(execution)),
            fewer_devices=lambda execution: public(inside.fewer_devices(execution)),
        )
    return value._replace(**fields)


def _public_workload(workload: Workload) -> Workload:
    """Remove private texts. The operator tables stay: charts need them, and pages hide them."""
    length = workload.sequence_length
    return replace(
        workload,
        model=public_name(workload.model) or OWN_MODEL,
        sample=f"{length:,} tokens" if length else "samples of its own",
        optimizer=_public_text(workload.optimizer, ""),
        notes=(),
    )


@cache
def _known_words() -> frozenset[str]:
    """Return texts that identify nobody."""
    choices = (Checkpointing, Engine, Provenance, Status)
    known = {*PRECISIONS, *OPTIMIZERS, *STEP_PARTS, *IN_WORDS, *IN_WORDS.values(), *CHANGES, *PARTS}
    known |= {word for choice in choices for word in get_args(choice)}
    offers = {
        text
        for offer in snapshot()
        for text in (offer.provider, offer.instance_type, offer.region or "")
    }
    machines = {device.name for device in catalogue()} | {host.name for host in host_catalogue()}
    return frozenset(map(str, known | machines | offers)) - {""}

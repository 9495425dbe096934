"""Any record as a piece of HTML for a notebook: tables of plain elements, in whatever colours and fonts the notebook has.

What a record holds is shown as it is, without knowing its verb: values with the units of their names, ends of an interval beside
their middle, rows as a table in which what all rows have in common stands above, and what is nested folded up. All text is
escaped; there is no script, no style sheet and no link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from trainpace.core.hardware import Figure
from trainpace.core.outcome import Interval
from trainpace.core.units import format_number
from trainpace.report.streams import visible
from trainpace.verbs.request import Rows

DEEPEST = 4
MOST_ROWS, MOST_COLUMNS, MOST_FIELDS = 20, 10, 60
MOST_ELEMENTS = 3000
"""Cells and fields of one answer; a notebook keeps them all in its file."""
LONGEST_TEXT = 300
FEW = 8
"""Numbers that are shown one by one."""
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
"""Columns that lead a table of such records, and with it stand for the rest."""
Cell = Any


def html_of(value: object, titled: bool = True) -> str:
    """The value as HTML, under the name of its kind if `titled`. It never raises: what cannot be shown so is shown as `repr`
    shows it."""
    try:
        return "".join(_Writer().whole(value, titled))
    except Exception:  # a notebook would print a traceback in place of the answer
        try:
            text = repr(value)
        except Exception:
            text = f"a {type(value).__name__}, which cannot be shown"
        return f"<pre>{_text(text)}</pre>"


class _Writer:
    def __init__(self) -> None:
        self._left = MOST_ELEMENTS

    def whole(self, value: object, titled: bool) -> Iterator[str]:
        name = (
            f"{type(value[0]).__name__}s"
            if isinstance(value, list) and value
            else type(value).__name__
        )
        yield f"<div><p><strong>{_text(_words(name))}</strong></p>" if titled else "<div>"
        yield from self._list(value) if isinstance(value, list) else self._fields(value, 0)
        if self._left <= 0:
            yield "<p>More is left out; the record has it.</p>"
        yield "</div>"

    def _list(self, values: Sequence[object]) -> Iterator[str]:
        yield from self._table([row_of(v) for v in values[:MOST_ROWS]], len(values))

    def _fields(self, value: object, depth: int) -> Iterator[str]:
        """Rows first, then plain fields, then what is nested."""
        fields = fields_of(value)
        if isinstance(value, Rows):
            rows = value.to_dicts()  # a sweep's are fewer than its measurements
            yield from self._table(rows[:MOST_ROWS], len(rows))
            fields = {name: v for name, v in fields.items() if v is not value.rows}
        plain, nested = _merged({n: v for n, v in fields.items() if _is_plain(v)}), []
        for name, inner in fields.items():
            if not _is_plain(inner) and _has_something(inner):
                nested.append((name, inner))
        shown = [(name, cell) for name, cell in plain.items() if _cell(cell) != ""][:MOST_FIELDS]
        if shown and self._pay(len(shown)):
            cells = "".join(
                f"<tr><th>{_text(_named(name))}</th><td>{_cell(cell)}</td></tr>"
                for name, cell in shown
            )
            yield f"<table><tbody>{cells}</tbody></table>"
        for name, inner in nested[:MOST_FIELDS]:
            if depth < DEEPEST and self._pay(1):
                is_open = " open" if depth == 0 and name in OPEN else ""
                yield f"<details{is_open}><summary>{_text(_named(name))}</summary>"
                yield from self._nested(inner, depth + 1)
                yield "</details>"

    def _nested(self, value: Any, depth: int) -> Iterator[str]:
        if fields_of(value):
            yield from self._fields(value, depth)
        elif isinstance(value, Mapping):
            if all(_is_plain(v) for v in value.values()):
                yield from self._table(
                    [{"": k, "value": v} for k, v in list(value.items())[:MOST_ROWS]], len(value)
                )
            else:
                yield from self._fields({str(k): v for k, v in value.items()}, depth)
        else:
            yield from self._table([row_of(v) for v in value[:MOST_ROWS]], len(value))

    def _table(self, rows: Sequence[Mapping[str, Cell]], count: int) -> Iterator[str]:
        """What differs between rows as columns; what does not, above them."""
        merged = [_merged(row) for row in rows]
        names = list(dict.fromkeys(name for row in merged for name in row))
        texts = {name: [_cell(row.get(name)) for row in merged] for name in names}
        used = [name for name in names if any(texts[name])]
        same = [name for name in used if len(rows) > 1 and len(set(texts[name])) == 1]
        columns = [name for name in used if name not in same][:MOST_COLUMNS]
        if not self._pay(len(rows) * len(columns)):
            return
        if same:
            common = "; ".join(
                f"{_text(_named(name))} {texts[name][0]}" for name in same[:MOST_COLUMNS]
            )
            yield f"<p>All: {common}</p>"
        if columns:
            head = "".join(f"<th>{_text(_named(name))}</th>" for name in columns)
            body = "".join(
                f"<tr>{''.join(f'<td>{texts[n][i]}</td>' for n in columns)}</tr>"
                for i in range(len(rows))
            )
            yield f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        if count > len(rows):
            yield f"<p>{len(rows):,} of {count:,} are shown.</p>"

    def _pay(self, elements: int) -> bool:
        self._left -= elements
        return self._left > 0


OPEN = frozenset(
    "matches shares advice changes checks rungs ways ranks elsewhere time diagnosis measurement"
    " analysis overall".split()
)
"""Nested fields that stand open: the answer is in them."""


def fields_of(value: object) -> dict[str, Any]:
    """Fields of a record, a named tuple or a mapping by name, without those that are as usual; nothing of anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, msgspec.Struct):
        names, defaults = (
            value.__struct_fields__,
            value.__struct_defaults__,
        )  # these belong to the last names
        usual = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        values = {name: getattr(value, name) for name in names}
        return {name: own for name, own in values.items() if not _is_usual(own, usual.get(name))}
    return value._asdict() if isinstance(value, tuple) and hasattr(value, "_asdict") else {}


def _is_usual(value: object, default: object) -> bool:
    """Whether it says nothing that is not so in every such record."""
    return (
        isinstance(value, str | int | float | bool | None)
        and type(value) is type(default)
        and value == default
    )


def row_of(value: object) -> dict[str, Cell]:
    """A record's plain fields, then those of the records in it under its name; anything else as one value."""
    fields = fields_of(value)
    if not fields:
        return {"": value}
    flat = {name: v for name, v in fields.items() if _is_plain(v)}
    for name, inner in fields.items():
        if not _is_plain(inner) and not isinstance(inner, Mapping):
            flat |= {f"{name}.{n}": v for n, v in fields_of(inner).items() if _is_plain(v)}
    leading = FIRST.get(type(value).__name__)
    return {name: flat[name] for name in leading if name in flat} if leading else flat


def _merged(row: Mapping[str, Cell]) -> dict[str, Cell]:
    """With NAME_low and NAME_high put behind NAME, and job_low_s and job_high_s behind job_s."""
    done = dict(row)
    for low in [name for name in row if "_low" in name]:
        name, high = low.replace("_low", "", 1), low.replace("_low", "_high", 1)
        ends = (row[low], row.get(high))
        if name in row and all(isinstance(end, int | float) for end in ends):
            done[name] = (row[name], *ends)
            del done[low], done[high]
    return done


def _is_plain(value: object) -> bool:
    if isinstance(value, Interval | Figure | str | int | float | None):
        return True
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return all(isinstance(v, str | int | float) for v in value)
    return False


def _has_something(value: Any) -> bool:
    """Whether it is a record, a mapping or a row of records; arrays and other objects are for programs."""
    if fields_of(value):
        return True
    return isinstance(value, tuple | list) and len(value) > 0 and any(fields_of(v) for v in value)


def _cell(value: Cell) -> str:
    """As escaped text; empty for what says nothing."""
    value = value.value if isinstance(value, Figure) else value
    if value is None or value == "" or isinstance(value, Mapping) or not _is_plain(value):
        return ""
    if isinstance(value, Interval):
        return f"{_number(value.low)} to {_number(value.high)}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return _number(value)
    if (
        len(value) == 3
        and isinstance(value[0], int | float)
        and isinstance(value, tuple)
        and value[1] <= value[0] <= value[2]
    ):
        return f"{_number(value[0])} ({_number(value[1])} to {_number(value[2])})"
    return _several(value)


def _several(values: Iterable[str | int | float]) -> str:
    some = list(values)
    numbers = [v for v in some if not isinstance(v, str)]
    if len(numbers) == len(some) > FEW:
        return f"{len(some):,} values, {_number(min(numbers))} to {_number(max(numbers))}"
    return ", ".join(_text(v) if isinstance(v, str) else _number(v) for v in some[:MOST_ROWS])


def _number(value: float) -> str:
    return format_number(value) if math.isfinite(value) else escape(str(value))


def _text(text: str) -> str:
    short = text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."
    return escape(visible(short))


def _named(name: str) -> str:
    """`step_time_ms` as "step time, ms"."""
    end = next((end for end in UNITS if name.endswith(end)), "")
    base, unit = (name.removesuffix(end), f", {UNITS[end]}") if UNITS.get(end) else (name, "")
    return base.replace("_", " ").replace(".", " ") + unit


def _words(name: str) -> str:
    """`MeasuredSweep` as "Measured sweep"."""
    spaced = "".join(
        f" {c.lower()}" if c.isupper() and i and name[i - 1].islower() else c
        for i, c in enumerate(name)
    )
    return spaced[:1].upper() + spaced[1:]

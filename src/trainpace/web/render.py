"""Records as HTML: Jinja templates that escape everything, with figures in people's units."""

from __future__ import annotations

from typing import Any

import jinja2
from markupsafe import Markup

from trainpace.execution import PRECISIONS
from trainpace.journal import error_pct
from trainpace.records import Record
from trainpace.report.charts import BarChart, Chart
from trainpace.report.pages.figure import drawn
from trainpace.units import format_duration, format_number, format_usd
from trainpace.web.questions import exact, query_of

NONE = "–"


class Templates:
    """The packaged templates, compiled once."""

    def __init__(self) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.PackageLoader("trainpace.web"), autoescape=True, undefined=jinja2.StrictUndefined,
            trim_blocks=True, lstrip_blocks=True, auto_reload=False,
        )  # fmt: skip
        self._environment.filters.update(
            number=_number, duration=format_duration, usd=format_usd, when=_when, words=_words, figure=_figure, percent=_percent,
            exact=exact,
        )  # fmt: skip
        self._environment.globals.update(query_of=query_of, stated=_stated, precisions=PRECISIONS, error_pct=error_pct)

    def render(self, name: str, **values: Any) -> str:
        """The page as text."""
        return self._environment.get_template(name).render(**values)


def _number(value: float | None) -> str:
    return NONE if value is None else format_number(value)


def _percent(value: float | None, digits: int = 1, sign: bool = False) -> str:
    return NONE if value is None else f"{value:{'+' if sign else ''}.{digits}f} %"


def _when(text: str | None) -> str:
    return NONE if text is None else text[:16].replace("T", " ")


def _words(name: str) -> str:
    return name.removesuffix("_ms").removesuffix("_gib").replace("_", " ")


def _figure(chart: Chart | BarChart) -> Markup:
    # the renderers of the one-file reports escape every name themselves
    return Markup(drawn(chart))


def _stated(record: Record) -> list[tuple[str, Any]]:
    """Fields that differ from what they are by default."""
    plain = type(record)()
    return [(n, getattr(record, n)) for n in record.__struct_fields__ if getattr(record, n) != getattr(plain, n)]

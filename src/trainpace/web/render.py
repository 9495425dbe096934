"""Records as HTML: Jinja templates that escape everything, with figures in people's units."""

from typing import Any

from trainpace.execution import PRECISIONS
from trainpace.journal import error_pct
from trainpace.records import Record
from trainpace.report import NONE, environment, figure
from trainpace.web.questions import exact, query_of


class Templates:
    """The packaged templates, compiled once."""

    def __init__(self) -> None:
        self._environment = environment("trainpace.web")
        self._environment.filters.update(when=_when, words=_words, figure=figure, exact=exact)
        self._environment.globals.update(query_of=query_of, stated=_stated, precisions=PRECISIONS, error_pct=error_pct)

    def render(self, name: str, **values: Any) -> str:
        """The page as text."""
        return self._environment.get_template(name).render(**values)


def _when(text: str | None) -> str:
    return NONE if text is None else text[:16].replace("T", " ")


def _words(name: str) -> str:
    return name.removesuffix("_ms").removesuffix("_gib").replace("_", " ")


def _stated(record: Record) -> list[tuple[str, Any]]:
    """Fields that differ from what they are by default."""
    plain = type(record)()
    return [(n, getattr(record, n)) for n in record.__struct_fields__ if getattr(record, n) != getattr(plain, n)]

"""Records as HTML, by Jinja templates that escape everything, and the scripts and styles that pages load."""

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment

from trainpace.execution import PRECISIONS
from trainpace.journal import error_pct
from trainpace.records import Record
from trainpace.report import NONE, SCRIPTS, STYLES, asset, environment, figure
from trainpace.web.questions import exact, query_of


def render(name: str, **values: Any) -> str:
    return _environment().get_template(name).render(**values)


@cache
def _environment() -> Environment:
    made = environment("trainpace.web")
    made.filters.update(when=_when, words=_words, figure=figure, exact=exact)
    made.globals.update(query_of=query_of, stated=_stated, precisions=PRECISIONS, error_pct=error_pct)
    return made


def _when(text: str | None) -> str:
    return NONE if text is None else text[:16].replace("T", " ")


def _words(name: str) -> str:
    return name.removesuffix("_ms").removesuffix("_gib").replace("_", " ")


def _stated(record: Record) -> list[tuple[str, Any]]:
    """Fields that differ from what they are by default."""
    plain = type(record)()
    return [(n, getattr(record, n)) for n in record.__struct_fields__ if getattr(record, n) != getattr(plain, n)]


MEDIA_TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class File(NamedTuple):
    body: bytes
    media_type: str
    etag: str


def _file(name: str, text: str) -> File:
    body = text.encode()
    media_type = MEDIA_TYPES[name.rsplit(".", 1)[1]]
    return File(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


OWN = ("htmx.min.js", "serve.js", "serve.css", "icon.svg")
FILES: dict[str, File] = {
    **{name: _file(name, asset(name)) for name in (*SCRIPTS, *STYLES)},
    **{name: _file(name, (files("trainpace.web") / "static" / name).read_text("utf-8")) for name in OWN},
}
"""The files that are sent, read once from the package: a request chooses among these names and opens no file."""

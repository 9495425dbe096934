"""HTML rendering of records by Jinja templates that escape everything, and static files."""

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from starlette.responses import Response

from trainpace.core.execution import PRECISIONS
from trainpace.journal import error_pct
from trainpace.report import SCRIPTS, STYLES, asset, environment, figure, score_meaning, stated
from trainpace.web.pages import MODES
from trainpace.web.questions import exact, query_of


def render(name: str, **values: Any) -> str:
    return _environment().get_template(name).render(**values)


@cache
def _environment() -> Environment:
    made = environment("trainpace.web")
    made.filters.update(words=_words, figure=figure, exact=exact)
    made.globals.update(
        query_of=query_of, stated=stated, precisions=PRECISIONS, error_pct=error_pct
    )
    made.globals.update(modes=MODES, meaning=score_meaning())
    return made


def _words(name: str) -> str:
    return name.removesuffix("_ms").removesuffix("_gib").replace("_", " ")


MEDIA_TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


def _file(name: str, text: str) -> Response:
    return Response(
        text, headers={"cache-control": "no-cache"}, media_type=MEDIA_TYPES[name.rpartition(".")[2]]
    )


OWN = ("htmx.min.js", "serve.js", "serve.css", "icon.svg")
FILES = {
    **{name: _file(name, asset(name)) for name in (*SCRIPTS, *STYLES)},
    **{
        name: _file(name, (files("trainpace.web") / "static" / name).read_text("utf-8"))
        for name in OWN
    },
}
"""Static files by name, read once from the package. A request can only choose one of these names
and never opens a file.
"""

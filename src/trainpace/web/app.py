"""The web application: addresses and pages. A template or JSON renders each page's record."""

import contextlib
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, get_type_hints

import anyio.to_thread
import msgspec
from jinja2 import Environment
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.execution import PRECISIONS
from trainpace.core.hardware import Device, catalogue, find_device, host_catalogue
from trainpace.core.records import SCHEMA_VERSION, Record, to_jsonable
from trainpace.core.software import ATTENTIONS, COMMON_SOFTWARE
from trainpace.journal import Journal, JournalUnusable, error_pct
from trainpace.offers import Offer
from trainpace.report import SCRIPTS, STYLES, asset, environment, figure, score_meaning, stated
from trainpace.verbs.request import fields_of
from trainpace.web import pages, whatif
from trainpace.web.pages import MODES, BadQuestion, exact, query_of, read_question
from trainpace.web.whatif import (
    BUILT_IN,
    MOST_LISTED,
    Models,
    WhatIfAnswer,
    WhatIfRequest,
    page_of,
    price_of,
)

THREADS = 8
"""Maximum number of pages computed at the same time. Each may open its own journal connection."""


# The first match counts, so subclasses come first.
STATUSES: dict[type[TrainpaceError], int] = {
    UnknownName: 404,
    JournalUnusable: 503,
    BadQuestion: 400,
    TrainpaceError: 422,
}


class State(NamedTuple):
    journal: Journal
    models: Models
    devices: tuple[Device, ...]
    offers: tuple[Offer, ...]


class Page(NamedTuple):
    """A page: its path, the record type of its query, and the function that answers it."""

    path: str
    title: str
    question: type[Record]
    answer: Callable[[State, Any], Record]


def _whatif(state: State, request: WhatIfRequest) -> WhatIfAnswer:
    device = find_device(request.gpu, state.devices)
    request = replace(request, gpu=device.name)  # Use the catalogue's name.
    price = price_of(state.offers, device.name, request.gpus, request.nodes)
    return page_of(whatif.run(request, state.models.get(request.model), device, price))


def _of_journal(path: str, title: str, answer: Callable[[Journal, Any], Record]) -> Page:
    """Make a page from a function of (journal, query). Its type hints give the query's record."""
    question = get_type_hints(answer)["q"]
    return Page(path, title, question, lambda state, q: answer(state.journal, q))


def _of_public(path: str, title: str, answer: Callable[[Any], Record]) -> Page:
    """Make a page from a function of a query, for packaged data."""
    return Page(path, title, get_type_hints(answer)["q"], lambda state, q: answer(q))


PAGES = (
    _of_journal("/runs", "Runs", pages.runs_page),
    _of_journal("/run", "Run", pages.run_page),
    _of_journal("/compare", "Compare", pages.compare_page),
    _of_journal("/sweeps", "Sweeps", pages.sweeps_page),
    _of_journal("/sweep", "Sweep", pages.sweep_page),
    _of_journal("/score", "Forecast score", pages.score_page),
    _of_public("/public", "Public journal", pages.public_page),
    _of_public("/public_run", "Public run", pages.public_run_page),
    _of_public("/accuracy", "Accuracy", pages.accuracy_page),
    Page("/whatif", "What if", WhatIfRequest, _whatif),
)


def application(
    journal: Journal, models: Models, own_devices: tuple[Device, ...], offers: tuple[Offer, ...]
) -> Starlette:
    """Create the application for a journal, without access control."""
    devices = (*own_devices, *(d for d in catalogue() if d.kind == "gpu"))
    state = State(journal, models, devices, offers)
    routes = [
        Route("/", lambda request: RedirectResponse("/runs", 303)),
        *(Route(page.path, _html(page, state)) for page in PAGES),
        *(Route(f"{page.path}.json", _json(page, state)) for page in PAGES),
        Route("/static/{name}", _static),
    ]
    return Starlette(
        routes=routes, lifespan=_lifespan, exception_handlers={HTTPException: _not_found}
    )


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
    yield


def _html(page: Page, state: State) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        question = None
        try:
            question = read_question(page.question, request.url.query)
            answer = page.answer(state, question)
            query = query_of(getattr(answer, "question", question))
            text = render(
                f"{page.path[1:]}.html",
                title=page.title,
                path=page.path,
                page=answer,
                asked=query,
                **_choices(page, state),
            )
        except Exception as error:
            status, message, hint = _explained(error)
            return _error(status, message, hint, page.title, page.path)
        address = page.path + (f"?{query}" if query else "")
        return Response(text, media_type="text/html", headers={"hx-replace-url": address})

    return endpoint


def _choices(page: Page, state: State) -> dict[str, Any]:
    if page.question is not WhatIfRequest:
        return {}
    names = sorted({d.name for d in state.devices})
    saved = [name for name in state.models.saved() if name not in BUILT_IN][:MOST_LISTED]
    hosts = sorted(cpu.name for cpu in host_catalogue())
    more = {"hosts": hosts, "softwares": COMMON_SOFTWARE, "attentions": ATTENTIONS}
    return {"models": (BUILT_IN, saved), "gpus": names, "fields": fields_of(WhatIfRequest), **more}


def _json(page: Page, state: State) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        try:
            status, answer = (
                200,
                to_jsonable(page.answer(state, read_question(page.question, request.url.query))),
            )
        except Exception as error:
            status, message, hint = _explained(error)
            answer = {
                "record": "Error",
                "schema_version": SCHEMA_VERSION,
                "status": status,
                "message": message,
                "hint": hint,
            }
        return Response(msgspec.json.encode(answer), status, media_type="application/json")

    return endpoint


def _explained(error: Exception) -> tuple[int, str, str]:
    """Return (status, message, hint) for an error."""
    for kind, status in STATUSES.items():
        if isinstance(error, kind):
            return status, error.message, error.hint
    traceback.print_exception(error, file=sys.stderr)
    return 500, "This page failed; the server's terminal shows the error.", "Please report it."


def _static(request: Request) -> Response:
    file = FILES.get(request.path_params["name"])
    if file is None:
        raise HTTPException(404)
    return file


def _error(
    status: int, message: str, hint: str = "", title: str = "Not here", path: str = ""
) -> Response:
    text = render("error.html", title=title, path=path, message=message, hint=hint, status=status)
    return Response(text, status, media_type="text/html")


def _not_found(request: Request, error: Exception) -> Response:
    return _error(
        error.status_code if isinstance(error, HTTPException) else 404, "There is no such page."
    )


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

"""An answer as a page that says nothing about whose it is: `--share FILE.html`.

As in runs that are shared (`trainpace.journal.sharing`), it is an allow-list: numbers and yes or no leave, and a text leaves only
where it is exactly a name that Trainpace knows already: a card or a CPU of the catalogue, a public model, an optimizer, an offer
of the packaged price list, a word of a closed choice, or the version of a library. Sentences stay, as any of them may quote a
path or a name; so do charts, whose labels are such texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, get_args

import msgspec
from markupsafe import Markup

from trainpace.core.execution import (
    OPTIMIZERS,
    PRECISIONS,
    Checkpointing,
    Engine,
    ExpertExchange,
    PipelineSchedule,
)
from trainpace.core.hardware import Figure, catalogue, host_catalogue
from trainpace.core.outcome import STEP_PARTS, Interval, Provenance
from trainpace.diagnose import IN_WORDS, Status
from trainpace.journal import OWN_MODEL, SHARED_LIBRARIES, public_name
from trainpace.offers import snapshot
from trainpace.plan import Effort, Risk
from trainpace.report.notebook import FIRST, fields_of, html_of, row_of
from trainpace.report.pages import page
from trainpace.report.sections import Drawing, Headline
from trainpace.verbs.request import Rows
from trainpace.workload import Mode

DEEPEST, MOST = 6, 200
SAID = (
    "This page holds numbers, settings, and names of public cards, processors, models and offers."
    " Paths, commands, notes and names of people, machines and scripts were left out. Look through"
    " it before you give it away."
)
REPEATED = ("sweeps", "evidence")
"""Beside rows: the same once more, and what others measured."""
RELEASE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){0,2}")
"""Of three parts at most: four may be an address."""
COMPILED = ("torch.compile", "channels-last")
"""Titles of changes without a value."""
MODEL_FIELDS = ("model", "name", "model_name")


def shared_page(answer: object, title: str) -> str:
    """The file, of any answer. `title`: what it is, in Trainpace's own words."""
    left = leaving(answer)
    tables = Markup(html_of(left, titled=False))
    sections = [Headline(SAID), Drawing(html=lambda: tables)]
    return page(title, sections, msgspec.to_builtins(left), shared=True)


def leaving(value: Any, depth: int = 0) -> Any:
    """What of a value may leave, as plain values; None where nothing does."""
    if isinstance(value, Figure):
        return value.value
    if isinstance(value, bool | int | float | Interval):
        return value
    if isinstance(value, str):
        return (
            value if all(part in _known_words() for part in value.split(" instead of ")) else None
        )
    if depth >= DEEPEST:
        return None
    if isinstance(value, Rows):
        rows = [_fields(row, depth + 1) for row in value.to_dicts()[:MOST]]
        others = {
            n: v for n, v in fields_of(value).items() if v is not value.rows and n not in REPEATED
        }
        return {"rows": rows, **_fields(others, depth)}
    if isinstance(value, Mapping):
        return _mapping(value, depth)
    if type(value).__name__ in FIRST:
        return _fields(row_of(value), depth)
    if stated := fields_of(value):
        return _fields(stated, depth)
    return _each(value, depth) if isinstance(value, list | tuple) else None


def _fields(fields: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Of names that are our own."""
    left = {}
    for name, value in fields.items():
        inner = (
            _model(name, value)
            if name in MODEL_FIELDS and isinstance(value, str)
            else leaving(value, depth + 1)
        )
        if inner not in (None, {}, []):
            left[name] = inner
    return left


def _mapping(mapping: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    """Its keys are texts too. Libraries bring their versions."""
    left: dict[str, Any] = {}
    for key, value in mapping.items():
        name = str(key)
        if name in SHARED_LIBRARIES and isinstance(value, str):
            version = value.partition("+")[0]
            left |= {name: version} if RELEASE.fullmatch(version) else {}
        elif name in _known_words():
            left |= _fields({name: value}, depth)
    return left


def _each(values: Iterable[Any], depth: int) -> list[Any]:
    every = [leaving(value, depth + 1) for value in list(values)[:MOST]]
    return [value for value in every if value not in (None, {}, [])]


def _model(name: str, text: str) -> str | None:
    """A public model's name; of anything else that it is somebody's own. A `name` may also be a card's."""
    if text in _known_words():
        return text
    return public_name(text) or (OWN_MODEL if name != "name" else None)


@cache
def _known_words() -> frozenset[str]:
    """Texts that say nothing about anybody."""
    choices = (
        Checkpointing,
        Effort,
        Engine,
        ExpertExchange,
        Mode,
        PipelineSchedule,
        Provenance,
        Risk,
        Status,
    )
    words = {*PRECISIONS, *OPTIMIZERS, *STEP_PARTS, *IN_WORDS, *IN_WORDS.values(), *COMPILED}
    words |= {word for choice in choices for word in get_args(choice)}
    offers = {
        text
        for offer in snapshot()
        for text in (offer.provider, offer.instance_type, offer.region or "")
    }
    machines = {device.name for device in catalogue()} | {host.name for host in host_catalogue()}
    return frozenset(map(str, words | machines | offers)) - {""}

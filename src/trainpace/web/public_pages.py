"""The public journal's pages as records: its runs beside one's own, one of them, and how far to trust their forecasts."""

from typing import Annotated, Literal, get_args

from msgspec import Meta

from trainpace import report
from trainpace.core.errors import UnknownName
from trainpace.core.execution import Precision
from trainpace.core.records import Record
from trainpace.forecast import PublicRun, public_runs
from trainpace.journal import AccuracyLine, PublicQuery, accuracy, accuracy_by, matching, public_run
from trainpace.verbs.whatif import Text
from trainpace.web.journal_pages import PAGE, Id
from trainpace.web.questions import query_of

Mode = Literal["train", "forward_backward", "inference"]
MODES: tuple[Mode, ...] = get_args(Mode)
Fit = Literal["not_in_fit", "in_fit"]


class PublicQuestion(Record):
    """Which public runs; `kind` is that of the model."""

    model: Text = ""
    device: Text = ""
    precision: Literal["", Precision] = ""
    batch: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    mode: Literal["", Mode] = ""
    source: Text = ""
    kind: Text = ""
    text: Text = ""
    page: Annotated[int, Meta(ge=1, le=100_000)] = 1


class PublicPage(Record):
    """A page of the `count` public runs that fulfil the filters. `following`: the query of the next page."""

    question: PublicQuestion
    runs: tuple[PublicRun, ...]
    count: int
    following: str
    before: str
    models: tuple[str, ...]
    devices: tuple[str, ...]
    sources: tuple[str, ...]
    kinds: tuple[str, ...]


class PublicRunQuestion(Record):
    id: Id


class PublicRunPage(Record):
    question: PublicRunQuestion
    run: PublicRun
    facts: tuple[tuple[str, str], ...]


class AccuracyQuestion(Record):
    """`card` and `kind`: as the public journal writes them."""

    card: Text = ""
    kind: Text = ""
    fit: Literal["", Fit] = ""


class AccuracyPage(Record):
    """Forecasts of the public runs against what was measured. `without_forecast`: runs of the choice that have none."""

    question: AccuracyQuestion
    chart: report.Chart | None
    overall: AccuracyLine
    by_card: tuple[AccuracyLine, ...]
    by_kind: tuple[AccuracyLine, ...]
    without_forecast: int
    cards: tuple[str, ...]
    kinds: tuple[str, ...]


def public_page(q: PublicQuestion) -> PublicPage:
    everything = public_runs()
    query = PublicQuery(
        model=q.model,
        device=q.device,
        precision=q.precision,
        micro_batch=q.batch,
        mode=q.mode,
        source=q.source,
        kind=q.kind,
        text=q.text,
    )
    found = matching(query, everything)
    start = (q.page - 1) * PAGE
    return PublicPage(
        question=q,
        runs=tuple(found[start : start + PAGE]),
        count=len(found),
        following=query_of(q, page=q.page + 1) if start + PAGE < len(found) else "",
        before=query_of(q, page=q.page - 1) if q.page > 1 else "",
        models=_names("model"),
        devices=_names("device"),
        sources=_names("source"),
        kinds=_names("model_kind"),
    )


def public_run_page(q: PublicRunQuestion) -> PublicRunPage:
    run = public_run(q.id)
    return PublicRunPage(question=q, run=run, facts=tuple(report.public_facts(run)))


def accuracy_page(q: AccuracyQuestion) -> AccuracyPage:
    """Raises UnknownName for a card or a kind that no public run has."""
    cards, kinds = _names("device"), _names("model_kind")
    for what, name, known in (("card", q.card, cards), ("kind of model", q.kind, kinds)):
        if name and name not in known:
            raise UnknownName(what, name, known)
    chosen = [
        run
        for run in public_runs()
        if q.card in ("", run.device)
        and q.kind in ("", run.model_kind)
        and (not q.fit or run.in_fit == (q.fit == "in_fit"))
    ]
    return AccuracyPage(
        question=q,
        chart=report.accuracy_chart(chosen),
        overall=accuracy("all", chosen),
        by_card=accuracy_by(chosen, "device"),
        by_kind=accuracy_by(chosen, "model_kind"),
        without_forecast=sum(run.forecast_ms is None for run in chosen),
        cards=cards,
        kinds=kinds,
    )


def _names(field: str) -> tuple[str, ...]:
    return tuple(sorted({getattr(run, field) for run in public_runs()}, key=str.casefold))

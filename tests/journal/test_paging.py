"""Pages of the run list: every run once, in order, for every filter, on both databases."""

import itertools

import pytest

from entries import entry
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.journal import MOST_COUNTED, ORDERS, Journal, Query, names_of, page

MODELS = ("timm:resnet50", "timm:ResNet18", "vgg16", "it's 100%_model")
FILTERS = [
    Query(),
    Query(model="resnet"),
    Query(model="RESNET", device="T4"),
    Query(model="no such"),
    Query(model="100%_"),
    Query(model="vgg16", exact=True),
    Query(precision="amp_bf16", micro_batch=2),
    Query(outcome="crashed"),
    Query(text="noted 1"),
    Query(with_forecast=True),
    Query(since="2026-11-21T00:00:30"),
]


def some(count=60):
    for i in range(count):
        execution = Execution(
            micro_batch=1 + i % 3, precision=("fp32", "amp_bf16")[i % 2], optimizer="sgd_momentum"
        )
        yield entry(
            model=MODELS[i * 7 % 4],
            device=("Tesla T4", "NVIDIA A100")[i // 2 % 2],
            execution=execution,
            notes=f"noted {i}",
            step_time_ms=None if i % 5 == 0 else float(i * 37 % 11),
            forecast_ms=1.0 + i if i % 4 == 0 else None,
            created_at=f"2026-11-21T00:00:{i * 17 % 60:02d}.000000Z",
        )


def all_pages(journal, query, order, descending, size):
    start, found = 0, []
    while start is not None:
        here = page(journal, query, order, descending, start, size)
        assert len(here.entries) <= size
        assert here.matches is None or here.matches >= len(here.entries)
        found += here.entries
        start = here.following
    return found


def test_pages_contain_every_run_once_in_order(journal):
    journal.add_many(list(some()))
    for query, (order, columns), descending in itertools.product(
        FILTERS, ORDERS.items(), (True, False)
    ):
        wanted = list(journal.every(query))
        if order == "step":
            wanted = [e for e in wanted if e.step_time_ms is not None]
        wanted.sort(key=lambda e: [getattr(e, c) for c in columns], reverse=descending)
        assert all_pages(journal, query, order, descending, 7) == wanted, (query, order, descending)


def test_match_count_stops_at_limit(journal):
    journal.add_many([entry() for _ in range(MOST_COUNTED)])
    assert page(journal, Query()).matches == MOST_COUNTED
    journal.add(entry())
    assert page(journal, Query()).matches is None


def test_model_and_device_names_are_sorted(journal):
    assert names_of(journal, "model") == []
    journal.add_many(list(some()))
    assert names_of(journal, "model") == sorted(MODELS)
    assert names_of(journal, "device") == ["NVIDIA A100", "Tesla T4"]


def test_read_only_journal_rejects_writes(place):
    Journal.open(place).close()
    with Journal.open(place, create=False, read_only=True) as journal:
        assert page(journal, Query()).entries == []
        with pytest.raises(TrainpaceError, match=r"read.?only"):
            journal.add(entry())
        assert journal.count() == 0


def test_filters_use_covering_index(tmp_path):
    """Without the index, a million runs take seconds."""
    from sqlalchemy import event

    with Journal.open(str(tmp_path / "journal.db")) as journal:
        journal.add_many(list(some(20)))
        seen = []
        event.listen(journal._engine, "before_cursor_execute", lambda *a: seen.append((a[2], a[3])))
        page(journal, Query(precision="fp8", text="x"))
        chosen = [(sql, values) for sql, values in seen if "ORDER BY" in sql]
        plans = journal.read(
            lambda c: [
                c.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values).all()
                for sql, values in chosen
            ]
        )
        assert len(plans) == 1
        assert "COVERING INDEX runs_list" in plans[0][0][-1]

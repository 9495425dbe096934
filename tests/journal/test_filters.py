"""Filters by mode and source, which have no database column."""

import pytest

from entries import entry
from trainpace.journal import Query


@pytest.fixture
def filled(journal):
    journal.add_many(
        [
            entry("a", mode="train", source="timm-a100.csv"),
            entry("b", mode="inference", source='we"ird_100%.csv'),
            entry(
                "c",
                mode="train",
                notes='"mode":"inference" "source":"timm-a100.csv","workload_key":',
                source="",
            ),
        ]
    )
    return journal


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (Query(mode="inference"), "b"),
        (Query(mode="train"), "ac"),
        (Query(source="TIMM"), "a"),
        (Query(source='"ird_100%'), "b"),
        (Query(source="_"), "b"),
        (Query(source="%"), "b"),
        (Query(source="/"), ""),
        (Query(mode="train", source="csv"), "a"),
    ],
)
def test_journal_filters_by_mode_and_source(filled, query, found):
    assert "".join(sorted(run.model for run in filled.find(query))) == found
    assert filled.count(query) == len(found)

"""Documents packed into rows, and padded to the longest of a batch."""

import numpy as np
import pytest

from trainpace.core.errors import TrainpaceError
from trainpace.workload import Documents, nearest_multiple


def test_best_fit_fills_rows_as_far_as_documents_go_together():
    row = Documents.of({6: 1, 5: 1, 4: 1, 3: 2, 2: 1}, "here").packed(10)
    assert row.fill == pytest.approx(23 / 30)  # 6 and 4, 5 and 3 and 2, 3
    assert row.documents == 2.0
    assert row.attended == pytest.approx((36 + 25 + 16 + 9 + 9 + 4) / 23)
    assert row.cut == 0.0


def test_documents_longer_than_a_row_are_cut():
    row = Documents.of({30: 1, 10: 1}, "here").packed(10)
    assert (row.fill, row.documents, row.attended, row.cut) == (1.0, 1.0, 10.0, 0.5)


def test_a_batch_is_padded_to_the_longest_of_documents_drawn_at_random():
    documents = Documents.of({10: 500, 20: 300, 100: 200}, "here")
    drawn = (
        np.random.default_rng(0).choice([10, 20, 100], (20_000, 4), p=[0.5, 0.3, 0.2]).max(axis=1)
    )
    assert documents.longest_of(4, 1000) == pytest.approx(drawn.mean(), rel=0.01)
    assert documents.longest_of(1, 1000) == pytest.approx(documents.mean)
    assert documents.longest_of(10_000, 64) == pytest.approx(64)


def test_a_mean_alone_is_taken_to_be_exponentially_distributed():
    documents = Documents.with_mean(600)
    assert documents.mean == pytest.approx(600, rel=0.01)
    row = documents.packed(65536)
    assert row.attended == pytest.approx(2 * 600, rel=0.02)  # E[l^2] / E[l] of an exponential
    assert row.fill > 0.95
    assert "exponentially" in row.source


@pytest.mark.parametrize("tokens", [32_768, 131_072, 1_048_576])
def test_long_rows_become_full_where_a_few_documents_stand_for_many(tokens):
    row = Documents.with_mean(100).packed(tokens)
    assert row.fill == pytest.approx(1.0, abs=1e-3)
    assert row.documents == pytest.approx(tokens / 100, rel=0.01)
    many = Documents.of({90: 10**7, 110: 10**7}, "a large data set").packed(tokens)
    assert many.documents * 100 == pytest.approx(many.fill * tokens)
    assert many.fill > 0.99
    all_of_it = Documents.of({90: 10, 110: 10}, "a small data set").packed(tokens)
    assert all_of_it.documents == 20
    assert all_of_it.fill == pytest.approx(2000 / tokens)


def test_what_is_no_length_is_refused():
    with pytest.raises(TrainpaceError, match="at least one length"):
        Documents.of({0: 5}, "nothing")
    assert [nearest_multiple(n, 32) for n in (1, 47, 49, 64)] == [32, 32, 64, 64]

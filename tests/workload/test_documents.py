"""Documents packed into rows, or padded to the longest of a batch."""

import numpy as np
import pytest

from trainpace.core.errors import TrainpaceError
from trainpace.workload import Documents, nearest_multiple


def test_best_fit_packing_fills_rows():
    row = Documents.of({6: 1, 5: 1, 4: 1, 3: 2, 2: 1}, "here").packed(10)
    assert row.fill == pytest.approx(23 / 30)  # 6 and 4, 5 and 3 and 2, 3
    assert row.documents == 2.0
    assert row.attended == pytest.approx((36 + 25 + 16 + 9 + 9 + 4) / 23)
    assert row.cut == 0.0


def test_documents_longer_than_a_row_are_split():
    row = Documents.of({30: 1, 10: 1}, "here").packed(10)
    assert (row.fill, row.documents, row.attended, row.cut) == (1.0, 1.0, 10.0, 0.5)


def test_padded_length_is_expected_maximum_of_batch():
    documents = Documents.of({10: 500, 20: 300, 100: 200}, "here")
    drawn = (
        np.random.default_rng(0).choice([10, 20, 100], (20_000, 4), p=[0.5, 0.3, 0.2]).max(axis=1)
    )
    assert documents.longest_of(4, 1000) == pytest.approx(drawn.mean(), rel=0.01)
    assert documents.longest_of(1, 1000) == pytest.approx(documents.mean)
    assert documents.longest_of(10_000, 64) == pytest.approx(64)


def test_mean_length_implies_exponential_distribution():
    documents = Documents.with_mean(600)
    assert documents.mean == pytest.approx(600, rel=0.01)
    row = documents.packed(65536)
    assert row.attended == pytest.approx(2 * 600, rel=0.02)  # E[l^2] / E[l] of an exponential
    assert row.fill > 0.95
    assert "exponentially" in row.source


@pytest.mark.parametrize("tokens", [32_768, 131_072, 1_048_576])
def test_long_rows_fill_up_for_large_data_sets(tokens):
    row = Documents.with_mean(100).packed(tokens)
    assert row.fill == pytest.approx(1.0, abs=1e-3)
    assert row.documents == pytest.approx(tokens / 100, rel=0.01)
    many = Documents.of({90: 10**7, 110: 10**7}, "a large data set").packed(tokens)
    assert many.documents * 100 == pytest.approx(many.fill * tokens)
    assert many.fill > 0.99
    all_of_it = Documents.of({90: 10, 110: 10}, "a small data set").packed(tokens)
    assert all_of_it.documents == 20
    assert all_of_it.fill == pytest.approx(2000 / tokens)


def test_document_lengths_must_be_positive():
    with pytest.raises(TrainpaceError, match="at least one length"):
        Documents.of({0: 5}, "nothing")
    assert [nearest_multiple(n, 32) for n in (1, 47, 49, 64)] == [32, 32, 64, 64]

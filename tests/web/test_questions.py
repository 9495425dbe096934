"""Queries are parsed into requests, and invalid ones are rejected in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.core.execution import PRECISIONS
from trainpace.web.pages import (
    BadQuestion,
    CompareQuestion,
    RunQuestion,
    RunsQuestion,
    ScoreQuestion,
    SweepQuestion,
    SweepsQuestion,
    query_of,
    read_question,
)
from trainpace.web.whatif import WhatIfRequest

KINDS = (
    RunsQuestion,
    RunQuestion,
    CompareQuestion,
    SweepsQuestion,
    SweepQuestion,
    ScoreQuestion,
    WhatIfRequest,
)
words = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200
).map(str.strip)
runs = st.builds(
    RunsQuestion,
    model=words,
    device=words,
    text=words,
    precision=st.sampled_from(["", *PRECISIONS]),
    batch=st.none() | st.integers(1, 10**9),
    order=st.sampled_from(["newest", "fastest", "model"]),
)
whatifs = st.builds(
    WhatIfRequest,
    batch=st.integers(1, 65536),
    gpus=st.integers(1, 1024),
    zero=st.integers(0, 3),
    epochs=st.floats(0, 1e6, exclude_min=True),
    network=st.floats(1e-3, 1e5),
    price=st.none() | st.floats(0, 1e5),
)


@given(runs | whatifs)
def test_question_survives_a_round_trip_through_the_query(question):
    assert read_question(type(question), query_of(question)) == question


def test_default_question_has_an_empty_query():
    assert query_of(RunsQuestion()) == query_of(WhatIfRequest()) == ""


def test_empty_form_fields_are_ignored():
    assert read_question(RunsQuestion, "model=&batch=&precision=&order=") == RunsQuestion()


@pytest.mark.parametrize(
    ("kind", "query", "said"),
    [
        (RunsQuestion, "batch=x", "batch"),
        (RunsQuestion, "batch=0", "batch"),
        (RunsQuestion, "batch=1e400", "batch"),
        (RunsQuestion, "order=best", "order"),
        (RunsQuestion, "modell=x", "model"),
        (RunsQuestion, "model=a&model=b", "twice"),
        (RunsQuestion, "model=%ff", "UTF-8"),
        (RunsQuestion, "model=%00", "not valid text"),
        (RunsQuestion, "model=" + "a" * 201, "model"),
        (RunsQuestion, "&".join(f"a{i}=1" for i in range(100)), "parameters"),
        (WhatIfRequest, "epochs=nan", "epochs"),
        (WhatIfRequest, "epochs=inf", "epochs"),
        (WhatIfRequest, "zero=4", "zero"),
        (WhatIfRequest, "gpus=1025", "gpus"),
        (WhatIfRequest, "precision=fp4", "precision"),
        (RunQuestion, "", "id"),
    ],
)
def test_invalid_query_is_rejected_in_one_line(kind, query, said):
    with pytest.raises(BadQuestion, match=said) as refused:
        read_question(kind, query)
    assert "\n" not in str(refused.value)
    assert "$" not in str(refused.value)


@given(
    st.sampled_from(KINDS),
    st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")),
)
def test_any_query_string_parses_or_raises_bad_question(kind, query):
    try:
        question = read_question(kind, query)
    except BadQuestion:
        return
    assert isinstance(question, kind)
    query_of(question).encode("ascii")

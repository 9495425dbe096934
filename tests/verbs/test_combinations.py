"""Every combination of valid options is answered or refused with a reason, in every form."""

import contextlib
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from combinations import (
    VERBS,
    ask,
    optional,
    question,
    search,
    values_of,
    write_experts,
    write_inputs,
)

MANY = int(os.environ.get("TRAINPACE_COMBINATIONS", "20000"))
"""Questions of the long test."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("combinations")
    write_inputs(folder)
    return folder


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_a_value_to_draw(verb, place):
    with contextlib.chdir(place):
        models = ("blocks.json", "resnet18", "experts.json")
        for name in optional(verb):
            assert any(values_of(verb, name, model) for model in models) or name == "mode", name


@settings(max_examples=50, derandomize=True)
@given(st.data())
def test_random_combination_has_no_finding(place, data):
    verb = data.draw(st.sampled_from(VERBS))

    def choose(values):
        return data.draw(st.sampled_from(values))

    with contextlib.chdir(place):
        asked_for = question(choose, verb, more=5)
    assert asked_for is not None
    assert ask(place, asked_for.words).findings == (), asked_for.line


def test_pairs_of_options_have_no_finding(place):
    """A sample of the pairs. The long test asks all of them."""
    found = search(place, number=40, seed=1)
    assert not found.findings, found.in_words


@pytest.mark.long
@pytest.mark.slow
def test_many_combinations_have_no_finding(place):
    """`TRAINPACE_COMBINATIONS=1000` draws another number."""
    write_experts(place)
    found = search(place, number=MANY, seed=random.randrange(2**32))
    print(found.in_words)
    assert not found.findings, found.in_words

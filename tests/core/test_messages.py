"""Messages of foreign exceptions are quoted as one line and never cut inside a word."""

import pytest
from torch import nn

from trainpace.core.errors import LONGEST_MESSAGE, as_sentence, message_of, shortened
from trainpace.core.worker import explain, place_in_code


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no such batch"), "no such batch"),
        (ValueError(), "no message"),
        (ValueError("\n\n  the second line\nmore"), "the second line"),
        (Unprintable(), "unreadable message"),
        (
            ValueError(f"Target module {nn.Sequential(nn.ReLU(), nn.Sequential())} is wrong. So."),
            "Target module Sequential(...) is wrong. So.",
        ),
        (
            KeyError("Caught KeyError\nOriginal Traceback (most recent call last):\nKeyError: 'x'"),
            "\"Caught KeyError\\nOriginal Traceback (most recent call last):\\nKeyError: 'x'\"",
        ),
        (ValueError("Caught it.\nOriginal Traceback (most recent call last):\nValueError: x"), "x"),
    ],
)
def test_a_message_is_one_line(error, message):
    assert message_of(error) == message


@pytest.mark.parametrize("text", ["word " * 200, "w" * 400, "a" * 299 + " bc", "short"])
def test_a_text_is_cut_after_a_whole_word(text):
    cut = shortened(text)
    words, mark = cut.removesuffix(" …"), cut.endswith(" …")
    assert len(cut) <= LONGEST_MESSAGE + 2
    if mark:
        assert set(words.split()) <= set(text.split()) or " " not in text
    assert as_sentence(cut)[-1] in ".…" or not mark


def test_a_place_in_the_standard_library_is_not_the_users():
    with pytest.raises(ValueError, match="Expecting") as caught:
        __import__("json").loads("{")
    assert place_in_code(caught.value).startswith("test_messages.py line")
    assert explain(caught.value).endswith("(char 1).")

"""docs/sources.md has every statement of the four sources once, with a mark, and counts them right."""

import re
from collections import Counter
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "sources.md").read_text()
ROWS = re.findall(r"^\| (\d{3})\.(\d+) \| (.+) \| (yes|partly|no) \|$", PAGE, re.MULTILINE)
STATEMENTS = {"001": 42, "002": 38, "003": 11, "004": 45}


def test_every_statement_stands_once():
    expected = [(source, str(n)) for source, count in STATEMENTS.items() for n in range(1, count + 1)]
    assert sorted((source, n) for source, n, *_ in ROWS) == sorted(expected)


def test_the_counts_are_those_of_the_marks():
    marks = Counter(mark for *_, mark in ROWS)
    assert f"Of {len(ROWS)} statements {marks['yes']} are shown, {marks['partly']} partly, {marks['no']} not." in PAGE


def test_what_is_not_shown_has_its_reason():
    for source, n, text, mark in ROWS:
        assert mark == "yes" or len(text) > 60, f"{source}.{n}"

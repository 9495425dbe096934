"""docs/sources.md has every statement of the four sources once, with a mark and what shows it, and counts them right."""

import re
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "sources.md").read_text()
ROW = re.compile(r"^\| (\d{3})\.(\d+) \| (.+) \| (yes|partly|no) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)
STATEMENTS = {"001": 42, "002": 38, "003": 11, "004": 45}


def test_every_statement_stands_once():
    expected = [
        (source, str(n)) for source, count in STATEMENTS.items() for n in range(1, count + 1)
    ]
    assert sorted((source, n) for source, n, *_ in ROWS) == sorted(expected)


def test_the_counts_are_those_of_the_marks():
    marks = Counter(mark for *_, mark in ROWS)
    assert (
        f"Of {len(ROWS)} statements {marks['yes']} are shown, {marks['partly']} partly, {marks['no']} not."
        in PAGE
    )


def test_what_is_not_shown_has_its_reason():
    for source, n, text, mark in ROWS:
        assert mark == "yes" or len(text) > 60, f"{source}.{n}"


def anchors(page):
    """What links may name after #: a page's headings in small letters, without punctuation, blanks as hyphens."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_there(link, page):
    path, _, anchor = link.partition("#")
    target = DOCS / path
    if path and not target.is_file():
        return False
    return not anchor or anchor in anchors(target.read_text() if path else page)


def unshown(page):
    """Statements marked as shown that have no command in their section and no link of their own; and links and files that are
    not there, of any statement."""
    found = []
    for section in re.split(r"^(?=##+ )", page, flags=re.MULTILINE):
        has_command = re.search(r"^```console\n\$ ", section, re.MULTILINE)
        for source, n, text, mark in ROW.findall(section):
            links = re.findall(r"\]\(([^)]+)\)", text)
            files = re.findall(r"`((?:tests|examples|benchmarks)/[\w./]+)`", text)
            broken = [link for link in links if not is_there(link, page)]
            broken += [file for file in files if not (DOCS.parent / file).exists()]
            if broken or (mark == "yes" and not links and not has_command):
                found.append((f"{source}.{n}", *broken))
    return found


def test_what_is_shown_has_a_command_or_a_page():
    assert unshown(PAGE) == []


def test_a_statement_without_either_is_found():
    bare = "## A\n\n| 001.1 | words alone | yes |\n| 001.2 | [a page](glossary.md) | yes |\n| 001.3 | not shown | partly |\n"
    assert unshown(bare) == [("001.1",)]
    assert unshown(f"{bare}\n```console\n$ trainpace gpus\n```\n") == []
    wrong = "## A\n\n| 001.1 | [gone](nowhere.md), [anchor](#b), `tests/nothing.py` | partly |\n"
    assert unshown(wrong) == [("001.1", "nowhere.md", "#b", "tests/nothing.py")]

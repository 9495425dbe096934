"""docs/sources.md lists every statement of the four sources once, with a mark and evidence, and counts them correctly."""

import re
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "sources.md").read_text()
ROW = re.compile(r"^\| (\d{3})\.(\d+) \| (.+) \| (yes|partly|no) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)
STATEMENTS = {"001": 42, "002": 38, "003": 11, "004": 45}


def test_every_statement_is_listed_once():
    expected = [
        (source, str(n)) for source, count in STATEMENTS.items() for n in range(1, count + 1)
    ]
    assert sorted((source, n) for source, n, *_ in ROWS) == sorted(expected)


def test_stated_counts_match_the_marks():
    marks = Counter(mark for *_, mark in ROWS)
    assert (
        f"Of {len(ROWS)} statements {marks['yes']} are shown, {marks['partly']} partly, {marks['no']} not."
        in PAGE
    )


def test_statements_not_shown_have_a_reason():
    for source, n, text, mark in ROWS:
        assert mark == "yes" or len(text) > 60, f"{source}.{n}"


def anchors(page):
    """Return the link anchors of a page: headings in lower case, without punctuation, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_there(link, page):
    path, _, anchor = link.partition("#")
    target = DOCS / path
    if path and not target.is_file():
        return False
    return not anchor or anchor in anchors(target.read_text() if path else page)


def unshown(page):
    """Return statements marked as shown without a command in their section or a link, and links or files that do not exist."""
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


def test_shown_statements_have_a_command_or_page():
    assert unshown(PAGE) == []


def test_check_finds_statements_without_evidence():
    bare = "## A\n\n| 001.1 | words alone | yes |\n| 001.2 | [a page](glossary.md) | yes |\n| 001.3 | not shown | partly |\n"
    assert unshown(bare) == [("001.1",)]
    assert unshown(f"{bare}\n```console\n$ trainpace gpus\n```\n") == []
    wrong = "## A\n\n| 001.1 | [gone](nowhere.md), [anchor](#b), `tests/nothing.py` | partly |\n"
    assert unshown(wrong) == [("001.1", "nowhere.md", "#b", "tests/nothing.py")]

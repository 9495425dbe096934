"""Words that Trainpace prints are plain English or stand in the glossary.

A word is looked for in docs/glossary.md (terms, and what stands in *emphasis* or `code` there) and in tests/plain_words.txt. A new
one is a question to whoever wrote it: would somebody who has trained models, and never read our code, know it? Then it is plain;
add it to the list. If not, say it otherwise, or add a term.
"""

import re
from functools import cache
from pathlib import Path

import click
import pytest

from trainpace.cli.program import _cli
from trainpace.core.catalogue_reader import catalogue
from trainpace.core.hosts import host_catalogue
from trainpace.offers import snapshot
from trainpace.verbs import SUMMARIES

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
PLAIN = Path(__file__).parent / "plain_words.txt"
GOLDEN = sorted((Path(__file__).parent / "report" / "golden").iterdir())
WORD = re.compile(r"(?<![\w./:@=<>\-+*])[A-Za-z]+(?:-[a-z]+)*(?:'[a-z]+)?(?![\w/@=(*]|\.[a-z])")
"""No option, path, name of a file, function or field: those are looked up elsewhere."""
ENDINGS = [
    ("s", ""),
    ("es", ""),
    ("ies", "y"),
    ("ed", ""),
    ("ed", "e"),
    ("ing", ""),
    ("ing", "e"),
    ("ly", ""),
    ("er", ""),
    ("er", "e"),
    ("ation", "e"),
    ("ations", "e"),
    ("n't", ""),
    ("'s", ""),
    ("'ll", ""),
    ("ers", ""),
    ("ers", "e"),
    ("est", ""),
    ("est", "e"),
]


def words_of(text):
    return {word.lower() for word in WORD.findall(text)}


def forms(word):
    """The word, and those that it may be a form of."""
    yield word
    for ending, stem in ENDINGS:
        if word.endswith(ending) and len(word) > len(ending) + 2:
            short = word.removesuffix(ending) + stem
            yield short
            if short[-1] == short[-2]:  # planned
                yield short[:-1]
    if word.startswith(("un", "re")):
        yield from forms(word[2:])


def terms(text):
    """Words that a glossary explains."""
    plain = text.replace("**", "")
    heads = re.findall(r"^(?![#:])(\S.*)\n: ", plain, re.MULTILINE)
    marked = re.findall(r"\*([^*\n]+)\*|`([^`\n]+)`", plain)
    found = " ".join([*heads, *(one or other for one, other in marked)])
    words = {word.lower() for word in re.findall(r"[A-Za-z]+(?:-[A-Za-z]+)*", found)}
    return words | {word.removesuffix("s") for word in words}


@cache
def known():
    return terms(GLOSSARY.read_text()) | set(PLAIN.read_text().split()) | names()


def names():
    """Of things: cards, processors, servers."""
    devices = [text for d in catalogue() for text in (d.name, d.vendor, d.architecture, *d.aliases)]
    offers = [
        text
        for offer in snapshot()
        for text in (offer.provider, offer.instance_type, offer.region or "")
    ]
    return {
        word.lower()
        for text in [*devices, *(h.name for h in host_catalogue()), *offers]
        for word in re.findall(r"[A-Za-z]+", text)
    }


def unknown(text, known_words):
    """Words that are neither plain nor explained. Of one with hyphens its parts may be."""

    def is_known(word):
        return any(form in known_words for form in forms(word))

    return sorted(
        w
        for w in words_of(text)
        if not is_known(w) and not ("-" in w and all(map(is_known, w.split("-"))))
    )


def commands(command=_cli, context=None):
    """Every command that takes options, by its path."""
    context = context or click.Context(_cli, info_name="trainpace")
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        below = click.Context(inner, info_name=name, parent=context)
        yield from (
            commands(inner, below)
            if isinstance(inner, click.Group)
            else [(below.command_path, inner, below)]
        )


def help_of(command, context):
    records = [record[1] for p in command.params if (record := p.get_help_record(context))]
    return "\n".join([command.help or "", *records])


SAID = "New words: {}. Say it in plainer words, explain them in docs/glossary.md, or add them to tests/plain_words.txt."


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_what_is_printed(file):
    new = unknown(file.read_text(), known())
    assert not new, SAID.format(", ".join(new))


@pytest.mark.parametrize("verb", SUMMARIES)
def test_help(verb):
    texts = [
        help_of(command, context)
        for path, command, context in commands()
        if path.split()[1] == verb
    ]
    assert texts
    new = unknown("\n".join([SUMMARIES[verb], *texts]), known())
    assert not new, SAID.format(", ".join(new))


def test_a_new_piece_of_jargon_is_found():
    line = "Best batch 32: the reshuffled superblock wins (quiescent), see --zero; resnet50 on a T4, /home/me/x.py and model.fc"
    assert unknown(line, known()) == ["quiescent", "superblock"]


@pytest.mark.parametrize(
    "term",
    [
        "kernel",
        "micro-batch",
        "shard",
        "pareto",
        "epoch",
        "allocator",
        "rank",
        "tensor",
        "rung",
        "offload",
    ],
)
def test_jargon_is_explained_and_not_merely_listed(term):
    assert set(forms(term)) & terms(GLOSSARY.read_text())
    assert term not in PLAIN.read_text().split()


def test_a_term_that_is_taken_out_of_the_glossary_is_missed():
    without = (
        GLOSSARY.read_text()
        .replace("Kernel\n: ", "Another\n: ")
        .replace("Launch-bound\n: ", "Another\n: ")
    )
    left = terms(without) | set(PLAIN.read_text().split()) | names()
    assert "kernels" in unknown("Kernels take most of it.", left)
    assert unknown("Kernels take most of it.", known()) == []


def test_the_list_is_sorted_and_holds_each_word_once():
    listed = PLAIN.read_text().split()
    assert listed == sorted(set(listed))

"""Write the parts of the pages that the program itself knows: options, constants, intervals,
results.

    python tools/generate.py           write them into docs/ (python -m tools generate)

What is generated stands between `<!-- generated: NAME -->` and `<!-- end -->`; all else on a page
is written by hand. A page of a verb that has none yet is begun. tests/test_docs.py fails where a
page is stale.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SCHEMA = DOCS / "shared_runs.schema.json"
RESULTS = ROOT / "benchmarks/results"

_PART = re.compile(r"(<!-- generated: (\w+)([^>\n]*) -->\n).*?(<!-- end -->)", re.DOTALL)
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def verb(name: str) -> str:
    """Usage, description, and a table of options and arguments; for a group, these of each command."""
    from trainpace.cli.program import _cli

    parent = click.Context(_cli, info_name="trainpace")
    command = _cli.get_command(parent, name)
    assert command is not None, name
    return _command(command, click.Context(command, info_name=name, parent=parent), 3)


def _command(command: click.Command, context: click.Context, level: int) -> str:
    pieces = " ".join(command.collect_usage_pieces(context))
    parts = [f"```text\n{context.command_path} {pieces}\n```", _description(command)]
    rows = [
        record
        for p in command.get_params(context)
        if (record := _option(p, context)) and "--help" not in record[0]
    ]
    if rows:
        table = "\n".join(f"| `{name}` | {text} |" for name, text in rows)
        parts.append(f"| option | |\n|---|---|\n{table}")
    if isinstance(command, click.Group):
        for sub in command.list_commands(context):
            inner = command.get_command(context, sub)
            assert inner is not None, sub
            below = click.Context(inner, info_name=sub, parent=context)
            parts += [f"{'#' * level} {sub}", _command(inner, below, level + 1)]
    return "\n\n".join(parts)


def _description(command: click.Command) -> str:
    """The docstring: sentences as they are, what follows a `\\b` as a block."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    done = []
    for paragraph in paragraphs:
        if paragraph.startswith("\b\n"):
            done.append("```text\n" + paragraph.removeprefix("\b\n") + "\n```")
        else:
            done.append(_plain(" ".join(paragraph.split())))
    return "\n\n".join(done)


def _option(parameter: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    record = parameter.get_help_record(context)
    if record is None:
        return None
    name, text = record
    if not text:
        return None
    return name.replace("|", "\\|"), _plain(text.replace("|", "\\|"))


def _plain(text: str) -> str:
    """Escape Markdown's marks outside of code."""
    return re.sub(r"(`[^`]*`)|([*<>])", lambda match: match[1] or "\\" + match[2], text)


def verbs() -> str:
    """The list of verbs."""
    from trainpace.cli.program import VERBS

    rows = "\n".join(f"| [{name}]({name}.md) | {text} |" for name, text in VERBS.items())
    names = "\n".join(VERBS)
    return f"| verb | |\n|---|---|\n{rows}\n\n```{{toctree}}\n:hidden:\n\n{names}\n```"


def links() -> str:
    """The fitted constants of the collectives' use of links."""
    from trainpace.forecast.collectives import CONSTANTS, Generation

    records = {f"NVLink {number}": one for number, one in CONSTANTS.generations.items()} | {
        "PCIe": CONSTANTS.pcie
    }
    fields = Generation.__struct_fields__
    lines = [f"| | {' | '.join(f'`{name}`' for name in fields)} |", "|---|" + "--:|" * len(fields)]
    lines += [
        f"| {kind} | {' | '.join(f'{getattr(one, name):g}' for name in fields)} |"
        for kind, one in records.items()
    ]
    shared = [name for name in CONSTANTS.__struct_fields__ if name not in ("generations", "pcie")]
    rows = "\n".join(f"| `{name}` | {getattr(CONSTANTS, name):g} |" for name in shared)
    return "\n".join(lines) + f"\n\n| constant | fitted |\n|---|--:|\n{rows}"


def intervals() -> str:
    """The 90 % intervals of steps that are all of one part."""
    import numpy as np

    from trainpace.forecast.uncertainty import PARTS, deviation, fitted_spreads

    spreads, rows = fitted_spreads(), []
    for i, name in enumerate(PARTS):
        sds = [deviation(spreads, np.eye(len(PARTS))[i], seen) for seen in (True, False)]
        ends = [
            f"{np.expm1(spreads.low * sd):+.0%} to {np.expm1(spreads.high * sd):+.0%}" for sd in sds
        ]
        rows.append(f"| {name} | {ends[0]} | {ends[1]} |")
    return (
        "| the step is all | on a card of the fit | on another card |\n|---|---|---|\n"
        + "\n".join(rows)
    )


def relatedness() -> str:
    """Which errors go together, and how much."""
    from trainpace.forecast.uncertainty import fitted_spreads

    r = fitted_spreads().relatedness
    rows = [
        ("all that one user measures", r.user, r.user_near),
        ("runs on one device", r.device, r.device_near),
        ("runs of one model", r.model, r.model_near),
    ]
    lines = ["| common to | made of the same parts | and about as long |", "|---|--:|--:|"]
    lines += [f"| {name} | {share:.1%} | {near:.1%} |" for name, share, near in rows]
    lines += [
        f"| one run at all its batch sizes | {r.run:.1%} | |",
        f"| the same on other devices | {r.run_elsewhere:.1%} | |",
    ]
    return "\n".join(lines)


def table(name: str, number: str, *first: str) -> str:
    """The table of that number (from 1) in benchmarks/results/NAME.md; with words, its rows that begin so."""
    lines = _TABLE.findall((RESULTS / f"{name}.md").read_text())[int(number) - 1].splitlines()
    return "\n".join(
        lines[:2] + [row for row in lines[2:] if row.startswith(f"| {' '.join(first)}")]
    )


def below(name: str, number: str) -> str:
    """The list that follows that table."""
    text = (RESULTS / f"{name}.md").read_text()
    after = text[list(_TABLE.finditer(text))[int(number) - 1].end() :].lstrip("\n")
    rows = re.match(r"(?:- .*\n)+", after)
    assert rows, name
    return rows[0].rstrip("\n")


def public_sources(number: str) -> str:
    """A table (from 1) of the packaged SOURCES.md: what is packaged, what is left out."""
    from trainpace.forecast import FOLDER

    return _TABLE.findall((FOLDER / "SOURCES.md").read_text())[int(number) - 1].rstrip("\n")


def public_accuracy(groups: str) -> str:
    """The errors of the packaged forecasts, by card or by model_kind."""
    from trainpace.forecast import ScoreLine, public_runs, score_of

    score = score_of(public_runs())
    lines = [
        *getattr(score, groups),
        ScoreLine(name="*all*", in_fit=score.in_fit, not_in_fit=score.not_in_fit),
    ]
    heads = " | ".join(
        f"{name}: n | mean % | median % | inside %" for name in ("in the fit", "not in the fit")
    )
    rows = [f"| | {heads} |", "|---|" + "--:|" * 8]
    for line in lines:
        cells = [
            cell
            for s in (line.in_fit, line.not_in_fit)
            for cell in (
                [f"{s.n:,}", f"{s.mape:.1f}", f"{s.median:.1f}", f"{s.coverage:.0f}"]
                if s.n
                else [""] * 4
            )
        ]
        rows.append(f"| {line.name} | {' | '.join(cells)} |")
    return "\n".join(rows)


PARTS: dict[str, Callable[..., str]] = {
    "verb": verb,
    "verbs": verbs,
    "links": links,
    "intervals": intervals,
    "relatedness": relatedness,
    "table": table,
    "below": below,
    "public_sources": public_sources,
    "public_accuracy": public_accuracy,
}


def generated(text: str) -> str:
    """The page with its generated parts made anew."""

    def part(match: re.Match[str]) -> str:
        made = PARTS[match[2]](*match[3].split())
        return f"{match[1]}\n{made}\n\n{match[4]}"

    return _PART.sub(part, text)


def page_of_verb(name: str) -> Path:
    """Where a verb's page stands."""
    return DOCS / "verbs" / f"{name}.md"


def main() -> None:
    """Write them all."""
    from trainpace.cli.program import VERBS

    for name, summary in VERBS.items():
        if not page_of_verb(name).exists():
            begun = f"# trainpace {name}\n\n{summary}\n\n## Example\n\n## Options\n\n"
            page_of_verb(name).write_text(f"{begun}<!-- generated: verb {name} -->\n<!-- end -->\n")
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        if (new := generated(text)) != text:
            page.write_text(new)
            print(f"written: {page.relative_to(ROOT)}")
    if SCHEMA.read_text() != (text := schema_text()):
        SCHEMA.write_text(text)
        print(f"written: {SCHEMA.relative_to(ROOT)}")


def schema_text() -> str:
    """The JSON Schema of files of shared runs, as it is documented."""
    from trainpace.journal import schema

    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    main()

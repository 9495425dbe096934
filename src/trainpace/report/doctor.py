"""An examination of a machine: for the terminal, as JSON and as a page."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from trainpace.core.records import to_jsonable
from trainpace.diagnose import Check, Examination
from trainpace.report.pages import page
from trainpace.report.terminal import print_lines, print_named, print_next, print_verdict

ORDER = ("failed", "problem", "note", "ok")
TITLES = {"failed": "Failed", "problem": "To mend", "note": "Worth knowing", "ok": "In order"}


def print_examination(examination: Examination, trace_file: str | None) -> None:
    print_verdict(examination_verdict(examination), good=examination.is_well)
    for status, same in _grouped(examination):
        print_named(TITLES[status], [(check.part, _words(check)) for check in same])
    if examination.traces:
        where = f"are in {trace_file}" if trace_file else "can be kept with --trace FILE.txt"
        print_lines(f"The traces of what failed {where}; please send them to us.")
    if examination.is_well:
        kind = [] if examination.kind == "cpu" else ["--device", examination.kind]
        print_next(
            ["trainpace", "measure", "resnet18", *kind],
            "real steps over batch sizes; FILE.py:FUNCTION for your own model",
        )


def examination_verdict(examination: Examination) -> str:
    if examination.is_well:
        return f"{examination.device} is in order, and measuring works on it."
    bad = sum(check.status in ("failed", "problem") for check in examination.checks)
    count = "one thing" if bad == 1 else f"{bad} things"
    return f"Not all is well with {examination.device}: {count} to look at."


def examination_json(examination: Examination) -> dict[str, Any]:
    return to_jsonable(examination) | {"well": examination.is_well}


def examination_page(examination: Examination) -> str:
    groups = [
        (TITLES[s], [(c.part, c.finding, c.advice) for c in same])
        for s, same in _grouped(examination)
    ]
    return page(
        "doctor.html",
        f"Examination of {examination.device}",
        [examination_verdict(examination)],
        [],
        examination_json(examination),
        answer=examination.is_well,
        groups=groups,
        traces=examination.traces,
    )


def _grouped(examination: Examination) -> Iterator[tuple[str, list[Check]]]:
    """(status, its checks), the worst first."""
    checks = sorted(examination.checks, key=lambda check: ORDER.index(check.status))
    for status, same in groupby(checks, key=lambda check: check.status):
        yield status, list(same)


def _words(check: Check) -> str:
    return f"{check.finding} {check.advice}".strip()

"""What `plan` and `match` recommend for known trainings, beside what practitioners do (practitioners.toml says who, and where).

python benchmarks/practitioners.py                 every case, and the page in benchmarks/results/
python benchmarks/practitioners.py --only BLOOM    the cases whose name has it, printed alone
python benchmarks/practitioners.py --first         keeps the answers as those of the first run, which the page shows beside
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import trainpace
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import EXECUTION_FIELDS
from trainpace.core.hardware import find_device
from trainpace.plan import config_line

HERE = Path(__file__).parent
CASES = HERE / "practitioners.toml"
RESULT = HERE / "results" / "practitioners.md"
FIRST = HERE / "results" / "practitioners_first.json"
WANTED = 27


class Answer(NamedTuple):
    """What a verb recommends: `facts` by the names of practitioners.toml, and in words."""

    facts: Mapping[str, Any]
    words: str


class Judged(NamedTuple):
    case: Mapping[str, Any]
    answer: Answer
    missed: tuple[str, ...]
    seconds: float

    @property
    def agrees(self) -> bool:
        return not self.missed


def planned(model: str, ask: Mapping[str, Any]) -> Answer:
    plan = trainpace.plan(model, no_journal=True, evidence="none", **ask)
    if plan.target is None:
        return Answer({"fits": False}, f"nothing fits: {plan.reason}")
    e = plan.target.choice.execution
    facts = {name: getattr(e, name) for name in EXECUTION_FIELDS}
    facts |= {"fits": True, "world_size": e.world_size, "model_parallel_size": e.tp * e.pp}
    return Answer(facts, config_line(plan.target.choice))


def matched(model: str, ask: Mapping[str, Any]) -> Answer:
    matches = trainpace.match(model, no_journal=True, evidence="none", **ask).matches
    if not matches:
        return Answer({"fits": False}, "no server can do it")
    m = matches[0]
    device = find_device(m.offer.device)
    facts = {
        "fits": True,
        "gpu": m.offer.device,
        "spot": m.spot,
        "world_size": m.offer.count * m.nodes,
        "gpu_memory_gib": 0.0 if device.memory_gib is None else device.memory_gib.value,
    }
    servers = f"{m.nodes} x " if m.nodes > 1 else ""
    words = f"{servers}{m.offer.count} x {m.offer.device} of {m.offer.provider}{', spot' if m.spot else ''}"
    return Answer(facts, f"{words}, ${m.mean_usd:,.2f} in {m.mean_hours:,.1f} h")


def missed(expect: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The expectations that an answer does not meet, in words."""
    found = []
    for name, wanted in expect.items():
        value = facts.get(name.removeprefix("not_"))
        if name == "not_gpu":
            met = value is not None and not any(str(value).startswith(other) for other in wanted)
        elif isinstance(wanted, dict):
            met = value is not None and wanted.get("at_least", value) <= value <= wanted.get(
                "at_most", value
            )
        else:
            met = value in wanted
        if not met:
            found.append(f"{name} is {value}, practitioners: {wanted}")
    return tuple(found)


def judge(case: Mapping[str, Any], folder: Path, configs: Mapping[str, Any]) -> Judged:
    model = case["model"]
    if model in configs:
        path = folder / f"{model}.json"
        path.write_text(json.dumps(configs[model]))
        model = f"transformers:{path}"
    begun = time.perf_counter()
    try:
        answer = (planned if case["verb"] == "plan" else matched)(model, case["ask"])
    except TrainpaceError as error:
        answer = Answer({}, f"error: {error}")
    return Judged(case, answer, missed(case["expect"], answer.facts), time.perf_counter() - begun)


def page(judged: list[Judged], first: Mapping[str, Any]) -> str:
    agree = sum(one.agrees for one in judged)
    then = sum(one["agrees"] for one in first.values())
    lines = [
        "# What practitioners do, and what Trainpace recommends",
        "",
        f"`python -m benchmarks practitioners`, {datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}. The"
        " cases, their sources and what is expected of each were written down before `plan` and `match` were asked"
        " (benchmarks/practitioners.toml). No expectation was changed. Of the questions, two that the verbs refused were mended"
        " after the first run (a card's name, BLOOM's accumulation), and torchtitan's five on H100 name the cards of their"
        " source, which have 96 GB.",
        "",
        f"**{agree} of {len(judged)} agree** ({then} of {len(first)} at the first run, on 2026-11-24).",
        "",
        "| case | practitioners | Trainpace | agree | at first | source |",
        "|---|---|---|---|---|---|",
    ]
    for one in judged:
        case, before = one.case, first.get(one.case["name"])
        said = one.answer.words + "".join(f"; **{miss}**" for miss in one.missed)
        at_first = "" if before is None else "yes" if before["agrees"] else f"no: {before['words']}"
        memory = "" if case["read"] else ", from memory"
        lines.append(
            f"| {case['name']} | {case['practice']} | {said} | {'yes' if one.agrees else 'no'} | {at_first} |"
            f" [{case['source']}]({case['url']}){memory} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--first", action="store_true")
    options = parser.parse_args()
    table = tomllib.loads(CASES.read_text())
    chosen = [case for case in table["case"] if options.only in case["name"]]
    judged = []
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            one = judge(case, Path(folder), table["configs"])
            judged.append(one)
            print(
                f"{'agrees ' if one.agrees else 'DIFFERS'} {one.seconds:5.1f} s  {case['name']}: {one.answer.words}"
            )
            for miss in one.missed:
                print(f"                 {miss}")
    agree = sum(one.agrees for one in judged)
    print(f"{agree} of {len(judged)} agree.")
    if options.only:
        return
    if options.first:
        kept = {
            one.case["name"]: {"agrees": one.agrees, "words": one.answer.words} for one in judged
        }
        FIRST.write_text(json.dumps(kept, indent=1) + "\n")
    RESULT.write_text(page(judged, json.loads(FIRST.read_text())))
    if agree < WANTED:
        raise SystemExit(f"fewer than {WANTED} agree.")


if __name__ == "__main__":
    main()

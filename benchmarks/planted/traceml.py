"""What TraceML says about the planted scripts, for the column beside ours.

python -m pip install --no-deps --target .peers traceml-ai==0.5.0
python benchmarks/planted/traceml.py [NAME ...]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases import CASES, Case
from launch import ROOT, environment, free_port, together

from trainpace.core.records import Record

PEERS = ROOT / ".peers"
WRAPPER = Path(__file__).parent / "under_traceml.py"
BY_ITSELF = ("lightning", "hf")


class Said(Record):
    """TraceML's verdict and reason, in its words."""

    verdict: str
    why: str


def traceml_says(case: Case) -> Said:
    """Runs the case under `traceml run`. The two-host case cannot be: TraceML starts its own ranks on one machine."""
    if case.link_mbit_per_s:
        return Said(verdict="not run", why="needs two hosts")
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, [str(PEERS), os.environ.get("PYTHONPATH")]))
        losses = Path(folder) / "losses"
        env = environment(
            {"TRACEML_BY_HAND": "0" if case.engine in BY_ITSELF else "1", "LOSSES": str(losses)}
        )
        env["PYTHONPATH"] = os.pathsep.join([path, env["PYTHONPATH"]])
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
        script, *args = case.argv()
        run = [
            sys.executable,
            str(PEERS / "bin" / "traceml"),
            "run",
            "--logs-dir",
            folder,
            "--run-name",
            case.name,
        ]
        ports = ["--aggregator-port", str(free_port()), "--master-port", str(free_port())]
        ranks = [*ports, "--nproc-per-node", str(case.ranks)]
        # A script that TraceML instruments by itself is run as it is; others through the wrapper.
        if case.engine in BY_ITSELF:
            words = [*run, *ranks, script, *(["--args", *args] if args else [])]
        else:
            words = [*run, *ranks, str(WRAPPER), "--args", script, *args]
        outcome = together([words], env, case.timeout_s)
        summaries = list(Path(folder).rglob("final_summary.json"))
        # A script that failed is no verdict of TraceML's: only a finished training counts.
        if not summaries or len(list(Path(folder).glob("losses*"))) != case.ranks:
            raise RuntimeError(f"{case.name} did not end under TraceML:\n{outcome.output[-3000:]}")
        return read_said(json.loads(summaries[0].read_text()))


def read_said(summary: dict[str, Any]) -> Said:
    """The verdict of a final_summary.json (schema 1.9)."""
    diagnosis = summary["primary_diagnosis"]
    return Said(verdict=str(diagnosis["status"]), why=str(diagnosis["summary"]))


def main(names: list[str]) -> None:
    for case in CASES:
        if not names or case.name in names:
            said = traceml_says(case)
            print(f"| {case.name} | {case.expected} | {said.verdict} | {said.why} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

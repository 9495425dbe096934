"""The commands of Trainpace as functions, without any user interface.

Each command has a frozen `Request` and a function of (request, progress) that returns a record. A
verb prints nothing, parses no arguments and does not know about terminals. `cli`, `api` and `web`
are interfaces to the verbs. Their options, keywords and forms are generated from the fields of the
`Request`. Modules are imported on first use, which keeps `trainpace --help` fast.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainpace.verbs import checks, data, diagnose, forecast, journal, look, machine, match  # isort: skip
    from trainpace.verbs import measure, plan, run, schedule, settings, traced, watch  # isort: skip

SUMMARIES = {
    "look": (
        "The first answer about a script: how long it will take, what slows it down, and what it"
        " costs elsewhere."
    ),
    "forecast": "Forecast step time, memory and cost of a model on GPUs you don't have.",
    "match": (
        "Rank servers by what a whole training costs or how long it takes; deadline, budget, Pareto"
        " front."
    ),
    "offers": "List servers and their prices with source and date; refresh them when online.",
    "gpus": "List the hardware catalogue, or one device with the source of every figure.",
    "measure": (
        "Train a model for some steps on this machine over batch sizes; find the jumps and the best"
        " batch."
    ),
    "watch": "Run an unchanged training script and record where its steps' time goes.",
    "diagnose": "Find what slows a training script down, prove it, and estimate what changes save.",
    "plan": (
        "Recommend what to change about a training, in which order, and what each change saves of"
        " the whole job."
    ),
    "run": (
        "Try a plan or a ladder of changes step by step and print the table of measured speed-ups."
    ),
    "verify": (
        "Train as one big batch, by accumulation and on ranks; check that the results are the same,"
        " or find out why not."
    ),
    "doctor": "Examine this machine and whether it can be measured, in about a minute.",
    "calibrate": "Measure what this machine can do, for a minute, and save it for forecasts.",
    "loader": "Measure a DataLoader alone: workers, settings, and which transform costs what.",
    "precompute": (
        "Do expensive preprocessing once, in parallel, into Parquet shards; verify and repair them."
    ),
    "journal": (
        "List, show, compare, share, import and export measured runs, own and public; score their"
        " forecasts."
    ),
    "serve": "Show the journal and what-if in the browser: the dashboard, on loopback.",
    "validate": "Forecast measured runs under their own conditions and summarise the errors.",
    "schedule": (
        "Compute steps, hours and dollars of a training run, or whichever number is missing."
    ),
}
"""Commands in the order of the list in `--help`, each with a summary."""


def __getattr__(name: str) -> Any:
    # pickle looks for a class in every loaded module, also in this one.
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

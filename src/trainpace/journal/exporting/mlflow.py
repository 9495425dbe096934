"""Runs exported to an MLflow tracking store: a folder, a database or a server."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.journal.entry import Entry
from trainpace.journal.exporting.columns import numbers_of, series_of, settings_of, start_ms, words_of

EXPERIMENT = "trainpace"
ID_TAG = "trainpace.id"
LONGEST = 5000
"""The longest tag or parameter, in characters, that every version of MLflow takes."""
AT_ONCE = 1000


def export_mlflow(where: str, entries: Iterable[Entry], experiment: str = EXPERIMENT) -> int:
    """Add runs to the experiment; returns how many were new (by id)."""
    client = _client(where)
    from mlflow.exceptions import MlflowException

    try:
        existing = client.get_experiment_by_name(experiment)
        place = existing.experiment_id if existing is not None else client.create_experiment(experiment)
        return sum(_add(client, place, entry) for entry in entries)
    except (MlflowException, OSError) as error:
        raise UnreadableInput(f"MLflow at {where} refuses: {str(error).splitlines()[0]}") from None


def _client(where: str) -> Any:
    try:
        from mlflow import MlflowClient
    except ImportError:
        raise TrainpaceError("an export to MLflow needs mlflow.", "pip install 'trainpace[mlflow]'.") from None
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=where if "://" in where else Path(where).absolute().as_uri())


def _add(client: Any, experiment: str, entry: Entry) -> int:
    from mlflow.entities import Metric, Param, RunTag

    if client.search_runs([experiment], f"tags.`{ID_TAG}` = '{entry.id}'", max_results=1):
        return 0
    start = start_ms(entry)
    run = client.create_run(experiment, start_time=start, run_name=f"{entry.model} {entry.id[:8]}"[:250])
    numbers = {name: [(0, value)] for name, value in numbers_of(entry).items()} | series_of(entry)
    metrics = [Metric(name, value, start, step) for name, points in numbers.items() for step, value in points]
    params = [Param(name, str(value)[:LONGEST]) for name, value in settings_of(entry).items()]
    tags = [RunTag(f"trainpace.{name}", text[:LONGEST]) for name, text in words_of(entry).items()]
    client.log_batch(run.info.run_id, params=params, tags=tags)
    for i in range(0, len(metrics), AT_ONCE):
        client.log_batch(run.info.run_id, metrics=metrics[i : i + AT_ONCE])
    client.set_terminated(run.info.run_id, "FINISHED" if entry.outcome == "ok" else "FAILED", start)
    return 1

"""`validate`: forecasts against measured runs."""

from pathlib import Path
from typing import Annotated

from trainpace.core.errors import TrainpaceError
from trainpace.core.host import usable_cores, user_folder
from trainpace.core.records import Record
from trainpace.forecast import Row, Summary, by, evaluate, family_of, read_runs, summarise
from trainpace.verbs.request import (
    EXISTING_FILE,
    EXISTING_FOLDER,
    Argument,
    Field,
    Progress,
    Request,
    Rows,
    within,
)

WORKERS = within("count", 1, 64, int)


class ValidateRequest(Request):
    runs: Annotated[
        str, Argument("A table of measured runs, CSV or Parquet.", EXISTING_FILE, metavar="RUNS")
    ]
    file: Annotated[
        tuple[str, ...], Field("Only rows whose column 'file' says so. Repeatable.", metavar="NAME")
    ] = ()
    models: Annotated[
        str | None,
        Field("Where transformers:FILE.json is looked for. Default: beside RUNS.", EXISTING_FOLDER),
    ] = None
    traces: Annotated[
        str | None, Field("Folder that keeps traced models. Default: the user's cache.")
    ] = None
    run_code: Annotated[
        bool,
        Field(
            "Run the Python files that rows name as their models (FILE.py:FUNCTION), as you trust"
            " their author."
        ),
    ] = False
    workers: Annotated[
        int | None, Field("Processes that trace. Default: half the cores, at most 4.", WORKERS)
    ] = None


class ValidatedRuns(Record, Rows[Row]):
    """Forecasts against measured runs. Iterates over `rows`, one a run in the order of its file.

    `overall`: the errors of all; `groups`: those by "file", "gpu" and "family".
    """

    rows: tuple[Row, ...]
    overall: Summary
    groups: dict[str, tuple[Summary, ...]]


def run(request: ValidateRequest, progress: Progress) -> ValidatedRuns:
    r, path = request, Path(request.runs)
    runs = read_runs(path)
    if r.file:
        files = sorted({run.file for run in runs})
        runs = [run for run in runs if run.file in r.file]
        if not runs:
            raise TrainpaceError(
                f"no row of {path} is of the file {', '.join(r.file)}.",
                f"It has {', '.join(files[:20])}.",
            )
    if not runs:
        raise TrainpaceError(f"{path} has no rows.")
    models = (Path(r.models) if r.models else path.parent).resolve()
    traces = Path(r.traces) if r.traces else user_folder("cache") / "traces"
    workers = r.workers or max(1, min(4, usable_cores() // 2 + 1))
    with progress.work("tracing", unit="models") as work:
        rows = evaluate(
            runs, models, traces, work.say, workers, progress=work.to, run_code=r.run_code
        )
    keys = {
        "file": lambda row: row.file,
        "gpu": lambda row: row.gpu,
        "family": lambda row: family_of(row.model),
    }
    groups = {name: tuple(by(rows, key)) for name, key in keys.items()}
    return ValidatedRuns(rows=tuple(rows), overall=summarise("all", rows), groups=groups)

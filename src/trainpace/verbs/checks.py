"""`verify` and `validate`: compare ways to train, and compare forecasts with measured runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from trainpace.core.errors import TrainpaceError
from trainpace.core.host import usable_cores, user_folder
from trainpace.core.records import Record, common_fields
from trainpace.forecast import (
    MeasuredRun,
    Row,
    Summary,
    by,
    evaluate,
    family_of,
    read_runs,
    summarise,
)
from trainpace.run import Equivalence, Question
from trainpace.run import verify as compare_trainings
from trainpace.verbs.request import (
    ABOVE_0,
    AT_LEAST_1,
    COUNT,
    DURATION,
    EXISTING_FILE,
    EXISTING_FOLDER,
    Argument,
    Field,
    Progress,
    Request,
    Rows,
    within,
)
from trainpace.verbs.traced import ImageSize, ModelArgument, SequenceLength

Way = Literal["accumulate", "data_parallel", "ddp", "fsdp2", "deepspeed"]
EVERYWHERE: tuple[Way, ...] = ("accumulate", "data_parallel", "ddp", "fsdp2")
"""Ways to train that need only torch."""
DIFFERENCE = within("difference", ABOVE_0, 0.1)


class VerifyRequest(Request):
    model: ModelArgument
    batch: Annotated[int, Field("Samples per update.", AT_LEAST_1)] = 8
    accumulate: Annotated[int, Field("Micro-batches of accumulation.", COUNT)] = 4
    ranks: Annotated[int, Field("Processes, or replicas of DataParallel.", COUNT)] = 2
    steps: Annotated[int, Field("Updates.", AT_LEAST_1)] = 10
    way: Annotated[
        tuple[Way, ...], Field("Only this one; several.  [default: all but deepspeed]")
    ] = ()
    precision: Annotated[Literal["fp32", "bf16", "amp_bf16"], Field("Number format.")] = "fp32"
    optimizer: Annotated[
        str | None, Field("As in trainpace forecast.  [default: the task's own, or sgd_momentum]")
    ] = None
    sequence_length: SequenceLength = None
    image_size: ImageSize = None
    tolerance: Annotated[
        float, Field("Up to this relative difference it is rounding.", DIFFERENCE)
    ] = 1e-5
    seed: Annotated[int, Field("Decides weights and samples.")] = 0
    timeout: Annotated[float, Field("Give up on a training after this.", DURATION)] = 600.0


def verify(request: VerifyRequest, progress: Progress) -> Equivalence:
    """Train a model in several equivalent ways, and compare the resulting weights."""
    r = request
    question = Question(
        **common_fields(r, Question),
        parts=r.accumulate,
        ways=r.way or EVERYWHERE,
        timeout_s=r.timeout,
    )
    with progress.work(f"verifying {r.model}") as work:
        return compare_trainings(question, work.say)


WORKERS = within("count", 1, 64, COUNT.parse)


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
    """Forecasts compared with measured runs. Iterates over `rows`.

    Attributes:
        rows: One row per run, in the order of its file.
        overall: Errors of all runs.
        groups: Errors by "file", "gpu" and "family".
    """

    rows: tuple[Row, ...]
    overall: Summary
    groups: dict[str, tuple[Summary, ...]]


def _runs_of(path: Path, chosen: Sequence[str]) -> list[MeasuredRun]:
    """Read the runs of the chosen files, or all. Raises TrainpaceError if there are none."""
    runs = read_runs(path)
    files = ", ".join(sorted({run.file for run in runs})[:20])
    if chosen:
        runs = [run for run in runs if run.file in chosen]
    if runs:
        return runs
    if files:
        raise TrainpaceError(
            f"No row of {path} belongs to the file {', '.join(chosen)}.", f"It has {files}."
        )
    raise TrainpaceError(f"{path} has no rows.")


def validate(request: ValidateRequest, progress: Progress) -> ValidatedRuns:
    """Forecast the runs of a file under their own conditions, and compare."""
    r, path = request, Path(request.runs)
    runs = _runs_of(path, r.file)
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

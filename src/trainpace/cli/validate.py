"""`trainpace validate`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainpace.cli.options import echo_json

if TYPE_CHECKING:
    from trainpace.validation.evaluate import Row
    from trainpace.validation.summary import Summary


@click.command()
@click.argument("runs", metavar="RUNS", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--file", "only", multiple=True, metavar="NAME", help="Only rows whose column `file` says so. Repeatable."
)
@click.option(
    "--models",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where transformers:FILE.json is looked for. Default: beside RUNS.",
)
@click.option(
    "--traces",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that keeps traced models. Default: the user's cache.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=None,
    help="Processes that trace. Default: half of the cores, at most 4.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: rows[] and summary.")  # fmt: skip
def validate(
    runs: Path, only: tuple[str, ...], models: Path | None, traces: Path | None, workers: int | None, as_json: bool
) -> int:
    """Forecast measured runs under their own conditions, and compare.

    RUNS is CSV or Parquet. Columns: model_spec (or model), gpu_canonical (or gpu), precision, batch_per_gpu,
    step_time_ms (or samples_per_sec), and where they apply num_gpus, num_nodes, interconnect, global_batch, grad_accum,
    seq_len, img_size, optimizer, parallelism, mode (train, forward_backward, inference), memory_format (nchw, nhwc),
    compile (eager, compile), framework, framework_version, peak_mem_gib, notes, file. An empty field was not stated.

    \b
    trainpace validate runs.csv
    trainpace validate measured_runs.parquet --file timm_train_rtx3090 --json
    """
    from trainpace.records import to_jsonable

    rows, overall, groups = validated(runs, only, models, traces, workers)
    if as_json:
        sums = {f"by_{name}": [to_jsonable(s) for s in group] for name, group in groups.items()}
        summary = {"overall": to_jsonable(overall), **sums}
        every = [to_jsonable(row) for row in rows]
        echo_json({"record": "Validation", "schema_version": 1, "rows": every, "summary": summary})
    else:
        from trainpace.report.validation import print_validation

        print_validation(rows, overall, groups)
    return 0 if overall.n else 1


def validated(
    runs: Path, only: tuple[str, ...], models: Path | None, traces: Path | None, workers: int | None
) -> tuple[list[Row], Summary, dict[str, list[Summary]]]:
    """(a row a run, the errors of all, those by file, GPU and family), as the options ask."""
    from trainpace.errors import TrainpaceError
    from trainpace.report.progress import Bar
    from trainpace.validation.evaluate import evaluate
    from trainpace.validation.runs import read_runs
    from trainpace.validation.summary import by, family_of, summarise

    chosen = read_runs(runs)
    if only:
        known = sorted({run.file for run in chosen})
        chosen = [run for run in chosen if run.file in only]
        if not chosen:
            raise TrainpaceError(
                f"no row of {runs} is of the file {', '.join(only)}.", f"It has {', '.join(known[:20])}."
            )
    if not chosen:
        raise TrainpaceError(f"{runs} has no rows.")
    many = workers or max(1, min(4, (os.cpu_count() or 2) // 2 + 1))
    with Bar("tracing", unit="models") as bar:
        rows = evaluate(chosen, (models or runs.parent).resolve(), traces or _cache(), bar.say, many, progress=bar.to)
    overall = summarise("all", rows)
    groups = {
        "file": by(rows, lambda row: row.file),
        "gpu": by(rows, lambda row: row.gpu),
        "family": by(rows, lambda row: family_of(row.model)),
    }
    return rows, overall, groups


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainpace" / "traces"

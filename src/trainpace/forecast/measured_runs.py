"""Measured runs from CSV or Parquet: one row, one training step that somebody timed.

Columns (all optional but a model and a batch): the fields of `Run` under their own names; docs/verbs/validate.md says what
each holds. An empty field was not stated. Other columns are left out.
"""

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.execution import Engine
from trainpace.core.intake import first_bytes, opened_text
from trainpace.core.records import Record
from trainpace.core.software import Attention, CrossEntropy, Fp8Recipe, OptimizerImplementation


class MeasuredRun(Record):
    """One measured run as its source states it. Numbers are None and texts empty where it states nothing.

    engine: how gradients are exchanged, an engine of `Execution`. attention, optimizer_implementation, cross_entropy, fp8_recipe:
    as in `Software`; attention "native" is cuDNN's. peak_memory_kind: what
    peak_mem_gib counts. host_copy: whether each step copies its samples from pageable memory. cudnn_benchmark: whether cuDNN
    chooses convolutions by trying them (torch.backends.cudnn.benchmark). host: the CPU that launched the kernels. assumed:
    assumptions of the table's author.
    """

    index: int
    file: str = ""
    model_spec: str = ""
    model: str = ""
    model_variant_or_config: str = ""
    framework: str = ""
    framework_version: str = ""
    gpu_canonical: str = ""
    gpu: str = ""
    interconnect: str = ""
    precision: str = ""
    memory_format: str = ""
    compile: str = ""
    optimizer: str = ""
    parallelism: str = ""
    mode: str = ""
    engine: Literal["", Engine] = ""
    attention: Literal["", Attention, "native"] = ""
    optimizer_implementation: Literal["", OptimizerImplementation] = ""
    cross_entropy: Literal["", CrossEntropy] = ""
    fp8_recipe: Literal["", Fp8Recipe] = ""
    peak_memory_kind: Literal["", "allocated", "reserved", "device"] = ""
    host_copy: Literal["", "yes", "no"] = ""
    cudnn_benchmark: Literal["", "yes", "no"] = ""
    host: str = ""
    assumed: str = ""
    notes: str = ""
    num_gpus: float | None = None
    num_nodes: float | None = None
    batch_per_gpu: float | None = None
    global_batch: float | None = None
    grad_accum: float | None = None
    seq_len: float | None = None
    img_size: float | None = None
    step_time_ms: float | None = None
    samples_per_sec: float | None = None
    tokens_per_sec: float | None = None
    tflops_per_gpu: float | None = None
    peak_mem_gib: float | None = None


_CHOICES = {
    name: get_args(kind)
    for name, kind in get_type_hints(MeasuredRun).items()
    if get_origin(kind) is Literal
}
_DEFAULTS = dict(
    zip(MeasuredRun.__struct_fields__[1:], MeasuredRun.__struct_defaults__, strict=True)
)


def read_runs(path: Path) -> list[MeasuredRun]:
    """Every row of a CSV or Parquet file. Raises `UnreadableInput` for a file that is neither, or has no model column."""
    columns, rows = read_table(path)
    if not {"model_spec", "model"} & set(columns):
        raise UnreadableInput(
            f"{path} has neither a column model_spec nor model.",
            "trainpace validate --help lists the columns.",
        )
    return [run_of(path, index, row) for index, row in enumerate(rows)]


def run_of(path: Path, index: int, row: dict[str, Any]) -> MeasuredRun:
    """One row. Raises `UnreadableInput` for a number that is none, and for a word that its column does not know."""
    values: dict[str, Any] = {"index": index}
    row = {
        "file": path.stem,
        **{name: value for name, value in row.items() if name != "file" or value},
    }
    for name, default in _DEFAULTS.items():
        value = row.get(name)
        if default is None:
            try:
                values[name] = number(value)
            except TrainpaceError as error:
                raise UnreadableInput(
                    f"{path} row {index}, column {name}: {error.message}"
                ) from None
        else:
            values[name] = (
                "" if value is None or value != value else str(value).strip()
            )  # a NaN is unlike itself
    for name, choices in _CHOICES.items():
        if values[name] not in choices:
            raise UnreadableInput(
                f"{path} row {index}: {name} is {values[name]!r}; it should be one of"
                f" {', '.join(choices[1:])}, or empty."
            )
    return MeasuredRun(**values)


def number(value: Any) -> float | None:
    """A finite number from 0; None for an empty field. Raises TrainpaceError for anything else."""
    if value is None or str(value).strip().lower() in ("", "nan", "none"):
        return None
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = -1.0
    if not 0 <= result < float("inf"):
        raise TrainpaceError(f"{str(value)[:40]!r} is not a finite number from 0.")
    return result


def read_table(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """The columns of a CSV or Parquet file, and an iterator over its rows. Raises `UnreadableInput` for another file."""
    lines = _parquet(path) if first_bytes(path)[:4] == b"PAR1" else _csv(path)
    columns = list(next(lines, ()))
    return columns, (dict(zip(columns, line, strict=False)) for line in lines if line)


def _csv(path: Path) -> Iterator[Sequence[Any]]:
    """The names of the columns, then the rows."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a run of many steps is a long record
    try:
        with opened_text(path, newline="") as file:
            yield from csv.reader(file)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableInput(f"{path} is neither Parquet nor CSV text ({error}).") from None


def _parquet(path: Path) -> Iterator[Sequence[Any]]:
    """The names of the columns, then the rows."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TrainpaceError(
            "reading Parquet needs pyarrow.", "pip install 'trainpace[data]', or give CSV."
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        yield file.schema_arrow.names
        for batch in file.iter_batches(10_000):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
    except (pyarrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UnreadableInput(f"{path} is not a readable Parquet file ({reason}).") from None

"""Measured runs from CSV or Parquet: one row, one training step that somebody timed.

Columns (all optional but a model and a batch): the fields of `Run` under their own names; docs/verbs/validate.md says what
each holds. An empty field was not stated. Other columns are left out.
"""

import csv
import io
import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.execution import Engine
from trainpace.records import Record, read_bytes


class Run(Record):
    """One measured run as its source states it. Numbers are None and texts empty where it states nothing.

    engine: how gradients are exchanged, an engine of `Execution`. attention: fused attention's kernels. peak_memory_kind: what
    peak_mem_gib counts. host_copy: does each step copy its samples from pageable memory? cudnn_benchmark: does cuDNN choose
    convolutions by trying them (torch.backends.cudnn.benchmark)? assumed: what whoever made the table had to assume.
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
    attention: Literal["", "flash1", "flash2", "native"] = ""
    peak_memory_kind: Literal["", "allocated", "reserved", "device"] = ""
    host_copy: Literal["", "yes", "no"] = ""
    cudnn_benchmark: Literal["", "yes", "no"] = ""
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


CONDITIONS = ("engine", "attention", "peak_memory_kind", "host_copy", "cudnn_benchmark", "assumed")
"""Columns that came later than the others."""
_CHOICES = {name: get_args(kind) for name, kind in get_type_hints(Run).items() if get_origin(kind) is Literal}
_NUMBERS = [
    name for name, default in zip(Run.__struct_fields__[1:], Run.__struct_defaults__, strict=True) if default is None
]
_TEXTS = [name for name in Run.__struct_fields__ if name not in (*_NUMBERS, "index")]


def read_runs(path: Path) -> list[Run]:
    """Every row of a CSV or Parquet file. Raises `UnreadableInput` for a file that is neither, or has no model column."""
    data = read_bytes(path)
    if data[:4] == b"PAR1":
        columns, rows = _parquet(path, data)
    else:
        columns, rows = _csv(path, data)
    if not {"model_spec", "model"} & set(columns):
        raise UnreadableInput(
            f"{path} has neither a column model_spec nor model.", "trainpace validate --help lists the columns."
        )
    return [run_of(path, index, row) for index, row in enumerate(rows)]


def _csv(path: Path, data: bytes) -> tuple[list[str], list[dict[str, Any]]]:
    try:
        reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""))
        return list(reader.fieldnames or []), list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableInput(f"{path} is neither Parquet nor CSV text ({error}).") from None


def _parquet(path: Path, data: bytes) -> tuple[list[str], list[dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TrainpaceError(
            "reading Parquet needs pyarrow.", "pip install 'trainpace[parquet]', or give CSV."
        ) from None
    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
    except (pyarrow.ArrowException, OSError) as error:
        raise UnreadableInput(f"{path} is no readable Parquet file ({str(error).splitlines()[0]}).") from None
    columns = [name for name in (*_NUMBERS, *_TEXTS) if name in table.column_names]
    return table.column_names, table.select(columns).to_pylist()


def run_of(path: Path, index: int, row: dict[str, Any]) -> Run:
    """One row. Raises `UnreadableInput` for a number that is none, and for a word that its column does not know."""
    values: dict[str, Any] = {"index": index}
    row = {"file": path.stem, **{name: value for name, value in row.items() if name != "file" or value}}
    for name in _TEXTS:
        value = row.get(name)
        values[name] = "" if value is None or value != value else str(value).strip()  # a NaN is unlike itself
    for name, choices in _CHOICES.items():
        if values[name] not in choices:
            raise UnreadableInput(
                f"{path} row {index}: {name} is {values[name]!r}; it should be one of {', '.join(choices[1:])}, or empty."
            )
    for name in _NUMBERS:
        value = row.get(name)
        if value is None or str(value).strip().lower() in ("", "nan", "none"):
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise UnreadableInput(f"{path} row {index}: {name} is {value!r}, which is no number.") from None
        if not math.isfinite(number) or number < 0:
            raise UnreadableInput(f"{path} row {index}: {name} is {value}; it should be a finite number from 0.")
        values[name] = number
    return Run(**values)

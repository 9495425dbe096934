"""Tables of timm's ``benchmark.py``, such as ``benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv``.

The file's name states the precision, memory format, versions, device, and whether torch.compile was on. Times are
milliseconds per step; training is a whole step with SGD and momentum on a batch that is already on the device.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.execution import Execution, Precision
from trainpace.journal.entry import Entry, now_utc, printable
from trainpace.journal.importing.reading import (
    PRECISION_NAMES,
    ContentIds,
    Given,
    Item,
    Skipped,
    columns_and_rows,
    imported,
)
from trainpace.validation import number


class FileName(NamedTuple):
    """Conditions stated in the name of a benchmark file."""

    precision: Precision | None
    channels_last: bool
    compile: bool
    device: str
    environment: dict[str, str]


def read_name(name: str) -> FileName:
    """Parse a file name at its hyphens; the last part that is nothing else is the device."""
    precision: Precision | None = None
    environment, device, channels_last, compiled = {"framework": "timm benchmark.py"}, "", False, False
    for part in re.sub(r"\.\w+$", "", name.lower()).split("-"):
        if part in ("benchmark", "train", "infer", "cpu", "nchw", ""):
            continue
        if part in PRECISION_NAMES:
            precision = PRECISION_NAMES[part]
        elif part == "nhwc":
            channels_last = True
        elif part in ("dynamo", "compile", "inductor"):
            compiled = True
        elif version := re.fullmatch(r"pt(1)(\d\d)|pt([2-9])(\d)(\d)", part):
            environment["torch"] = ".".join(digits for digits in version.groups() if digits)
        elif version := re.fullmatch(r"cu(\d\d)(\d)", part):
            environment["cuda"] = ".".join(version.groups())
        else:
            device = part
    return FileName(precision, channels_last, compiled, device, environment)


def is_timm(columns: list[str]) -> bool:
    return "model" in columns and bool({"train_samples_per_sec", "infer_samples_per_sec"} & set(columns))


def read_timm(path: Path, given: Given) -> Iterator[Item]:
    """A run for each row and phase (train, infer) that has a time."""
    columns, rows = columns_and_rows(path)
    if not is_timm(columns):
        raise UnreadableInput(f"{path} has not the columns of timm's benchmark (model, train_samples_per_sec, ...).")
    name, ids, now = read_name(path.name), ContentIds(), now_utc()
    for row in rows:
        phases = [phase for phase in ("train", "infer") if row.get(f"{phase}_samples_per_sec") not in (None, "")]
        if not phases:
            yield Skipped("the model has no time" + (" (the benchmark failed on it)" if row.get("error") else ""))
        for phase in phases:
            id_ = ids.of([name.precision, name.channels_last, name.compile, name.device, phase, _plain(row)])
            try:
                yield _entry(row, phase, name, given, id_, now, path.name)
            except TrainpaceError as error:
                yield Skipped(error.message)


def _entry(row: dict[str, Any], phase: str, name: FileName, given: Given, id_: str, now: str, source: str) -> Entry:
    precision = given.precision or name.precision
    if precision is None:
        raise TrainpaceError("the file's name states no precision: give --precision.")
    batch, rate = number(row.get(f"{phase}_batch_size")), number(row[f"{phase}_samples_per_sec"])
    if not batch or not rate:
        raise TrainpaceError("the row states no batch size or no throughput above 0.")
    size, parameters = number(row.get(f"{phase}_img_size")), number(row.get("param_count"))
    execution = Execution(
        micro_batch=int(batch), precision=precision, optimizer="sgd_momentum" if phase == "train" else "none",
        channels_last=name.channels_last, compile=name.compile,
    )  # fmt: skip
    return imported(
        given, id_, given.device or name.device, created_at=now, execution=execution,
        model=f"timm:{printable(str(row.get('model') or ''))}", image_size=int(size) if size else None,
        mode="train" if phase == "train" else "inference",
        step_time_ms=number(row.get(f"{phase}_step_time")) or 1e3 * batch / rate, environment=name.environment,
        notes=f"{parameters:g} M parameters" if parameters else "", source=printable(source),
    )  # fmt: skip


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in row.items() if value not in (None, "")}

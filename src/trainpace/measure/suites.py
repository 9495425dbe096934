"""Suites: named lists of models and batch sizes to measure without supervision.

Users can write their own suite as a TOML file with ``[[task]]`` tables::

    [[task]]
    model = "resnet50"        # any model spec; file paths are relative to the working folder
    batch = [1, 2, 4]         # or one integer; this key and the keys below are optional
    precision = "fp32"
    optimizer = "adamw"
    sequence_length = 128
"""

from typing import Annotated

import msgspec

from trainpace.core.errors import UnknownName, UnreadableInput
from trainpace.core.execution import OPTIMIZERS, Precision
from trainpace.core.intake import read_bytes, toml_of
from trainpace.core.records import Record

SUITES = ("classic", "small")
CLASSIC = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
    "mobilenet_v1",
    "mobilenet_v2",
)
SMALL = ("mobilenet_v1", "mobilenet_v2", "resnet18")
BATCHES = (1, 2, 4, 8, 16, 32)
SMALL_BATCHES = (1, 2, 4)

Count = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class SuiteItem(Record):
    """Model to measure at several batch sizes.

    If `optimizer` is None, the task's own optimizer or the usual one is used.
    """

    spec: str
    batches: tuple[int, ...]
    precision: Precision = "fp32"
    optimizer: str | None = None
    sequence_length: int | None = None


class _Task(msgspec.Struct, forbid_unknown_fields=True):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    batch: Count | Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)] = BATCHES
    precision: Precision = "fp32"
    optimizer: str | None = None
    sequence_length: Count | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    task: Annotated[list[_Task], msgspec.Meta(min_length=1)]


def suite(name: str) -> tuple[SuiteItem, ...]:
    """Return the items of a suite.

    Args:
        name: `classic` (the built-in models), `small` (the fastest of them) or a `FILE.toml`.

    Raises:
        TrainpaceError: If there is no such suite, or the file has errors.
    """
    if name == "classic":
        return tuple(SuiteItem(spec=spec, batches=BATCHES) for spec in CLASSIC)
    if name == "small":
        return tuple(SuiteItem(spec=spec, batches=SMALL_BATCHES) for spec in SMALL)
    if not name.endswith(".toml"):
        hint = f"Suites: {', '.join(SUITES)}, or a FILE.toml of your own."
        raise UnknownName("suite", name, SUITES, hint)
    try:
        tasks = msgspec.convert(toml_of(read_bytes(name), name), _File).task
    except msgspec.ValidationError as error:
        hint = f"A suite is a list of [[task]] tables with {', '.join(_Task.__struct_fields__)}."
        raise UnreadableInput(f"{name} is not a suite: {error}.", hint) from None
    return tuple(_item(task, name) for task in tasks)


def _item(task: _Task, file: str) -> SuiteItem:
    if task.optimizer is not None and task.optimizer not in OPTIMIZERS:
        raise UnknownName(f"optimizer in {file}", task.optimizer, tuple(OPTIMIZERS))
    sizes = task.batch if isinstance(task.batch, tuple) else (task.batch,)
    return SuiteItem(
        spec=task.model,
        batches=tuple(sorted(set(sizes))),
        precision=task.precision,
        optimizer=task.optimizer,
        sequence_length=task.sequence_length,
    )

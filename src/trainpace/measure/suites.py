"""Named lists of measurements for a machine that is left alone: what to measure, not how. No torch here.

A suite of one's own is a TOML file of ``[[task]]`` tables::

    [[task]]
    model = "resnet50"        # any model spec, the one key that is needed; files are found from the working folder
    batch = [1, 2, 4]         # or one whole number
    precision = "fp32"
    optimizer = "adamw"
    sequence_length = 128
"""

from typing import Any

from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.execution import OPTIMIZERS, PRECISIONS, Precision
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
LARGEST_BATCH = 2**20
_KEYS = ("model", "batch", "precision", "optimizer", "sequence_length")


class SuiteItem(Record):
    """One model to measure at several batch sizes. `optimizer` None: the task's own, or the usual one."""

    spec: str
    batches: tuple[int, ...]
    precision: Precision = "fp32"
    optimizer: str | None = None
    sequence_length: int | None = None


def suite(name: str) -> tuple[SuiteItem, ...]:
    """Return the items of `classic` (the built-in models), `small` (the fastest) or a `FILE.toml`.

    Raises:
        TrainpaceError: If there is no such suite, or the file has mistakes.
    """
    if name == "classic":
        return tuple(SuiteItem(spec=spec, batches=BATCHES) for spec in CLASSIC)
    if name == "small":
        return tuple(SuiteItem(spec=spec, batches=SMALL_BATCHES) for spec in SMALL)
    if name.endswith(".toml"):
        return read_suite(name)
    hint = f"Suites: {', '.join(SUITES)}, or a FILE.toml of your own."
    raise UnknownName("suite", name, SUITES, hint)


def read_suite(path: str) -> tuple[SuiteItem, ...]:
    """The items of a TOML file, every key checked."""
    tables = toml_of(read_bytes(path), path)
    tasks = tables.pop("task", None)
    if tables:
        raise UnknownName(
            f"key in {path}", min(tables), ["task"], "A suite is a list of [[task]] tables."
        )
    if (
        not isinstance(tasks, list)
        or not tasks
        or not all(isinstance(task, dict) for task in tasks)
    ):
        raise UnreadableInput(
            f"{path} has no tasks.", 'Write [[task]] and below it model = "resnet50".'
        )
    return tuple(_item(task, f"task {i + 1} of {path}") for i, task in enumerate(tasks))


def _item(task: dict[str, Any], where: str) -> SuiteItem:
    for key in task:
        if key not in _KEYS:
            raise UnknownName(f"key in {where}", key, _KEYS, f"Keys: {', '.join(_KEYS)}.")
    spec = task.get("model")
    if not isinstance(spec, str) or not spec.strip():
        raise TrainpaceError(
            f"{where} names no model.", 'Write model = "resnet50", or another model spec.'
        )
    for key, choices in (("precision", PRECISIONS), ("optimizer", tuple(OPTIMIZERS))):
        if key in task and task[key] not in choices:
            hint = f"{key.capitalize()}s: {', '.join(choices)}."
            raise UnknownName(f"{key} in {where}", str(task[key]), choices, hint)
    batch = task.get("batch", BATCHES)
    sizes = batch if isinstance(batch, list | tuple) else [batch]
    if not sizes or not all(_is_count(size) for size in sizes):
        raise TrainpaceError(
            f"batch of {where} is {batch!r}; it must be a whole number from 1 to {LARGEST_BATCH},"
            " or a list of such.",
            "Write batch = 8 or batch = [1, 2, 4].",
        )
    length = task.get("sequence_length")
    if length is not None and not _is_count(length):
        raise TrainpaceError(
            f"sequence_length of {where} is {length!r}; it must be a whole number from 1."
        )
    return SuiteItem(
        spec=spec,
        batches=tuple(sorted(set(sizes))),
        precision=task.get("precision", "fp32"),
        optimizer=task.get("optimizer"),
        sequence_length=length,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_BATCH

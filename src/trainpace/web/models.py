"""The models that what-if knows: the built-in ones, traced once in a process of their own, and workloads that the user saved.

No code of a user's is run: a name is either in a list that this package brings, or a file of numbers in one folder.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from pathlib import Path
from typing import get_args

from trainpace.errors import TrainpaceError, UnknownName
from trainpace.records import load, save
from trainpace.trace import load_workload
from trainpace.workload import PLAIN, Form, Workload

BUILT_IN = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "mobilenet_v2", "vgg11", "vgg13", "vgg16", "vgg19",
)  # fmt: skip
MOST_BYTES = 64 * 2**20
MOST_KEPT = 16
MOST_LISTED = 500
MOST_TRACING = 4
"""Requests that wait for a trace: a browser asks twice for a model just chosen. Half of the threads are left for other pages."""
FORMS: tuple[Form, ...] = get_args(Form)


class Busy(TrainpaceError):
    """As many as may wait for a trace do: status 503."""


class Models:
    """The workloads in `folder` by their file names, and the built-in ones, whose traces are kept in ``folder/built-in``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: OrderedDict[tuple[str, int, int], Workload] = OrderedDict()
        self._unsaved: dict[str, Workload] = {}
        self._lock = threading.Lock()
        self._tracing = threading.Lock()
        self._places = threading.BoundedSemaphore(MOST_TRACING)

    def saved(self) -> list[str]:
        """Names of the files of workloads, without their ending. Links that lead out of the folder are left out."""
        try:
            root = self._folder.resolve(strict=True)
            found = [p.stem for p in root.glob("*.json") if p.is_file() and p.resolve().parent == root]
        except OSError:
            return []
        return sorted(found)

    def get(self, name: str) -> Workload:
        """The workload of that name. Raises UnknownName, Busy, or TrainpaceError for a file that holds none."""
        saved = self.saved()
        if name in saved:
            return self._read(self._folder / f"{name}.json")
        if name in BUILT_IN:
            return self._traced(name)
        raise UnknownName("model", name, (*BUILT_IN, *saved), "See docs/serve.md for how to add one.")

    def _traced(self, name: str) -> Workload:
        file = self._folder / "built-in" / f"{name}.json"
        found = self._kept_trace(name, file)
        if found is not None:
            return found
        if not self._places.acquire(blocking=False):
            raise Busy("a model is being traced; ask again in a moment.")
        try:
            with self._tracing:  # one at a time: a second request for the same finds the trace
                found = self._kept_trace(name, file)
                if found is None:
                    found = load_workload(name, FORMS, PLAIN)
                    try:
                        file.parent.mkdir(parents=True, exist_ok=True)
                        save(found, file)
                    except (OSError, TrainpaceError):  # a folder that cannot be written
                        self._unsaved[name] = found
                return found
        finally:
            self._places.release()

    def _kept_trace(self, name: str, file: Path) -> Workload | None:
        """None: not traced yet, or by another version."""
        with contextlib.suppress(TrainpaceError):
            return self._read(file)
        return self._unsaved.get(name)

    def _read(self, file: Path) -> Workload:
        try:
            stat = file.stat()
        except OSError:
            raise TrainpaceError(f"{file.name} is not there.") from None
        if stat.st_size > MOST_BYTES:
            raise TrainpaceError(f"{file.name} is larger than {MOST_BYTES // 2**20} MiB, and so no workload.")
        key = (str(file), stat.st_mtime_ns, stat.st_size)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        try:
            workload = load(file, Workload)
        except TrainpaceError as error:
            raise TrainpaceError(error.message.replace(str(file), file.name), error.hint) from None
        with self._lock:
            self._kept[key] = workload
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return workload

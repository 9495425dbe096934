"""The models that what-if knows: the built-in ones, whose traces are packaged, and workloads that the user saved.

No code of a user's is run: a name is either in a list that this package brings, or a file of numbers in one folder.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from trainpace.errors import TrainpaceError, UnknownName
from trainpace.records import load
from trainpace.trace import load_workload
from trainpace.workload import PLAIN, Form, Workload

BUILT_IN = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "mobilenet_v2", "vgg11", "vgg13", "vgg16", "vgg19",
)  # fmt: skip
MOST_BYTES = 64 * 2**20
MOST_CACHED = 16
MOST_LISTED = 500
FORMS: tuple[Form, ...] = get_args(Form)


class Models:
    """The workloads in `folder` by their file names, and the built-in ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workloads: OrderedDict[tuple[str, int, int], Workload] = OrderedDict()
        self._lock = threading.Lock()

    def saved(self) -> list[str]:
        """Names of the files of workloads, without their ending. Links that lead out of the folder are left out."""
        try:
            root = self._folder.resolve(strict=True)
            names = [p.stem for p in root.glob("*.json") if p.is_file() and p.resolve().parent == root]
        except OSError:
            return []
        return sorted(names)

    def get(self, name: str) -> Workload:
        """The workload of that name. Raises UnknownName, or TrainpaceError for a file that holds none."""
        saved = self.saved()
        if name in saved:
            return self._read(self._folder / f"{name}.json")
        if name in BUILT_IN:
            return self._cached((name, 0, 0), lambda: load_workload(name, FORMS, PLAIN))
        raise UnknownName("model", name, (*BUILT_IN, *saved), "See docs/serve.md for how to add one.")

    def _read(self, file: Path) -> Workload:
        try:
            stat = file.stat()
        except OSError:
            raise TrainpaceError(f"{file.name} is not there.") from None
        if stat.st_size > MOST_BYTES:
            raise TrainpaceError(f"{file.name} is larger than {MOST_BYTES // 2**20} MiB, and so no workload.")

        def loaded() -> Workload:
            try:
                return load(file, Workload)
            except TrainpaceError as error:
                raise TrainpaceError(error.message.replace(str(file), file.name), error.hint) from None

        return self._cached((str(file), stat.st_mtime_ns, stat.st_size), loaded)

    def _cached(self, key: tuple[str, int, int], make: Callable[[], Workload]) -> Workload:
        with self._lock:
            if key in self._workloads:
                self._workloads.move_to_end(key)
                return self._workloads[key]
        workload = make()
        with self._lock:
            self._workloads[key] = workload
            while len(self._workloads) > MOST_CACHED:
                self._workloads.popitem(last=False)
        return workload

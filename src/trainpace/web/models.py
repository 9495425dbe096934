"""The models that what-if knows: the built-in ones, whose traces are packaged, and workloads that the user saved.

No code of a user's is run: a name is either in a list that this package brings, or a file of numbers in one folder.
"""

from functools import lru_cache
from pathlib import Path

from trainpace.errors import TrainpaceError, UnknownName
from trainpace.forecast import Forecaster
from trainpace.records import load
from trainpace.trace import load_workload
from trainpace.verbs.serve import forecaster_of
from trainpace.verbs.training import EVERY_FORM
from trainpace.workload import PLAIN, Workload

BUILT_IN = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "mobilenet_v2", "vgg11", "vgg13", "vgg16", "vgg19",
)  # fmt: skip
MOST_BYTES = 64 * 2**20
MOST_CACHED = 16
MOST_LISTED = 500


class Models:
    """The workloads in `folder` by their file names, and the built-in ones, each with a forecaster that all requests share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def saved(self) -> list[str]:
        """Names of the files of workloads, without their ending. Links that lead out of the folder are left out."""
        try:
            root = self._folder.resolve(strict=True)
            names = [p.stem for p in root.glob("*.json") if p.is_file() and p.resolve().parent == root]
        except OSError:
            return []
        return sorted(names)

    def get(self, name: str) -> Forecaster:
        """The model of that name. Raises UnknownName, or TrainpaceError for a file that holds no workload."""
        saved = self.saved()
        if name not in saved and name not in BUILT_IN:
            raise UnknownName("model", name, (*BUILT_IN, *saved), "See docs/serve.md for how to add one.")
        if name not in saved:
            return _built_in(name)
        file = self._folder / f"{name}.json"
        try:
            stat = file.stat()
        except OSError:
            raise TrainpaceError(f"{file.name} is not there.") from None
        if stat.st_size > MOST_BYTES:
            raise TrainpaceError(f"{file.name} is larger than {MOST_BYTES // 2**20} MiB, and so no workload.")
        return _read(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(MOST_CACHED)
def _built_in(name: str) -> Forecaster:
    return forecaster_of(load_workload(name, EVERY_FORM, PLAIN))


@lru_cache(MOST_CACHED)
def _read(file: Path, mtime_ns: int, size: int) -> Forecaster:
    """The workload in a file that is read again when its time or size changes."""
    try:
        return forecaster_of(load(file, Workload))
    except TrainpaceError as error:
        raise TrainpaceError(error.message.replace(str(file), file.name), error.hint) from None

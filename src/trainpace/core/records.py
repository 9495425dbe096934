"""Define records, and write files safely.

Records are frozen and keyword-only. They are validated when they are created, and can be written as
JSON without loss. In a file, a record is one JSON object with its name and schema version:
``{"record": "Schedule", "schema_version": 1, ...}``. Newer versions are rejected.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

import msgspec

from trainpace.core.errors import TrainpaceError, UnreadableInput, os_reason
from trainpace.core.intake import read_bytes

SCHEMA_VERSION = 1


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen value with named fields. Subclasses validate their fields in ``__post_init__``."""


def check_fields(
    record: Record, names: Iterable[str], holds: Callable[[Any], bool], need: str
) -> None:
    """Check the values of several fields of a record.

    Args:
        record: The record.
        names: Names of the fields.
        holds: Function that returns True for a valid value.
        need: Description of valid values, for the error.

    Raises:
        TrainpaceError: For the first field with an invalid value.
    """
    for name in names:
        value = getattr(record, name)
        if value is not None and not holds(value):
            raise TrainpaceError(f"`{name}` is {value}; it must be {need}.")


class Table:
    """Base class of records that can be converted to rows, for example to a pandas DataFrame."""

    __slots__ = ()

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return each row as a dict of plain values by column."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            TrainpaceError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise TrainpaceError(
                "to_pandas() needs pandas.", "pip install 'trainpace[pandas]'."
            ) from None
        return pandas.DataFrame(self.to_dicts())


R = TypeVar("R", bound=Record)


def common_fields(source: Record, kind: type[Record]) -> dict[str, Any]:
    """Return the values of `source` in the fields that records of another kind have too."""
    names = [name for name in kind.__struct_fields__ if name in source.__struct_fields__]
    return {name: getattr(source, name) for name in names}


def to_jsonable(record: Record | Sequence[Record]) -> Any:
    """Return one or several records as plain dicts, lists and numbers.

    The name of a record and the schema version come first.
    """
    if isinstance(record, list | tuple):
        return [to_jsonable(one) for one in record]
    fields: dict[str, Any] = msgspec.to_builtins(record, enc_hook=_encode_array)
    return {"record": type(record).__name__, "schema_version": SCHEMA_VERSION, **fields}


def to_json(record: Record, indent: int = 0) -> str:
    """Return a record as JSON text with `indent` spaces per level. 0 means one line."""
    encoded = msgspec.json.encode(to_jsonable(record))
    return (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()


def from_json(text: str | bytes, kind: type[R], source: str = "the JSON text") -> R:
    """Read a record from JSON text.

    Args:
        text: The text.
        kind: Class of the record.
        source: Name of the text, for errors.

    Raises:
        UnreadableInput: If the text is not such a record.
    """
    try:
        data = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableInput(f"{source} is not valid JSON ({error}).") from None
    except RecursionError:
        raise UnreadableInput(f"{source} is nested too deeply to be a {kind.__name__}.") from None
    if not isinstance(data, dict):
        raise UnreadableInput(f"{source} is not a JSON object.")
    found, version = data.pop("record", None), data.pop("schema_version", None)
    if found != kind.__name__:
        raise UnreadableInput(f"{source} holds {found or 'no record'!r}, not a {kind.__name__}.")
    if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
        raise UnreadableInput(
            f"{source} has schema version {version!r}; this trainpace reads 1 to {SCHEMA_VERSION}.",
            "Update trainpace, or make the file again.",
        )
    try:
        return msgspec.convert(data, kind, dec_hook=decode_array)
    except msgspec.ValidationError as error:
        raise UnreadableInput(f"{source} is not a valid {kind.__name__}: {error}.") from None


def from_package(file: str, kind: type[R]) -> R:
    """Read a record from a packaged JSON file. `file` is its path below src/trainpace."""
    return from_json(read_bytes(Path(__file__).parents[1] / file), kind, f"trainpace's own {file}")


def load(path: str | os.PathLike[str], kind: type[R]) -> R:
    """Read a record from a file."""
    return from_json(read_bytes(path), kind, source=str(path))


def save(record: Record, path: str | os.PathLike[str]) -> None:
    """Write a record to a file. If it fails, the previous file remains."""
    write_whole(path, to_json(record) + "\n")


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write text to a file atomically: readers see either the old or the new content."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def make_folder(path: Path) -> None:
    """Create a folder and its parents.

    Raises:
        TrainpaceError: If the file system refuses.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write_into(path, error) from None


def cannot_write_into(folder: Path, error: OSError) -> TrainpaceError:
    """Return the error for a folder into which no file can be written."""
    return TrainpaceError(f"cannot write into {folder}: {os_reason(error)}.")


@contextlib.contextmanager
def written_aside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new file in the folder of `path` that replaces `path` when the context ends.

    After an error, the new file is removed. A symbolic link remains a link, and a file keeps its
    mode.

    Raises:
        UnreadableInput: If the file system refuses, or `path` is a device or a pipe.
    """
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            raise UnreadableInput(
                f"cannot write {target}: not a regular file.", "Give the path of a file."
            )
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        os.close(handle)
        aside = Path(name)
        try:
            yield aside
            aside.chmod(0o666 & ~_umask() if mode is None else stat.S_IMODE(mode))
            aside.replace(target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UnreadableInput(f"cannot write {os.fspath(path)}: {os_reason(error)}.") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _encode_array(value: Any) -> object:
    if type(value).__module__ == "numpy":
        return value.tolist()
    raise TypeError(
        f"cannot write a {type(value).__name__} as JSON"
    )  # a bug: records hold plain fields and arrays


def decode_array(kind: type, value: object) -> object:
    """Decode arrays of numbers for msgspec (`dec_hook`). Raises TypeError for other arrays."""
    import numpy as np  # imported late, because some commands need no arrays

    if kind is np.ndarray:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError("not an array of numbers")
        return array
    raise TypeError(f"the type {kind.__name__} cannot be read from JSON")

"""Files from outside: the one door for what a user hands over. It is measured before it is read, and read before it is believed.

Only regular files of a stated size at most are opened, so that a device, a pipe without a writer or a sparse file cannot hold a
command or fill the memory. Text is UTF-8. Whatever is wrong with a file is an `UnreadableInput` that names it.
"""

import contextlib
import io
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from trainpace.core.errors import UnreadableInput, os_reason

if TYPE_CHECKING:
    import sqlite3

MOST_BYTES = 1 << 28
"""256 MiB. The workload of a model of 405 billion parameters takes a few."""
MOST_TOML_BYTES = 1 << 22
"""tomllib takes a second for each of them."""
MOST_UNPACKED_BYTES = 1 << 36
"""64 GiB: what is read piece by piece is never held whole, so that only time sets a limit; a bomb of zeros ends here."""
PIECE_BYTES = 1 << 22
GZIP, SQLITE = b"\x1f\x8b", b"SQLite format 3\x00"
"""What such files begin with."""
DEEPEST = 100
"""Levels of nesting, which what reads the content follows by recursion."""
LARGEST_INTEGER = 10**300
"""A larger one is no float."""
LONGEST_KEY = 32
"""Parts of a dotted key of TOML; tomllib's time and memory grow with the square of their number."""


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A regular file, open for reading. Raises UnreadableInput for one that is missing, not readable or of another kind."""
    name = os.fspath(path)
    try:
        handle = os.open(
            path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
        )  # opening a pipe would wait for its writer
        file = open(handle, "rb")  # noqa: SIM115
    except OSError as error:
        raise UnreadableInput(f"cannot read {name}: {os_reason(error)}.") from None
    except ValueError as error:  # a NUL byte in the name
        raise UnreadableInput(f"cannot read {name!r}: {error}.") from None
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UnreadableInput(
                f"cannot read {name}: it is a device or a pipe.",
                "Write it to a file first, and name that.",
            )
        yield file


@contextlib.contextmanager
def opened_text(path: str | os.PathLike[str], newline: str | None = None) -> Iterator[TextIO]:
    """A text file of any size in UTF-8, with or without a byte order mark, to be read piece by piece: a table, a log. Raises
    UnreadableInput as `opened` does; text in another encoding raises UnicodeDecodeError where it is read.
    """
    with (
        opened(path) as file,
        io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text,
    ):
        yield text


def read_bytes(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a regular file. Raises UnreadableInput as `opened` does, and for a file that is larger."""
    with opened(path) as file:
        too_large = os.fstat(file.fileno()).st_size > most_bytes
    content = (
        b"" if too_large else first_bytes(path, most_bytes + 1)
    )  # one that grows meanwhile too
    if too_large or len(content) > most_bytes:
        raise UnreadableInput(
            f"cannot read {os.fspath(path)}: it is larger than {most_bytes >> 20} MiB."
        )
    return content


def pieces(path: str | os.PathLike[str], most_bytes: int = MOST_UNPACKED_BYTES) -> Iterator[bytes]:
    """The content of a regular file of any size, piece by piece, unpacked where it is compressed by gzip.

    Raises UnreadableInput as `opened` does, and for an archive that is damaged, ends too early or holds more than `most_bytes`.
    """
    import gzip  # late, as few commands need it
    import zlib

    with opened(path) as file:
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        stream: Any = gzip.GzipFile(fileobj=file) if packed else file
        taken = 0
        while True:
            try:
                piece = stream.read(PIECE_BYTES)
            except EOFError:
                raise UnreadableInput(
                    f"{os.fspath(path)} is cut short: its compressed content has no end."
                ) from None
            except (gzip.BadGzipFile, zlib.error):
                raise UnreadableInput(
                    f"{os.fspath(path)} is damaged: it cannot be unpacked."
                ) from None
            except OSError as error:
                raise UnreadableInput(
                    f"cannot read {os.fspath(path)}: {os_reason(error)}."
                ) from None
            if not piece:
                return
            taken += len(piece)
            if taken > most_bytes:
                raise UnreadableInput(
                    f"cannot read {os.fspath(path)}: it holds more than {most_bytes >> 20} MiB."
                )
            yield piece


@contextlib.contextmanager
def opened_database(path: str | os.PathLike[str]) -> Iterator["sqlite3.Connection"]:
    """A SQLite file, open for reading alone: nothing is written into it or beside it. Text that is no UTF-8 is shown with marks
    in its place. Raises UnreadableInput as `opened` does, and for what is no such file or damaged, also while it is read.
    """
    import sqlite3

    if first_bytes(path, len(SQLITE)) != SQLITE:
        raise UnreadableInput(f"{os.fspath(path)} is not a SQLite database.")
    address = f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            connection.execute("PRAGMA trusted_schema = OFF")
            yield connection
    except UnicodeDecodeError:  # of sqlite3's own message, which quotes the file
        raise UnreadableInput(
            f"cannot read {os.fspath(path)} as a database: its schema is damaged."
        ) from None
    except sqlite3.Error as error:
        raise UnreadableInput(
            f"cannot read {os.fspath(path)} as a database: {_reason(error)}."
        ) from None


def first_bytes(path: str | os.PathLike[str], count: int = 64) -> bytes:
    """The beginning of a regular file of any size."""
    with opened(path) as file:
        try:
            return file.read(count)
        except OSError as error:
            raise UnreadableInput(f"cannot read {os.fspath(path)}: {os_reason(error)}.") from None


def last_bytes(path: str | os.PathLike[str], count: int) -> bytes:
    """The end of a regular file of any size."""
    with opened(path) as file:
        try:
            file.seek(max(0, os.fstat(file.fileno()).st_size - count))
            return file.read(count)
        except OSError as error:
            raise UnreadableInput(f"cannot read {os.fspath(path)}: {os_reason(error)}.") from None


def read_text(path: str | os.PathLike[str]) -> str:
    """A text file in UTF-8. Raises UnreadableInput for anything else."""
    return _text(read_bytes(path), os.fspath(path))


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds. Raises UnreadableInput for a file that cannot be read, or is not JSON."""
    return json_of(read_bytes(path), os.fspath(path))


def json_of(text: str | bytes, source: str, **options: Any) -> Any:
    """What JSON text holds; `options` are json.loads'. Raises UnreadableInput, which names `source`."""
    text = _text(text, source).removeprefix("\ufeff") if isinstance(text, bytes) else text
    try:
        data = json.loads(text, **options)
    except UnreadableInput:  # of an option's
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{source} is not valid JSON ({_reason(error)}).") from None
    _check_values(data, source)
    _check_text(text, data, source)
    return data


def toml_of(text: str | bytes, source: str) -> dict[str, Any]:
    """What TOML text holds. Raises UnreadableInput, which names `source`."""
    text = _text(text, source) if isinstance(text, bytes) else text
    if len(text) > MOST_TOML_BYTES:
        raise UnreadableInput(
            f"cannot read {source}: it is larger than {MOST_TOML_BYTES >> 20} MiB."
        )
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") >= LONGEST_KEY and _KEY.match(line):
            raise UnreadableInput(
                f"{source} line {number} has a key of more than {LONGEST_KEY} parts."
            )
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{source} is not valid TOML ({_reason(error)}).") from None
    _check_values(data, source)
    return data


_KEY = re.compile(rf"""\s*\[*\s*(?:[^\s.=#]+\s*\.\s*){{{LONGEST_KEY},}}""")


def _text(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise UnreadableInput(f"{source} is not a text file in UTF-8.") from None


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"it is nested more than {DEEPEST} levels deep"
    text = str(error)
    if "set_int_max_str_digits" in text:
        return "it holds an integer of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _check_text(text: str, data: Any, source: str) -> None:
    """JSON can escape half a character, which nothing can write or show."""
    if "\\u" in text:
        try:
            json.dumps(data, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise UnreadableInput(
                f"{source} holds half of a surrogate pair, which is no text."
            ) from None


def _check_values(data: Any, source: str) -> None:
    """Nesting, and integers that no number of a computation can hold."""
    level = [data]
    for _ in range(DEEPEST + 1):
        if any(type(value) is int and abs(value) > LARGEST_INTEGER for value in level):
            raise UnreadableInput(f"{source} holds an integer of hundreds of digits.")
        level = [
            item for value in level if isinstance(value, (dict, list)) for item in _items(value)
        ]
        if not level:
            return
    raise UnreadableInput(f"{source} is nested more than {DEEPEST} levels deep.")


def _items(value: dict[Any, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value

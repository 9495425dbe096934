"""Read users' files safely. All files from outside are read by this module.

Only regular files up to a size limit are opened. A device, a pipe without a writer or a sparse file
therefore cannot block a command or fill the memory. Text is UTF-8. Every problem with a file raises
an `UnreadableInput` that names the file.
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
"""Maximum size of a file: 256 MiB.

The workload of a model with 405 billion parameters has a few MiB.
"""
MOST_TOML_BYTES = 1 << 22
"""Maximum size of a TOML file: 4 MiB. tomllib takes one second per MiB."""
MOST_UNPACKED_BYTES = 1 << 36
"""Maximum decompressed size of a file that is read in pieces: 64 GiB.

Such files do not fill the memory, but without a limit a decompression bomb would never end.
"""
PIECE_BYTES = 1 << 22
GZIP, SQLITE = b"\x1f\x8b", b"SQLite format 3\x00"
"""First bytes of gzip and SQLite files."""
DEEPEST = 100
"""Maximum nesting of JSON and TOML. Code that reads the content uses recursion."""
LARGEST_INTEGER = 10**300
"""Largest accepted integer. Larger ones may not fit into a float."""
LONGEST_KEY = 32
"""Maximum parts of a dotted TOML key. tomllib's time and memory grow with their square."""


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a regular file for reading.

    Raises:
        UnreadableInput: If the path is not a regular file, or cannot be opened.
    """
    name = os.fspath(path)
    try:
        # without O_NONBLOCK, opening a pipe would wait for its writer
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        file = open(handle, "rb")  # noqa: SIM115
    except OSError as error:
        raise UnreadableInput(f"cannot read {name}: {os_reason(error)}.") from None
    except ValueError as error:  # the name contains a NUL byte
        raise UnreadableInput(f"cannot read {name!r}: {error}.") from None
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UnreadableInput(
                f"cannot read {name}: it is a device or a pipe.",
                "Write it to a file first, and give that.",
            )
        yield file


@contextlib.contextmanager
def opened_text(path: str | os.PathLike[str], newline: str | None = None) -> Iterator[TextIO]:
    """Open a UTF-8 text file of any size, with or without a byte order mark.

    Reading text in another encoding raises UnicodeDecodeError.
    """
    with (
        opened(path) as file,
        io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text,
    ):
        yield text


def read_bytes(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """Read a regular file.

    Raises:
        UnreadableInput: If `opened` raises it, or the file is larger than `most_bytes`.
    """
    with opened(path) as file:
        too_large = os.fstat(file.fileno()).st_size > most_bytes
    # the file may grow while it is read, so one more byte than allowed is requested
    content = b"" if too_large else first_bytes(path, most_bytes + 1)
    if too_large or len(content) > most_bytes:
        raise UnreadableInput(
            f"cannot read {os.fspath(path)}: it is larger than {most_bytes >> 20} MiB."
        )
    return content


def pieces(path: str | os.PathLike[str], most_bytes: int = MOST_UNPACKED_BYTES) -> Iterator[bytes]:
    """Yield the content of a regular file of any size in pieces. A gzip file is decompressed.

    Raises:
        UnreadableInput: If `opened` raises it, or the archive is damaged, truncated or too large.
    """
    import gzip  # imported late, because few commands need it
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
                    f"{os.fspath(path)} is truncated: its compressed content has no end."
                ) from None
            except (gzip.BadGzipFile, zlib.error):
                raise UnreadableInput(
                    f"{os.fspath(path)} is damaged: it cannot be decompressed."
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
    """Open a SQLite file read-only, without creating files next to it.

    Text that is not UTF-8 gets replacement characters.

    Raises:
        UnreadableInput: If `opened` raises it, or the file is not a SQLite file or is damaged. It
            is also raised while the database is read in this context.
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
    except UnicodeDecodeError:  # sqlite3's own message quotes the file
        raise UnreadableInput(
            f"cannot read {os.fspath(path)} as a database: its schema is damaged."
        ) from None
    except sqlite3.Error as error:
        raise UnreadableInput(
            f"cannot read {os.fspath(path)} as a database: {_reason(error)}."
        ) from None


def first_bytes(path: str | os.PathLike[str], count: int = 64) -> bytes:
    """Read the first bytes of a regular file of any size."""
    with opened(path) as file:
        try:
            return file.read(count)
        except OSError as error:
            raise UnreadableInput(f"cannot read {os.fspath(path)}: {os_reason(error)}.") from None


def last_bytes(path: str | os.PathLike[str], count: int) -> bytes:
    """Read the last bytes of a regular file of any size."""
    with opened(path) as file:
        try:
            file.seek(max(0, os.fstat(file.fileno()).st_size - count))
            return file.read(count)
        except OSError as error:
            raise UnreadableInput(f"cannot read {os.fspath(path)}: {os_reason(error)}.") from None


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a UTF-8 text file. Raises UnreadableInput if this is impossible."""
    return _text(read_bytes(path), os.fspath(path))


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file. Raises UnreadableInput if this is impossible."""
    return json_of(read_bytes(path), os.fspath(path))


def json_of(text: str | bytes, source: str, **options: Any) -> Any:
    """Parse JSON text.

    Args:
        text: The text.
        source: Name of the text, for errors.
        options: Keyword arguments of `json.loads`.

    Raises:
        UnreadableInput: If the text is not valid JSON.
    """
    text = _text(text, source).removeprefix("\ufeff") if isinstance(text, bytes) else text
    try:
        data = json.loads(text, **options)
    except UnreadableInput:  # raised by a hook in `options`
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{source} is not valid JSON ({_reason(error)}).") from None
    _check_values(data, source)
    _check_text(text, data, source)
    return data


def toml_of(text: str | bytes, source: str) -> dict[str, Any]:
    """Parse TOML text.

    Args:
        text: The text.
        source: Name of the text, for errors.

    Raises:
        UnreadableInput: If the text is not valid TOML.
    """
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
        return "it contains an integer of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _check_text(text: str, data: Any, source: str) -> None:
    """Reject lone surrogates, which JSON can escape but UTF-8 cannot encode."""
    if "\\u" in text:
        try:
            json.dumps(data, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise UnreadableInput(
                f"{source} contains half of a surrogate pair, which is not text."
            ) from None


def _check_values(data: Any, source: str) -> None:
    """Reject deep nesting, and integers that are too large for computations."""
    level = [data]
    for _ in range(DEEPEST + 1):
        if any(type(value) is int and abs(value) > LARGEST_INTEGER for value in level):
            raise UnreadableInput(f"{source} contains an integer of hundreds of digits.")
        level = [
            item
            for value in level
            if isinstance(value, (dict, list))
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise UnreadableInput(f"{source} is nested more than {DEEPEST} levels deep.")

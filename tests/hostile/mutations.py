"""Mutate valid files by their structure (values, keys, nesting) or their bytes, with a seed."""

from __future__ import annotations

import copy
import json
import random
import tomllib
from collections.abc import Callable
from typing import Any

import yaml

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[1A"
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**18,
    10**400,
    0.0,
    -0.0,
    1e-320,
    1e-308,
    5e-324,
    0.1,
    1e18,
    1e300,
    1.7e308,
    -1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "0",
    "-1",
    "nan",
    "1e999",
    "9" * 5000,
    "a" * 100_000,
    ESCAPES,
    "\x00",
    "\ud800",
    "\u202egnp.exe",
    "\ufeff",
    "../../../../etc/passwd",
    "/dev/zero",
    "file:///etc/passwd",
    "evil.py:task",
    "timm:resnet50",
    "${HOME}",
    "{{7*7}}",
    "%s%n",
    "$(touch pwned)",
    "`touch pwned`",
    "a\nb",
    "a\r\nb",
    [],
    {},
    [[]],
    [None],
    [0] * 1000,
    {"": ""},
    {"__class__": "x"},
    "True",
    "null",
    "1_000",
    "١٢",
    "0x10",
    "2026-13-45",
    "auto",
    "bf16",
    "fp32",
)
BYTES = (
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\r",
    b"\n\n",
    b"\x1b[2J",
    b"\xed\xa0\x80",
    b"{",
    b"[",
    b'"',
    b"'",
    b",",
    b":",
    b"=",
    b"#",
    b"\t",
    b"!!python/object/apply:os.system [x]",
    b"&a *a",
)
Parser = tuple[Callable[[bytes], Any], Callable[[Any], bytes]]


def toml_of(value: Any) -> bytes:
    """Return TOML of tables, arrays of tables and plain values. Other types become strings."""

    def plain(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, (int, float)):
            return str(value)
        if isinstance(value, list):
            return f"[{', '.join(map(plain, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{plain(str(k))} = {plain(v)}" for k, v in value.items()) + "}"
        return json.dumps("" if value is None else str(value))

    lines = []
    tables = {
        k: v
        for k, v in value.items()
        if isinstance(v, dict) or (isinstance(v, list) and v and isinstance(v[0], dict))
    }
    lines += [f"{plain(str(k))} = {plain(v)}" for k, v in value.items() if k not in tables]
    for key, table in tables.items():
        for one in [table] if isinstance(table, dict) else table:
            lines.append(
                f"[{plain(str(key))}]" if isinstance(table, dict) else f"[[{plain(str(key))}]]"
            )
            lines += (
                [f"{plain(str(k))} = {plain(v)}" for k, v in one.items()]
                if isinstance(one, dict)
                else []
            )
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def csv_of(rows: list[list[Any]]) -> bytes:
    lines = [
        ",".join(str("" if v is None else v) for v in row) if isinstance(row, list) else str(row)
        for row in rows
    ]
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


PARSERS: dict[str, Parser] = {
    "json": (json.loads, lambda v: json.dumps(v).encode("utf-8", "surrogatepass")),
    "jsonl": (
        lambda b: [json.loads(line) for line in b.splitlines() if line.strip()],
        lambda v: "\n".join(map(json.dumps, v if isinstance(v, list) else [v])).encode(
            "utf-8", "surrogatepass"
        ),
    ),
    "toml": (lambda b: tomllib.loads(b.decode()), toml_of),
    "yaml": (
        yaml.safe_load,
        lambda v: json.dumps(v).encode("utf-8", "surrogatepass"),
    ),  # JSON is YAML
    "csv": (lambda b: [line.split(",") for line in b.decode().splitlines()], csv_of),
}


def mutant(example: bytes, form: str, rng: random.Random) -> bytes:
    """Return one mutated file.

    `form` names the parser of its structure. Other forms are changed byte by byte.
    """
    if form in PARSERS and rng.random() < 0.75:
        parse, write = PARSERS[form]
        try:
            tree = parse(example)
            for _ in range(rng.choice((1, 1, 1, 2, 5))):
                tree = _changed(tree, rng)
            return write(tree)
        except (
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
        ):  # this form cannot represent the tree
            pass
    return _bytes_changed(example, rng)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [
        path,
        *(place for key, value in list(items)[:200] for place in _places(value, (*path, key))),
    ]


def _changed(tree: Any, rng: random.Random) -> Any:
    tree = copy.deepcopy(tree)
    place = rng.choice(_places(tree))
    if not place:
        return (
            rng.choice((tree, [tree], {"a": tree}, rng.choice(VALUES)))
            if rng.random() < 0.3
            else tree
        )
    inside = tree
    for key in place[:-1]:
        inside = inside[key]
    key, old = place[-1], inside[place[-1]]
    kind = rng.random()
    if kind < 0.5:
        inside[key] = rng.choice(VALUES)
    elif kind < 0.6:
        del inside[key]
    elif kind < 0.7 and isinstance(inside, dict):
        inside[str(rng.choice(VALUES))[:200]] = inside.pop(key)
    elif kind < 0.8:
        deep: Any = old
        for _ in range(rng.choice((3, 99, 101, 500))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        inside[key] = deep
    elif kind < 0.9 and isinstance(old, (int, float)) and not isinstance(old, bool):
        near = 1 if abs(old) > 10**300 else old  # as a float it would be infinite
        inside[key] = rng.choice(
            (-old, near * 1e9, near * 1e-9, near + 0.5, repr(near), [old], old * 10**30)
        )
    elif isinstance(inside, list):
        inside.extend([copy.deepcopy(old)] * rng.choice((1, 3, 300)))
    else:
        inside[key] = [old, old]
    return tree


def _bytes_changed(example: bytes, rng: random.Random) -> bytes:
    data = bytearray(example)
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(8)
    if kind == 0:
        return bytes(data[:at])
    if kind == 1:
        for _ in range(rng.choice((1, 4, 64))):
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        data[at:at] = rng.choice(BYTES) * rng.choice((1, 2, 200, 5000))
    elif kind == 3:
        end = min(len(data), at + rng.choice((1, 10, 1000)))
        del data[at:end]
    elif kind == 4:
        return (
            bytes(data)
            .decode("utf-8", "replace")
            .encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-16-be")))
        )
    elif kind == 5:
        return bytes(data) * rng.choice((2, 10))
    elif kind == 6:
        return rng.randbytes(rng.choice((0, 1, 16, 4096)))
    else:
        other = rng.randrange(len(data) + 1)
        data[at:at] = data[min(at, other) : max(at, other)]
    return bytes(data)

"""A sample as columns: the tensors, arrays, pictures, numbers and texts in it, each as bytes or a plain value, and back."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from trainpace.core.errors import UserCodeError
from trainpace.core.records import Record

Kind = Literal["tensor", "array", "scalar", "image", "int", "float", "bool", "str", "bytes"]
SHAPED = frozenset({"tensor", "array", "scalar", "image"})
"""Kinds whose bytes need a shape to be read."""

_INT64 = range(-(2**63), 2**63)
_PLAIN = (bool, int, float, str, bytes)


class UnsupportedSample(ValueError):
    """A sample that holds something that no column can keep."""


class Field(Record):
    """One column. `dtype` is torch's or numpy's name of it, or a picture's mode."""

    name: str
    kind: Kind
    dtype: str = ""


class Layout(Record):
    """What every sample of a dataset looks like: its columns, and how tuples, lists and dicts nest them (JSON)."""

    structure: str
    fields: tuple[Field, ...]

    def builder(self) -> Callable[[Sequence[Any]], Any]:
        """A function that makes a sample (or a batch) of its columns' values."""
        return partial(_built, json.loads(self.structure))


class Encoded(NamedTuple):
    """A sample taken apart: bytes or plain values, one per column, and the shapes of those that have one."""

    layout: Layout
    values: list[Any]
    shapes: list[tuple[int, ...] | None]

    @property
    def size_bytes(self) -> int:
        return sum(len(v) if isinstance(v, bytes | str) else 8 for v in self.values)


def encode(sample: Any, layout: Layout | None = None) -> Encoded:
    """Take a sample apart. Its bytes are copied, so a dataset may use its buffers again.

    `layout` is that of the other samples: any other raises `UnsupportedSample`, as do None, objects and sparse tensors.
    """
    leaves: list[tuple[str, Any]] = []
    structure = _take_apart(sample, "", leaves)
    fields, values, shapes = [], [], []
    for name, leaf in leaves:
        kind, dtype, value, shape = _encode_leaf(spoken(name), leaf)
        fields.append(Field(name=name, kind=kind, dtype=dtype))
        values.append(value)
        shapes.append(shape)
    if layout is None:
        names = [name for name, _ in leaves]
        if not names:
            raise UnsupportedSample("the sample is empty")
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise UnsupportedSample(f"two parts of the sample have the name {twice!r}")
        layout = Layout(structure=json.dumps(structure), fields=tuple(fields))
    elif tuple(fields) != layout.fields or json.dumps(structure) != layout.structure:
        unequal = _unequal(structure, json.loads(layout.structure), "")
        raise UnsupportedSample(unequal or _difference(fields, layout.fields))
    return Encoded(layout, values, shapes)


def differing_columns(a: Encoded, b: Encoded) -> list[str]:
    """Names of the columns in which two encodings of one sample differ, bit by bit."""
    if a.layout != b.layout:
        return [f.name for f in a.layout.fields]
    return [
        f.name
        for f, x, y, s, t in zip(
            a.layout.fields, a.values, b.values, a.shapes, b.shapes, strict=True
        )
        if s != t or repr(x) != repr(y)
    ]


def spoken(name: str) -> str:
    """A column's name in a sentence: those of tuples and lists are numbers."""
    return f"part {name}" if name[:1].isdigit() else name


def _take_apart(value: Any, name: str, leaves: list[tuple[str, Any]]) -> Any:
    """The nesting: a leaf is its column's number."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise UnsupportedSample(f"{name or 'the sample'} is a dict whose keys are not all text")
        return [
            "dict",
            list(value),
            *(_take_apart(v, f"{name}.{k}" if name else k, leaves) for k, v in value.items()),
        ]
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [
            kind,
            *(
                _take_apart(v, f"{name}.{i}" if name else str(i), leaves)
                for i, v in enumerate(value)
            ),
        ]
    leaves.append((name or "sample", value))
    return len(leaves) - 1


def _built(node: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(node, int):
        return leaves[node]
    kind, *parts = node
    if kind == "dict":
        keys, *parts = parts
        return {key: _built(part, leaves) for key, part in zip(keys, parts, strict=True)}
    values = [_built(part, leaves) for part in parts]
    return tuple(values) if kind == "tuple" else values


def _encode_leaf(name: str, leaf: Any) -> tuple[Kind, str, Any, tuple[int, ...] | None]:
    # torch and PIL only where the user's code has loaded them: a worker without them starts a second sooner
    torch, image = sys.modules.get("torch"), sys.modules.get("PIL.Image")
    if torch is not None and isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided or leaf.is_quantized:
            raise UnsupportedSample(f"{name} is a sparse or quantized tensor")
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        dtype = str(leaf.dtype).removeprefix("torch.")
        return "tensor", dtype, flat.view(torch.uint8).numpy().tobytes(), tuple(leaf.shape)
    if isinstance(leaf, np.ndarray | np.generic):
        if leaf.dtype.kind not in "biufc":
            raise UnsupportedSample(f"{name} is an array of dtype {leaf.dtype}")
        kind: Kind = "array" if isinstance(leaf, np.ndarray) else "scalar"
        return kind, leaf.dtype.str, leaf.tobytes(), leaf.shape
    if image is not None and isinstance(leaf, image.Image):
        pixels = np.asarray(leaf)
        if leaf.mode not in ("L", "RGB", "RGBA", "I", "F"):
            raise UnsupportedSample(
                f"{name} is a picture of mode {leaf.mode}; convert it to RGB or L"
            )
        return "image", leaf.mode, pixels.tobytes(), pixels.shape
    if isinstance(leaf, int) and leaf not in _INT64:
        raise UnsupportedSample(f"{name} is an integer beyond 64 bits")
    for plain in _PLAIN:
        if isinstance(leaf, plain):
            return plain.__name__, "", plain(leaf), None  # type: ignore[return-value,arg-type]
    raise UnsupportedSample(f"{name} is a {type(leaf).__name__}, which no column can keep")


def _unequal(structure: Any, expected: Any, name: str) -> str | None:
    """A sentence on the first list whose length differs from that in the other samples; None where there is none."""
    if isinstance(structure, int) or isinstance(expected, int) or structure[0] != expected[0]:
        return None
    kind, *parts = structure
    keys: Sequence[Any] = range(len(parts))
    if kind == "dict":
        keys, *parts = parts
        expected = expected[1:]
        if keys != expected[0]:
            return None
    elif len(structure) != len(expected):
        return (
            f"{spoken(name) or 'it'} is a {kind} of {len(parts)}, in the other samples of"
            f" {len(expected) - 1}; make it an array or a tensor, whose shape may differ"
        )
    for key, part, other in zip(keys, parts, expected[1:], strict=True):
        if (difference := _unequal(part, other, f"{name}.{key}" if name else str(key))) is not None:
            return difference
    return None


def _difference(fields: Sequence[Field], expected: Sequence[Field]) -> str:
    for one, other in zip(fields, expected, strict=False):
        if (one.kind, one.dtype) != (other.kind, other.dtype):
            usual = f"{other.kind} {other.dtype}".rstrip()
            return (
                f"{spoken(one.name)} is {one.kind} {one.dtype}".rstrip()
                + f", in the other samples {usual}"
            )
    return (
        f"it has {len(fields)} parts in another arrangement than the other samples, which have"
        f" {len(expected)}"
    )


def spread(count: int, total: int) -> Sequence[int]:
    """`count` indices spread evenly over range(total), ends included; all of them where there are fewer."""
    if total <= count:
        return range(total)
    return [i * (total - 1) // max(count - 1, 1) for i in range(count)]


def timed_samples(
    dataset: Any, indices: Sequence[int], seconds: float
) -> Iterator[tuple[int, Encoded, float]]:
    """(index, sample, seconds to compute it) of as many indices as the time allows, without the bad samples.
    Raises `UserCodeError` where not one of them can be computed."""
    layout, reason = None, ""
    deadline = time.perf_counter() + seconds
    for index in indices:
        start = time.perf_counter()
        try:
            sample = dataset[index]
            spent = time.perf_counter() - start
            encoded = encode(sample, layout)
        except Exception as error:
            reason = f"sample {index}: {reason_of(error)}"
            continue
        layout = encoded.layout
        yield index, encoded, spent
        if time.perf_counter() > deadline:
            return
    if layout is None:
        raise UserCodeError(
            f"not one of {len(indices)} samples looked at could be computed ({reason})."
        )


def reason_of(error: Exception) -> str:
    """The reason why a sample is bad, in one line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, UnsupportedSample):
        return text
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__

"""What a loader gives, of whatever kind: how many samples it is, and copies of it with fewer."""

import copy
import sys
from typing import Any


def length_of(what: Any) -> int | None:
    """The length that a loader, a dataset or an iterator says it has; None where it says none."""
    try:
        return len(what)
    except Exception:
        return None


def size_of(batch: Any, deep: int = 3) -> int:
    """Samples in a batch: the first dimension of the first tensor in it; 0 without a tensor."""
    try:
        first: Any = (
            batch[0] if type(batch) is list else None
        )  # the most usual first: this is asked in every step
        if type(first) is sys.modules["torch"].Tensor and first.ndim:
            return int(first.shape[0])
        return _size_of(batch, deep)
    except Exception:  # a batch of the user's own kind, whose attributes may be anything
        return 0


def _size_of(batch: Any, deep: int) -> int:
    shape = getattr(batch, "shape", None) if not isinstance(batch, dict) else None
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    if deep and isinstance(batch, dict):
        batch = list(batch.values())
    elif deep and hasattr(batch, "data") and isinstance(batch.data, dict):
        batch = list(batch.data.values())
    if deep and isinstance(batch, list | tuple):
        return next((n for part in batch if (n := _size_of(part, deep - 1))), 0)
    return 0


def size_of_uncollated(item: Any) -> int:
    """Samples in what came of a loader that makes no batches itself (`batch_size=None`), whose dataset may make them: all parts
    of a batch are equally long, one of them has more dimensions, and none is a single number. Anything else is one sample.
    """
    try:
        sizes, dimensions = _sizes_of(item, 3)
    except Exception:
        return 0
    return sizes.pop() if len(sizes) == 1 and dimensions > 1 else int(bool(sizes))


def _sizes_of(item: Any, deep: int) -> tuple[set[int], int]:
    """The lengths of the parts, 0 for a single number, and the most dimensions that one has."""
    shape = getattr(item, "shape", None)
    if shape is not None:
        return {int(shape[0]) if len(shape) else 0}, len(shape)
    if isinstance(item, int | float):
        return {0}, 0
    if hasattr(item, "data") and isinstance(item.data, dict):  # a BatchEncoding of transformers
        item = item.data
    if not deep or not isinstance(item, dict | list | tuple):
        return set(), 0
    if isinstance(item, list | tuple) and all(
        isinstance(each, int | float) for each in item
    ):  # such as labels
        return {len(item)}, 1
    parts = [
        _sizes_of(part, deep - 1) for part in (item.values() if isinstance(item, dict) else item)
    ]
    return set().union(*(sizes for sizes, _ in parts)), max((most for _, most in parts), default=0)


def copy_of(value: Any, size: int, keep: int, device: Any = None) -> Any:
    """Copies of the tensors in new containers, which scripts may empty; `keep` of `size` samples; on a device."""
    if isinstance(value, dict):
        copied = copy.copy(value)
        for k, v in value.items():
            copied[k] = copy_of(v, size, keep, device)
        return copied
    if hasattr(value, "data") and isinstance(value.data, dict):  # a BatchEncoding of transformers
        return type(value)({k: copy_of(v, size, keep, device) for k, v in value.data.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copy_of(v, size, keep, device) for v in value))
    if isinstance(value, list | tuple):
        if keep != size and len(value) == size and not hasattr(value[0], "shape"):
            value = value[:keep]
        return type(value)(copy_of(v, size, keep, device) for v in value)
    if device is not None and hasattr(value, "is_floating_point"):
        value = value.to(device)
    shape = getattr(value, "shape", None)
    if keep != size and shape is not None and len(shape) and shape[0] == size:
        return value[:keep]
    return value

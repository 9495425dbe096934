"""Where a dataset holds its transforms, recognised by their names and types, so that any library's ``Compose`` is one.

A place is an attribute, list item or dict entry. The same transform may lie in several (torchvision's datasets keep their
`transform` again inside `transforms`): all are changed together, and put back.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_NAMES = ("transform", "target_transform", "transforms", "augment", "augmentation", "preprocess", "pipeline")
_DEPTH = 4


class Place(NamedTuple):
    """`container` holds the transform under `key`: an attribute, or an item where `is_item`. `kind` is the outermost name."""

    container: Any
    key: Any
    is_item: bool
    kind: str
    transform: Any


def find_places(dataset: Any) -> list[Place]:
    """Every place of every innermost transform, in the order in which they would run."""
    return list(_within(dataset, "", _DEPTH, set()))


@contextlib.contextmanager
def replaced(places: list[Place], wrap: Callable[[Place], Any]) -> Iterator[None]:
    """Put `wrap(place)`, called once for each transform, in every place of that transform, and the transforms back at the end."""
    wrapped: dict[int, Any] = {}
    changed: list[Place] = []
    try:
        for place in places:
            new = wrapped.get(id(place.transform))
            if new is None:
                new = wrapped[id(place.transform)] = wrap(place)
            with contextlib.suppress(AttributeError, TypeError):  # a frozen holder's transform counts as the rest
                _put(place, new)
                changed.append(place)
        yield
    finally:
        for place in changed:
            _put(place, place.transform)


def _put(place: Place, value: Any) -> None:
    if place.is_item:
        place.container[place.key] = value
    elif isinstance(getattr(place.container, "_modules", None), dict) and place.key in place.container._modules:
        place.container._modules[place.key] = value  # nn.Module refuses what is no module as a child by name
    else:
        setattr(place.container, place.key, value)


def _within(holder: Any, kind: str, depth: int, seen: set[int]) -> Iterator[Place]:
    if id(holder) in seen or depth == 0:
        return
    seen.add(id(holder))
    for name, value in _attributes(holder):
        inner_kind = kind or name
        if name in _NAMES or _is_composed(value):
            if value is not None:
                yield from _transforms(holder, name, False, inner_kind, value, seen)
        elif name in ("dataset", "datasets", "_dataset", "base"):
            for part in value if isinstance(value, list | tuple) else [value]:
                yield from _within(part, "", depth - 1, seen)


def _transforms(container: Any, key: Any, is_item: bool, kind: str, value: Any, seen: set[int]) -> Iterator[Place]:
    items = value if isinstance(value, list) else getattr(value, "transforms", None) if _is_composed(value) else None
    modules = getattr(value, "_modules", None)
    if isinstance(items, list):
        for i, item in enumerate(items):
            yield from _transforms(items, i, True, kind, item, seen)
    elif type(value).__name__ == "Sequential" and isinstance(modules, dict):
        for name, item in list(modules.items()):
            yield from _transforms(modules, name, True, kind, item, seen)
    elif type(value).__name__ == "StandardTransform":  # torchvision's pair of the two
        yield from _within(value, "", _DEPTH, seen)
    elif callable(value) and not isinstance(value, type):
        yield Place(container, key, is_item, kind, value)


def _is_composed(value: Any) -> bool:
    """A list of transforms that all run. One that chooses among them (RandomChoice, OneOf) is a transform of its own."""
    return isinstance(getattr(value, "transforms", None), list) and "Compose" in type(value).__name__


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    attributes = dict(getattr(holder, "__dict__", {}))
    modules = attributes.get("_modules")
    return list((attributes | modules if isinstance(modules, dict) else attributes).items())

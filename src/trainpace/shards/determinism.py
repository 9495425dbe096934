"""Check that a sample is the same whenever it is computed, and find the part that is random where it is not.

A part is random if it draws from the random numbers of Python, numpy or torch, or gives two results for one input. torch counts
only where the user's code has loaded it: a process without it starts a second sooner.
"""

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from trainpace.core.errors import TrainpaceError
from trainpace.core.worker import is_users
from trainpace.shards.samples import Encoded, differing_columns, encode, spoken

_SEEDS = (1, 20_011)
_MORE_SEEDS = range(2, 18)
_TRIALS = 18
_MOST_LINES = 20_000
_NAMES = (
    "transform",
    "target_transform",
    "transforms",
    "augment",
    "augmentation",
    "preprocess",
    "pipeline",
)
_DEPTH = 4
_HINT = (
    "Leave the random part, and what follows it, out of the dataset, and give both to"
    " ShardDataset(folder, transform=...), where they stay online."
)


class NotDeterministic(TrainpaceError):
    """A sample comes out differently when it is computed again."""


def computed_twice(dataset: Any, index: int) -> Encoded:
    """The sample, if it comes out the same under differently seeded generators of Python, numpy and torch.

    Raises `NotDeterministic`, naming the transform, the line or the field that is random. Exceptions of the dataset itself
    pass through.
    """
    first, drew = under_seed(_SEEDS[0], lambda: encode(dataset[index]))
    # with a random generator, two equal results may be chance: a flip happens only every second time
    for seed in (_SEEDS[1], *(_MORE_SEEDS if drew else ())):
        again, drew_again = under_seed(seed, lambda: encode(dataset[index]))
        differing = differing_columns(first, again)
        drew += [name for name in drew_again if name not in drew]
        if differing:
            raise NotDeterministic(_in_words(dataset, index, first, again, differing, drew), _HINT)
    return first


def _in_words(
    dataset: Any, index: int, a: Encoded, b: Encoded, differing: list[str], drew: list[str]
) -> str:
    fields = (
        "every part"
        if len(differing) == len(a.layout.fields) > 1
        else ", ".join(map(spoken, differing))
    )
    where = "" if a.layout.structure == "0" else f" in {fields},"
    message = (
        f"sample {index} comes out differently each time it is computed"
        f" ({f'{where}{_by_how_much(a, b)}'.strip(' ,')})"
    )
    if cause := _random_transform(dataset, index) or _drawing_line(dataset, index):
        return f"{message}: {cause}."
    if drew:
        return f"{message}: it draws from the generator of {' and '.join(drew)}."
    return (
        f"{message}, and not by a generator of Python, numpy or torch: by one of its own, the time,"
        " or what it did before."
    )


def _random_transform(dataset: Any, index: int) -> str | None:
    """The first transform in the dataset that gives two results for one input."""
    inputs: dict[int, Any] = {}

    def recorded(place: Place) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            inputs[id(place.transform)] = copy.deepcopy(values)
            return place.transform(*values)

        return call

    places = find_places(dataset)
    with replaced(places, recorded), contextlib.suppress(Exception), restored():
        dataset[index]
    for place in places:
        values = inputs.get(id(place.transform))
        if values is not None and gives_two_results(place.transform, values, {}, _TRIALS):
            return f"{place.name}, {place.position}, is random"
    return None


def _drawing_line(dataset: Any, index: int) -> str | None:
    """The line of the user's code during which a generator moved on, found by looking at the generators after every line."""
    message: str | None = None
    seen, before, state = 0, ("", 0, ""), states()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal message, seen, before, state
        file = frame.f_code.co_filename
        if message or seen >= _MOST_LINES or not is_users(file):
            return None
        seen += 1
        now = states()
        if before[1] and (names := moved(state, now)):
            name, line, function = before
            message = (
                f"{Path(name).name} line {line} ({function}) draws from the generator of"
                f" {' and '.join(names)}"
            )
        state, before = now, (file, frame.f_lineno, frame.f_code.co_name)
        return trace

    with restored(), contextlib.suppress(Exception):
        traced = sys.gettrace()
        sys.settrace(trace)
        try:
            dataset[index]
        finally:
            sys.settrace(traced)
    return message


def _by_how_much(a: Encoded, b: Encoded) -> str:
    for x, y, s, t in zip(a.values, b.values, a.shapes, b.shapes, strict=False):
        if s != t:
            return f" its shape: {s} and {t}"
        if isinstance(x, bytes) and isinstance(y, bytes) and x != y and len(x) == len(y):
            share = np.mean(np.frombuffer(x, np.uint8) != np.frombuffer(y, np.uint8))
            return f" in {share:.0%} of its bytes" if share >= 0.005 else " in a few of its bytes"
    return ""


def under_seed(value: int, work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The result of `work` under this seed, and the names of the generators that it drew from."""
    with restored():
        seed(value)
        before = states()
        result = work()
        return result, moved(before, states())


def states() -> dict[str, Any]:
    """The states by name, comparable with ==; equal before and after code that draws no random number."""
    of_numpy: Any = np.random.get_state()
    generators = {"Python": random.getstate(), "numpy": (of_numpy[1].tobytes(), *of_numpy[2:])}
    torch = sys.modules.get("torch")
    return (
        generators
        if torch is None
        else {**generators, "torch": torch.get_rng_state().numpy().tobytes()}
    )


def moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of the generators that were drawn from between two `states`."""
    return [name for name, state in after.items() if before.get(name, state) != state]


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the states at the end of the block."""
    torch = sys.modules.get("torch")
    before: list[tuple[Any, Any]] = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
    ]
    before += [] if torch is None else [(torch.set_rng_state, torch.get_rng_state())]
    try:
        yield
    finally:
        for restore, state in before:
            restore(state)


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(value)


def gives_two_results(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trials: int
) -> bool:
    """True where `call` gives different results for copies of one input under `trials` seeds; else or untried, False."""
    first: Any = None
    with restored(), contextlib.suppress(Exception):
        for trial in range(trials):
            copied_args, copied_kwargs = copy.deepcopy((args, kwargs))
            seed(trial)
            out = call(*copied_args, **copied_kwargs)
            if trial and not same(first, out):
                return True
            first = out if trial == 0 else first
    return False


def same(a: Any, b: Any) -> bool:
    """Equality of samples: tensors, arrays, pictures, numbers and text, in tuples, lists and dicts."""
    torch = sys.modules.get("torch")
    if type(a) is not type(b):
        return False
    if torch is not None and isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


# ---- where a dataset holds its transforms, recognised by their names and types, so that any library's ``Compose`` is one


class Place(NamedTuple):
    """`container` holds the transform under `key`: an attribute, or an item where `is_item`. `kind` is the outermost name;
    `position` is a phrase for messages, `branch` the path of the dataset that holds it.

    The same transform may lie in several places (torchvision's datasets keep their `transform` again inside `transforms`).
    """

    container: Any
    key: Any
    is_item: bool
    kind: str
    position: str
    transform: Any
    branch: str = ""

    @property
    def name(self) -> str:
        named = getattr(self.transform, "__name__", None) or type(self.transform).__name__
        return (
            f"lambda at line {self.transform.__code__.co_firstlineno}"
            if named == "<lambda>"
            else str(named)
        )

    def put(self, value: Any) -> None:
        modules = getattr(self.container, "_modules", None)
        if self.is_item:
            self.container[self.key] = value
        elif isinstance(modules, dict) and self.key in modules:
            modules[self.key] = value  # nn.Module refuses what is no module as a child by name
        else:
            setattr(self.container, self.key, value)


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
            if id(place.transform) not in wrapped:
                wrapped[id(place.transform)] = wrap(place)
            with contextlib.suppress(
                AttributeError, TypeError
            ):  # a frozen holder's transform counts as the rest
                place.put(wrapped[id(place.transform)])
                changed.append(place)
        yield
    finally:
        for place in changed:
            place.put(place.transform)


def _within(holder: Any, path: str, depth: int, seen: set[int]) -> Iterator[Place]:
    """The places in the attributes of a dataset, whose own `path` ends with a dot, and in the datasets that it holds."""
    if id(holder) in seen or depth == 0:
        return
    seen.add(id(holder))
    attributes = dict(getattr(holder, "__dict__", {}))
    modules = attributes.get("_modules")
    for name, value in list(
        (attributes | modules if isinstance(modules, dict) else attributes).items()
    ):
        inside = f"{path}{name}"
        if name in _NAMES or _is_composed(value):
            yield from _innermost(
                Place(holder, name, False, name, f"in {inside}", value, path), inside, seen
            )
    for held in held_datasets(holder):
        yield from _within(held.transform, f"{path}{held.position}.", depth - 1, seen)


def held_datasets(dataset: Any) -> Iterator[Place]:
    """The datasets that a dataset holds and gives samples of: Subset's, ConcatDataset's, those of wrappers of the user's own."""
    torch = sys.modules.get("torch")
    base = () if torch is None else torch.utils.data.Dataset
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        parts = value if isinstance(value, list) else [value]
        for number, part in enumerate(parts):
            if isinstance(part, base) or (
                name in ("dataset", "datasets", "_dataset", "base") and hasattr(part, "__getitem__")
            ):
                in_list = parts is value
                position = f"{name}[{number}]" if in_list else name
                yield Place(
                    parts if in_list else dataset,
                    number if in_list else name,
                    in_list,
                    name,
                    position,
                    part,
                )


def _innermost(place: Place, path: str, seen: set[int]) -> Iterator[Place]:
    """The places of the transforms that a transform is composed of, or its own."""
    value, kind = place.transform, type(place.transform).__name__
    items = value if isinstance(value, list) else value.transforms if _is_composed(value) else None
    if kind == "Sequential" and isinstance(getattr(value, "_modules", None), dict):
        items = value._modules
    if items is not None:
        attribute = ".transforms" if _is_composed(value) else ""
        pairs = list(items.items() if isinstance(items, dict) else enumerate(items))
        for number, (key, item) in enumerate(pairs, 1):
            position = f"transform {number} of {len(pairs)} in {path}"
            inner = Place(items, key, True, place.kind, position, item, place.branch)
            yield from _innermost(inner, f"{path}{attribute}[{key}]", seen)
    elif kind == "StandardTransform":  # torchvision's pair of the two
        yield from _within(value, f"{path}.", _DEPTH, seen)
    elif callable(value) and not isinstance(value, type):
        yield place


def _is_composed(value: Any) -> bool:
    """A list of transforms that all run. One that chooses among them (RandomChoice, OneOf) is a transform of its own."""
    chooses = any(word in type(value).__name__ for word in ("Random", "Choice", "OneOf", "SomeOf"))
    return isinstance(getattr(value, "transforms", None), list) and not chooses

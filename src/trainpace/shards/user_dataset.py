"""Loading of the user's dataset, its fingerprint, and checks for randomness.

A part of a dataset is random if it draws from the global random generators of Python, numpy or
torch, or gives two results for one input. This module does not import torch, because a process
without torch starts a second sooner. It checks torch only if the user's code has imported it.
"""

import ast
import contextlib
import copy
import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainpace.core.errors import TrainpaceError
from trainpace.core.host import drawn_from, random_states
from trainpace.core.worker import is_users, load_name
from trainpace.shards import opened_files
from trainpace.shards.files import (
    Encoded,
    Fingerprint,
    UnsupportedSample,
    differing_columns,
    encode,
    spoken,
    spread,
)
from trainpace.workload import ModelSpec

WANTED = (
    "NAME is a dataset, a DataLoader or a task (model, loss, optimizer, dataset), its class, or a"
    " function that returns it."
)
_LOOKED_AT = 3
_SETTINGS_DEPTH = 4
SETTINGS = "dataset settings"


def made_by(target: str) -> Any:
    """Return the object FILE.py:NAME, or its result if it is a class or a function.

    Exceptions of the user's code are not caught.
    """
    spec = ModelSpec.of(target)
    if not spec.runs_code:
        raise TrainpaceError(f"{target!r} is not FILE.py:NAME.", WANTED)
    named = load_name(Path(spec.path), spec.name)
    if not isinstance(named, type) and (hasattr(named, "__getitem__") or not callable(named)):
        return named
    return named()


def is_task(made: Any) -> bool:
    """Return True if the object is a task: (model, loss, optimizer, dataset)."""
    return isinstance(made, tuple | list) and len(made) == 4 and hasattr(made[0], "parameters")


def load_dataset(target: str) -> Any:
    """Return the map-style dataset of FILE.py:NAME.

    NAME may be a dataset, a DataLoader, a task, or a function that returns one of them. A dataset
    can separate its random part: if it has an attribute `offline`, that is the deterministic
    dataset to precompute. Its attribute `online` is then a function of one sample that runs in
    training.
    """
    made = made_by(target)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(made, torch.utils.data.DataLoader):
        made = made.dataset
    dataset = made[3] if is_task(made) else made
    if hasattr(offline := getattr(dataset, "offline", None), "__getitem__"):
        dataset = offline
    length_of(dataset, target)
    return dataset


def length_of(dataset: Any, name: str) -> int:
    """Return the number of samples of a map-style dataset.

    Raises:
        TrainpaceError: If the object is not a map-style dataset, or has no samples.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dataset, torch.utils.data.IterableDataset):
        hint = "Name the map-style dataset behind it."
        raise TrainpaceError(f"{name} is an IterableDataset, which cannot be indexed.", hint)
    numbered = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not numbered or isinstance(dataset, str | bytes | dict):
        kind = type(dataset).__name__
        raise TrainpaceError(
            f"{name} is of type {kind}, which is no dataset with __len__ and __getitem__.", WANTED
        )
    if len(dataset) < 1:
        raise TrainpaceError(f"{name} is a dataset of no samples.")
    return len(dataset)


def settings_of(dataset: Any) -> str:
    """Return a hash of the settings in a dataset's attributes, including lists of file names.

    Call this before using the dataset, because caches and counters would change the hash.
    """
    return _hash(_settings(dataset, _SETTINGS_DEPTH))


def fingerprint(dataset: Any, target: str, settings: str) -> Fingerprint:
    """Return the fingerprint of the inputs that the shards of this dataset depend on.

    Code is hashed as syntax trees, so comments and line breaks do not matter. The source consists
    of the number of samples, the dataset's `settings`, and the size and modification time of the
    files that three of its samples open.
    """
    total = len(dataset)
    with opened_files.recorded() as opened:
        for index in spread(_LOOKED_AT, total):
            with contextlib.suppress(Exception):  # bad samples are reported when they are computed
                dataset[index]
    source = {"number of samples": str(total), SETTINGS: settings}
    root = Path(ModelSpec.of(target).path).resolve().parent
    for path in sorted({Path(os.path.abspath(name)) for name in opened}):
        if is_users(str(path)):
            status = path.stat()
            source[os.path.relpath(path, root)] = f"{status.st_size} bytes, {status.st_mtime_ns}"
    code = {}
    for path in _users_files():
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        code[os.path.relpath(path, root)] = _hash(ast.dump(tree))
    return Fingerprint(code=code, source=source)


def _users_files() -> list[Path]:
    """Return the source files of loaded modules, except those of installed packages."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # torch.classes and torch.ops have the relative paths "_classes.py" and "_ops.py", so relative
    # paths are skipped.
    paths = {
        Path(file).resolve()
        for file in files
        if file and file.endswith(".py") and os.path.isabs(file)
    }
    return sorted(path for path in paths if path.is_file() and is_users(str(path)))


def _settings(value: Any, depth: int) -> Any:
    """Return the plain values inside an object, in a form that is the same in every process.

    Arrays are represented by their shape and a checksum.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return [[repr(k), _settings(v, depth - 1)] for k, v in value.items()] if depth else "dict"
    if isinstance(value, list | tuple):
        return [_settings(v, depth - 1) for v in value] if depth else "list"
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        with contextlib.suppress(Exception):
            array = np.ascontiguousarray(value)
            checksum = hashlib.blake2b(array.tobytes()).hexdigest()
            return [str(array.dtype), list(array.shape), checksum]
    return _settings_of_object(value, depth)


def _settings_of_object(value: Any, depth: int) -> Any:
    """Return the name of an object's class, and its attributes if they may be settings."""
    named = f"{type(value).__module__}.{type(value).__qualname__}"
    is_code = isinstance(value, type) or hasattr(value, "__code__")
    state = getattr(value, "__dict__", None)
    if is_code or not depth or not isinstance(state, dict):
        return named
    own = {name: part for name, part in state.items() if not name.startswith("__")}
    return [named, [[name, _settings(part, depth - 1)] for name, part in own.items()]]


def _hash(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=12).hexdigest()


_SEEDS = (1, 20_011)
_MORE_SEEDS = range(2, 18)
_TRIALS = 18
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
    """Error for a sample that differs when it is computed again."""


def computed_twice(dataset: Any, index: int) -> Encoded:
    """Compute a sample with different seeds of Python, numpy and torch, and return it if equal.

    Exceptions of the dataset itself are not caught.

    Raises:
        NotDeterministic: If the sample differs. The message names the random transform or field.
    """
    first, drew = under_seed(_SEEDS[0], lambda: encode(dataset[index]))
    # If the dataset draws random numbers, two results may be equal by chance: half of all random
    # flips do nothing. So try more seeds.
    for seed in (_SEEDS[1], *(_MORE_SEEDS if drew else ())):
        again, drew_again = under_seed(seed, lambda: encode(dataset[index]))
        differing = differing_columns(first, again)
        drew += [name for name in drew_again if name not in drew]
        if differing:
            raise NotDeterministic(_in_words(dataset, index, first, differing, drew), _HINT)
    return first


def _in_words(
    dataset: Any, index: int, sample: Encoded, differing: list[str], drew: list[str]
) -> str:
    message = f"sample {index} comes out differently each time it is computed"
    if len(sample.layout.fields) > 1:
        every = len(differing) == len(sample.layout.fields)
        message += f" (in {'every part' if every else ', '.join(map(spoken, differing))})"
    if cause := _random_transform(dataset, index):
        return f"{message}: {cause}."
    if drew:
        return f"{message}: it draws from the generator of {' and '.join(drew)}."
    return (
        f"{message}, and not by a generator of Python, numpy or torch: by one of its own, the time,"
        " or what it did before."
    )


def _random_transform(dataset: Any, index: int) -> str | None:
    """Describe the first transform that gives two results for one input.

    Returns None if there is no such transform.
    """
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


def under_seed(value: int, work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Run `work` with a seed. Return its result, and the names of the generators that it used.

    The states of the generators are restored.
    """
    with restored():
        seed(value)
        before = random_states()
        result = work()
        return result, drawn_from(before, random_states())


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the states of the global random generators at the end of this context."""
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
    """Return True if `call` gives different results for one input with `trials` different seeds.

    Returns False if `call` raises an exception.
    """
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
    """Return True if two samples, or two results of a transform, are equal."""
    try:
        return not differing_columns(encode(a), encode(b))
    except UnsupportedSample:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return type(a) is type(b) and bool(a == b)
    return False


# ---- places of transforms in a dataset
#
# Transforms are recognized by the names of attributes and types, so ``Compose`` of any library
# works.


class Place(NamedTuple):
    """Place of a transform in a dataset.

    One transform may have several places: torchvision's datasets store their `transform` again
    inside `transforms`.

    Attributes:
        container: Object that holds the transform.
        key: Name of the attribute, or index of the item.
        is_item: True if the transform is an item of the container, not an attribute.
        kind: Name of the outermost attribute.
        position: Phrase that describes the place in messages.
        branch: Path of the dataset that holds the transform.
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
            modules[self.key] = value  # setattr of nn.Module would accept only modules here
        else:
            setattr(self.container, self.key, value)


def find_places(dataset: Any) -> list[Place]:
    """Return all places of all innermost transforms, in the order in which they would run."""
    return list(_within(dataset, "", _DEPTH, set()))


@contextlib.contextmanager
def replaced(places: list[Place], wrap: Callable[[Place], Any]) -> Iterator[None]:
    """Within this context, replace each transform by `wrap(place)` in all its places."""
    wrapped: dict[int, Any] = {}
    changed: list[Place] = []
    try:
        for place in places:
            if id(place.transform) not in wrapped:
                wrapped[id(place.transform)] = wrap(place)
            # If the container is frozen, its transform is not replaced.
            with contextlib.suppress(AttributeError, TypeError):
                place.put(wrapped[id(place.transform)])
                changed.append(place)
        yield
    finally:
        for place in changed:
            place.put(place.transform)


def _within(holder: Any, path: str, depth: int, seen: set[int]) -> Iterator[Place]:
    """Yield the places in a dataset's attributes, and in the datasets that it contains.

    `path` is the path of the dataset. It ends with a dot.
    """
    if id(holder) in seen or depth == 0:
        return
    seen.add(id(holder))
    for container, name, value in _values_in_reach(holder):
        inside = f"{path}{name}"
        if name in _NAMES or _is_composed(value):
            is_item = isinstance(container, dict)
            yield from _innermost(
                Place(container, name, is_item, name, f"in {inside}", value, path), inside, seen
            )
    for held in held_datasets(holder):
        yield from _within(held.transform, f"{path}{held.position}.", depth - 1, seen)


def _values_in_reach(dataset: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield (container, name, value) of the values that a sample may use.

    These are the attributes of the dataset and of its class, its submodules, and the composed
    transforms among the globals that `__getitem__` reads. Methods and properties are skipped,
    because they may call other transforms.
    """
    own = dict(getattr(dataset, "__dict__", {}))
    inherited = {name: v for kind in type(dataset).__mro__[::-1] for name, v in vars(kind).items()}
    inherited = {name: v for name, v in inherited.items() if not hasattr(type(v), "__get__")}
    for name, value in [*(inherited | own).items(), *(own.get("_modules") or {}).items()]:
        yield dataset, name, value
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    if code is not None and is_users(code.co_filename):
        variables = type(dataset).__getitem__.__globals__
        for name in {*code.co_names} & variables.keys():
            if _is_composed(variables[name]):
                yield variables, name, variables[name]


def held_datasets(dataset: Any) -> Iterator[Place]:
    """Yield the datasets inside a Subset, a ConcatDataset or a wrapper of the user."""
    torch = sys.modules.get("torch")
    base = () if torch is None else torch.utils.data.Dataset

    def is_held(name: str, part: Any) -> bool:
        is_named = name in ("dataset", "datasets", "_dataset", "base")
        return isinstance(part, base) or (is_named and hasattr(part, "__getitem__"))

    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if not isinstance(value, list):
            if is_held(name, value):
                yield Place(dataset, name, False, name, name, value)
            continue
        for number, part in enumerate(value):
            if is_held(name, part):
                yield Place(value, number, True, name, f"{name}[{number}]", part)


def _innermost(place: Place, path: str, seen: set[int]) -> Iterator[Place]:
    """Yield the places of the transforms inside a transform, or its own place."""
    value, kind = place.transform, type(place.transform).__name__
    items = value if isinstance(value, list) else value.transforms if _is_composed(value) else None
    if kind == "Sequential" and isinstance(getattr(value, "_modules", None), dict):
        items = value._modules
    if items is None:
        if kind == "StandardTransform":  # torchvision's pair of transform and target_transform
            yield from _within(value, f"{path}.", _DEPTH, seen)
        elif callable(value) and not isinstance(value, type):
            yield place
        return
    attribute = ".transforms" if _is_composed(value) else ""
    pairs = list(items.items() if isinstance(items, dict) else enumerate(items))
    for number, (key, item) in enumerate(pairs, 1):
        position = f"transform {number} of {len(pairs)} in {path}"
        inner = Place(items, key, True, place.kind, position, item, place.branch)
        yield from _innermost(inner, f"{path}{attribute}[{key}]", seen)


def _is_composed(value: Any) -> bool:
    """Return True for a transform that runs all transforms in its list, such as Compose.

    A transform that chooses among others (RandomChoice, OneOf) counts as a single transform.
    """
    chooses = any(word in type(value).__name__ for word in ("Random", "Choice", "OneOf", "SomeOf"))
    return isinstance(getattr(value, "transforms", None), list) and not chooses

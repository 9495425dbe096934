"""Arguments of trainers written in Python: `args = TrainingArguments(...)`, `trainer = Trainer(devices=2, ...)`, or a dict of
such settings. The code is parsed and never run, so that only literals are read; whatever else stands there is named.
"""

import ast
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from trainpace.configs.accelerate import is_accelerate
from trainpace.configs.deepspeed import is_deepspeed
from trainpace.configs.huggingface import DISTINCTIVE, is_training_arguments
from trainpace.configs.lightning import TRAINER, is_lightning
from trainpace.configs.settings import Note
from trainpace.configs.syntax import checked
from trainpace.core.errors import UnreadableInput

_CORE = frozenset(
    "devices num_nodes strategy precision accumulate_grad_batches max_epochs max_steps accelerator".split()
)
"""Arguments of Lightning's Trainer that tell it from others of that name."""
_CLASSES = ("Arguments", "Args", "Config")
_NOT_READ = object()


class PythonSettings(NamedTuple):
    """The settings as a settings file would hold them, and a note for each value that is no literal."""

    data: dict[str, Any]
    unread: tuple[Note, ...]


class _Found(NamedTuple):
    line: int
    data: dict[str, Any]
    unread: list[tuple[str, ast.expr]]


def is_python(file: str) -> bool:
    return file.endswith(".py")


def read_python(text: str, file: str) -> PythonSettings:
    """Raises UnreadableInput for code that does not parse, and where it holds no such arguments, or several."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings, say
            tree = ast.parse(text)
            found = list(_candidates(tree))
    except SyntaxError as error:
        raise UnreadableInput(
            f"{file} is not valid Python at line {error.lineno}: {error.msg}."
        ) from None
    except (RecursionError, MemoryError, ValueError):
        raise UnreadableInput(f"{file} is nested too deeply to be read.") from None
    known = (
        "TrainingArguments(...), Lightning's Trainer(...), or a dict of their arguments, of"
        " DeepSpeed's or of accelerate's"
    )
    if not found:
        raise UnreadableInput(
            f"{file} holds no arguments of a trainer that can be read.", f"Known: {known}."
        )
    if len(found) > 1:
        lines = ", ".join(str(one.line) for one in found)
        raise UnreadableInput(
            f"{file} holds arguments of trainers in lines {lines}.",
            "Give each as a file of its own.",
        )
    (one,) = found
    notes = (
        Note(
            file=file,
            key=key,
            severity="warning",
            text=(
                f"{key}: {ast.unparse(node)[:60]!r} (line {node.lineno}) is not a literal, so it is"
                " not read"
            ),
        )
        for key, node in one.unread
    )
    return PythonSettings(checked(one.data, file), tuple(notes))


def _candidates(tree: ast.Module) -> Iterator[_Found]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            node.value, ast.Dict | ast.Call
        ):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if (found := _from_dict(ast.unparse(target), node.value)) is not None:
                yield found
        if isinstance(node, ast.Call) and (found := _from_call(node)) is not None:
            yield found


def _from_dict(name: str, node: ast.expr) -> _Found | None:
    if isinstance(node, ast.Call) and _name_of(node.func) != "dict":
        return None
    found = _literals(node)
    if found is None:
        return None
    if (
        any(recognises(found.data) for recognises in (is_deepspeed, is_accelerate, is_lightning))
        or DISTINCTIVE & found.data.keys()
    ):
        return found
    core = len(found.data.keys() & _CORE)
    return _of_trainer(found) if core > 1 or (core and "trainer" in name.lower()) else None


def _from_call(node: ast.Call) -> _Found | None:
    name = _name_of(node.func)
    if not name.endswith(("Trainer", "Fabric", *_CLASSES)):
        return None
    found = _literals(node)
    if found is None:
        return None
    if name.endswith(_CLASSES):
        return found if is_training_arguments(found.data) else None
    return (
        _of_trainer(found) if found.data.keys() & _CORE and found.data.keys() <= TRAINER else None
    )


def _of_trainer(found: _Found) -> _Found:
    return found._replace(
        data={"trainer": found.data},
        unread=[(f"trainer.{key}", node) for key, node in found.unread],
    )


def _literals(node: ast.expr) -> _Found | None:
    """The literal values of a dict or of a call's keywords, with None, which is "not stated", for what is none; None for a dict
    whose keys are not all words."""
    pairs: list[tuple[str, ast.expr]] = []
    if isinstance(node, ast.Call):
        pairs = [
            ("**" if keyword.arg is None else keyword.arg, keyword.value)
            for keyword in node.keywords
        ]
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None and not (
                isinstance(key, ast.Constant) and isinstance(key.value, str)
            ):
                return None
            pairs.append(("**" if key is None else str(key.value), value))
    data: dict[str, Any] = {}
    unread: list[tuple[str, ast.expr]] = []
    for name, value in pairs:
        read = _NOT_READ if name == "**" else _literal(value, name, unread)
        if read is _NOT_READ:
            unread.append((name, value))
        if name != "**":
            data[name] = None if read is _NOT_READ else read
    return _Found(node.lineno, data, unread)


def _literal(node: ast.expr, key: str, unread: list[tuple[str, ast.expr]]) -> Any:
    """A value of JSON's kinds. A class with literal arguments, as strategies are given, is what Lightning's files call class_path
    and init_args; what is no literal inside a dict goes into `unread`."""
    nested = _literals(node) if isinstance(node, ast.Dict | ast.Call) else None
    if nested is not None:
        called = _name_of(node.func) if isinstance(node, ast.Call) else "dict"
        if (isinstance(node, ast.Call) and node.args) or (called != "dict" and key != "strategy"):
            return _NOT_READ
        unread += [(f"{key}.{inner}", value) for inner, value in nested.unread]
        return nested.data if called == "dict" else {"class_path": called, "init_args": nested.data}
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return _NOT_READ
    value = list(value) if isinstance(value, tuple) else value
    plain = str | int | float | None
    whole = isinstance(value, plain) or (
        isinstance(value, list) and all(isinstance(part, plain) for part in value)
    )
    return value if whole else _NOT_READ


def _name_of(node: ast.expr) -> str:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )

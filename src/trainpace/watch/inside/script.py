"""The script's own code: the lines that run, the training length in its variables, and rollouts.

Rollouts of reinforcement learning and evaluations both call the policy without gradients.
stable-baselines3 even sets the policy to evaluation mode before it collects experience. The
recorder looks for the environment that the calling functions step through. The first environment it
finds is the one that training learns from. Calls of the policy for it collect experience, and calls
for another environment evaluate. Known limit: an evaluation in the training's own environment
counts as collecting experience.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import math
import operator
import os
import re
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import islice, takewhile
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from trainpace.core.host import holds_packages, top_of
from trainpace.watch.inside.event_log import BACKWARD, FORWARD, PARTS, Step
from trainpace.watch.inside.recorder import SPANS_AGAIN_EVERY, SPANS_FOR_STEPS, Recorder

_INSTALLED = (*{sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")


@functools.lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Return True for a file of the standard library or of an installed package.

    Files in the script's own folder and cells of a notebook never count as installed.
    """
    if file.startswith(_INSTALLED):
        return not file.startswith("<ipython-input")
    # cProfile and similar tools compile a script under its bare name.
    folder = top_of(os.path.dirname(os.path.abspath(file)))
    script = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
    return folder != os.path.dirname(os.path.abspath(script)) and holds_packages(folder)


INTERVAL_S, INTERVAL_UNDER_TRIALS_S = 0.1, 0.02
"""Seconds between stack samples."""
LOOKS_FOR_LOOP = 20
"""Samples after which the function with the training loop is known."""
OFTEN_LOOKS, SELDOM = 200, 5
"""Without trials, sampling slows down after this many samples, to one in `SELDOM` intervals.

Slow code was seen by then.
"""
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_WRAPPERS = ("torch._compile", "sklearn.utils._param_validation", "contextlib")
"""Modules whose functions only call other functions."""
_TORCH = f"{os.sep}torch{os.sep}"
"""Part of the file names of torch itself, whose functions hold no training loop."""


class Sampler:
    """Samples the stack of the training thread.

    It counts (part, line of the script, function called). It also writes the log's waiting records.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._counts: Counter[tuple[int, str, str]] = Counter()
        self._stop = threading.Event()
        self._looker: threading.Thread | None = None
        self._loop = _Loop()
        self._loop_code: CodeType | None = None

    def at_step(self, step: Step) -> None:
        """Start sampling at the first call, and log the counts periodically."""
        if self._looker is None:
            thread = (self._recorder.thread,)
            self._looker = threading.Thread(
                target=self._run, args=thread, name="trainpace-sampler", daemon=True
            )
            self._looker.start()
        elif step.number in (25, SPANS_FOR_STEPS - 1) or step.number % SPANS_AGAIN_EVERY == 0:
            self._recorder.log.note(samples=self.counts())

    def stop(self) -> None:
        """Stop before the interpreter ends.

        If the interpreter stopped this thread inside C++ code, the process would abort.
        """
        self._stop.set()
        if self._looker is not None:
            self._looker.join(1.0)

    def counts(self) -> list[tuple[str, str, str, int]]:
        """Return (part, file:line function, function called, count), the most frequent first."""
        # Copied in one operation, because the sampling thread continues to count.
        counts = Counter(dict(self._counts))
        return [
            (PARTS[part], line, callee, n) for (part, line, callee), n in counts.most_common(60)
        ]

    def _run(self, thread: int) -> None:
        # Each sample takes the interpreter's lock from the script for a moment.
        interval_s = INTERVAL_S if self._recorder.trials is None else INTERVAL_UNDER_TRIALS_S
        looks, often = 0, OFTEN_LOOKS if self._recorder.trials is None else sys.maxsize
        while not self._stop.wait(interval_s if looks < often else SELDOM * interval_s):
            looks += 1
            # Flush here too, because the process may be killed after its last step.
            self._recorder.flush_if_due()
            part = self._recorder.part
            frame = sys._current_frames().get(thread)
            if frame is not None:
                loop = self._loop.seen_in(frame, part)
                if loop is not None and loop is not self._loop_code:
                    self._loop_code = loop
                    # All earlier samples were counted at the line that calls the library.
                    self._counts.clear()
                self._counts[(part, *line_of(frame, loop))] += 1
            del frame  # The frame would keep the function's tensors alive.


class _Loop:
    """The function with the training loop if it belongs to a library.

    It is the innermost function that every sample contains.
    """

    def __init__(self) -> None:
        self._common: list[CodeType] | None = None
        self._parts: set[int] = set()
        self._looks = 0

    def seen_in(self, frame: FrameType, part: int) -> CodeType | None:
        """Add a sample.

        Returns:
            The code of the loop as soon as it is known. None if the loop is the script's own.
        """
        stack = [at.f_code for at in frames_from(frame)][::-1]
        common = stack if self._common is None else self._common
        pairs = zip(common, stack, strict=False)
        self._common = [a for a, _ in takewhile(lambda pair: pair[0] is pair[1], pairs)]
        self._parts.add(part)
        self._looks += 1
        trains = self._parts & {FORWARD, BACKWARD}
        is_known = self._looks >= LOOKS_FOR_LOOP and set() < trains < self._parts
        if not (is_known and self._common):
            return None
        name = self._common[-1].co_filename
        is_loop = is_installed(name) and not (name.startswith(_OURS) or _TORCH in name)
        return self._common[-1] if is_loop else None


def line_of(frame: FrameType, loop: CodeType | None = None) -> tuple[str, str]:
    """Return the innermost line of the script, and the function that it calls.

    If `loop` is further inside than the script's code, the line in `loop` is returned.
    """
    below = ""
    for at in frames_from(frame):
        name = at.f_code.co_filename
        if name.startswith(_OURS):
            continue
        if at.f_code is loop or not is_installed(name):
            return f"{name}:{at.f_lineno} {at.f_code.co_name}", below
        module = at.f_globals.get("__name__", "")
        if module not in _WRAPPERS:
            below = f"{module}.{at.f_code.co_name}"
    return "", below


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a stack, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


EPOCHS = frozenset(
    (
        "epochs",
        "num_epochs",
        "n_epochs",
        "nb_epochs",
        "n_epoch",
        "nepochs",
        "max_epoch",
        "max_epochs",
        "num_train_epochs",
        "train_epochs",
        "total_epochs",
    )
)
ENDING_STEPS = frozenset(
    (
        "max_steps",
        "total_steps",
        "max_train_steps",
        "max_grad_steps",
        "num_training_steps",
        "num_train_steps",
        "train_steps",
        "max_iters",
        "train_iters",
        "max_iterations",
        "max_updates",
    )
)
STEPS = ENDING_STEPS | {"num_steps", "n_steps", "num_iters", "n_iters", "iterations"}
"""Names of variables and options for the number of optimizer steps.

The names, like those in `EPOCHS`, are taken from pytorch/examples, nanoGPT, timm, Lightning,
Hugging Face and Megatron-LM. Names in `ENDING_STEPS` always mean a whole training. As a variable,
the others may also mean the steps of an epoch or of a rollout.
"""
LARGEST_LENGTH = 1e15
"""Larger numbers are not the length of a training."""
_NUMBER = re.compile(r"\d[\d_]*(\.\d+)?([eE]\+?\d{1,3})?")


class StatedLength(NamedTuple):
    """Length of a training in epochs or steps, and the `words` of the command or script with it."""

    epochs: float | None
    steps: int | None
    words: str


def stated_length(command: Sequence[str]) -> StatedLength | None:
    """Return the length of the training that a command's arguments give, or None.

    Examples are `--epochs 30`, `--max-steps=1000`, and `trainer.max_epochs=30` of Hydra. The last
    argument of each kind counts. If both epochs and steps are given, steps are returned, since
    scripts stop at them first.
    """
    found: dict[str, StatedLength] = {}
    for i, word in enumerate(command):
        name, equals, value = word.partition("=")
        if not equals and word.startswith("-") and i + 1 < len(command):
            value = command[i + 1]
        if not _NUMBER.fullmatch(value):
            continue
        key = name.lstrip("-+").rpartition(".")[2].replace("-", "_").lower()
        words = word if equals else f"{word} {value}"
        found |= _named_length(key, float(value), words, STEPS)
    return found.get("steps") or found.get("epochs")


def _named_length(
    key: str, number: float, words: str, names_of_steps: Set[str]
) -> dict[str, StatedLength]:
    """Return {"epochs" or "steps": length} if the name and the number give a length, else {}."""
    if not 0 < number <= LARGEST_LENGTH:
        return {}
    if key in EPOCHS:
        return {"epochs": StatedLength(number, None, words)}
    if key in names_of_steps and float(number).is_integer():
        return {"steps": StatedLength(None, int(number), words)}
    return {}


_OWN = ("torch", "trainpace")
"""Packages whose own variables say nothing about the script."""
MOST_FRAMES = 100
MOST_DEEP = 12
ENDING_EXPERIENCE = frozenset(("total_timesteps", "total_frames", "total_env_steps"))
EXPERIENCE = frozenset(("num_timesteps", "global_step", "collected_frames", "env_steps"))
"""Names of the experience collected so far, in stable-baselines3, cleanrl and torchrl.

Names in `ENDING_EXPERIENCE` are the length of the training in the same units. The first updates
show how many of them an update takes.
"""
LONGEST_LOOP = 10**8
"""Loops with more iterations are treated as endless."""
EVERY_STEP, LATER_EVERY = 100, 16
"""The position is read after each of the first steps, and later once in `LATER_EVERY` steps."""
ENOUGH_MOVES = 8
"""Number of positions that determine how many steps an iteration makes."""


def note_length(recorder: Recorder) -> None:
    """Log the length of the training from the variables and loops of the calling functions.

    The variables are read once, while the first step ends. They belong to the functions on the
    stack, from the training loop outwards. Contents of objects are read too, such as the arguments
    of argparse. Steps count only under names that end a training (`max_steps`, not `steps`). Steps
    are preferred to epochs. Without named steps, loops over ranges give the steps, and without
    named epochs, they give the length.
    """
    frame, found = sys._getframe(1), dict[str, StatedLength]()
    for name, value, place in _variables(frame):
        if type(value) in (int, float) and 0 < value <= LARGEST_LENGTH:
            words = _in_words(name, value, place)
            found = _named_length(_key(name), value, words, ENDING_STEPS) | found
    named = found.get("steps") or found.get("epochs")
    if named is not None:
        recorder.log.note(stated=named)
    read = _in_loops if _experience(frame) is None else _experience
    if read is _experience or "steps" not in found:
        pace = _Pace(recorder, read, named)
        if pace.look(0, frame):
            recorder.after_step.append(pace.at_step)


def _key(name: str) -> str:
    return name.lstrip("_").lower()


def _in_words(name: str, value: float, place: str) -> str:
    return f"{name.lstrip('_')} = {value:,.15g} in {place}"


class _Position(NamedTuple):
    """Position of the training in its loops, or in the experience that it collects.

    Attributes:
        unit: "step" if an iteration usually makes one step, "epoch" if it contains a loop of
            unknown length, or "experience".
        words: Where the script gives the total.
    """

    done: int
    total: int
    unit: str
    words: str


class _Pace:
    """Logs the length of the training by the number of steps between two positions."""

    def __init__(
        self,
        recorder: Recorder,
        read: Callable[[FrameType], _Position | None],
        named: StatedLength | None,
    ) -> None:
        self._recorder, self._read, self._named = recorder, read, named
        self._moves: list[tuple[int, int]] = []
        """Step and position, for each new position."""

    def at_step(self, step: Step) -> None:
        """Read the position after some of the steps, until the pace is known."""
        if step.number >= EVERY_STEP and step.number % LATER_EVERY:
            return
        if not self.look(step.number, sys._getframe(1)) or len(self._moves) >= ENOUGH_MOVES:
            self._recorder.after_step.remove(self.at_step)

    def look(self, number: int, frame: FrameType) -> bool:
        """Read the position after a step and log the length. False if there is no position."""
        found, moves = self._read(frame), self._moves
        if found is None:
            return False
        if not moves or found.done != moves[-1][1]:
            moves.append((number, found.done))
            if (stated := self._stated(found)) is not None:
                self._recorder.log.note(stated=stated)
        return True

    def _stated(self, found: _Position) -> StatedLength | None:
        steps, named = self._steps(found), self._named
        if named is not None and found.unit != "experience":
            return named._replace(steps=steps)
        epochs = float(found.total) if found.unit == "epoch" else None
        return StatedLength(epochs, steps, found.words) if steps or epochs else None

    def _steps(self, found: _Position) -> int | None:
        (began, first), (ended, last) = self._moves[0], self._moves[-1]
        if last > first:
            return began + math.ceil((found.total - first) * (ended - began) / (last - first))
        return found.total if found.unit == "step" else None


def _experience(frame: FrameType) -> _Position | None:
    """Return the position in the experience that reinforcement learning collects, or None."""
    done: int | None = None
    total, words = 0, ""
    for name, value, place in _variables(frame):
        key = _key(name)
        if type(value) not in (int, float) or not 0 <= value <= LARGEST_LENGTH:
            continue
        if key in EXPERIENCE and done is None:
            done = int(value)
        if key in ENDING_EXPERIENCE and not total:
            total, words = int(value), _in_words(name, value, place)
        if done is not None and total:
            return _Position(done, total, "experience", words)
    return None


def _in_loops(frame: FrameType) -> _Position | None:
    """Return the position in the script's loops over ranges, or None without such loops.

    The outermost loops count, as far as they run over ranges.
    """
    ranges, unit = _outermost_ranges(frame)
    done, total = 0, 1
    for over, value, _ in ranges:
        done += total * over.index(value) if type(value) is int and value in over else 0
        total *= len(over)
    if not ranges or total > LONGEST_LOOP:
        return None
    return _Position(done, total, unit, ", ".join(words for *_, words in reversed(ranges)))


def _outermost_ranges(frame: FrameType) -> tuple[list[tuple[range, Any, str]], str]:
    """Return (range, value of its variable, words) of each loop, innermost first, and the unit."""
    ranges: list[tuple[range, Any, str]] = []
    unit = "step"
    stack = [at for at in islice(frames_from(frame), MOST_FRAMES) if not _is_own(at)]
    while stack and not _is_of_script(stack[-1]):
        stack.pop()
    for at in stack:
        for loop in _loops_around(at):
            over = _range(loop, at) if _is_of_script(at) else None
            if over is None:
                ranges, unit = [], "epoch"
            else:
                place = f"{os.path.basename(at.f_code.co_filename)}:{loop.lineno}"
                ranges.append((over[0], over[1], f"{over[2]} in {place}"))
    return ranges, unit


def _is_of_script(frame: FrameType) -> bool:
    return not _is_own(frame) and not is_installed(frame.f_code.co_filename)


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN


def _loops_around(frame: FrameType) -> Iterator[ast.For | ast.While]:
    """Yield the loops of a function around its current line, innermost first."""
    line = frame.f_lineno
    for loop in reversed(_loops_of(frame.f_code.co_filename)):
        is_in_function = loop.lineno >= frame.f_code.co_firstlineno
        if is_in_function and loop.body[0].lineno <= line <= (loop.body[-1].end_lineno or 0):
            yield loop


@functools.lru_cache(maxsize=64)
def _loops_of(file: str) -> tuple[ast.For | ast.While, ...]:
    """Return the loops of a source file, outer ones before inner ones."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While))


def _range(loop: ast.For | ast.While, frame: FrameType) -> tuple[range, Any, str] | None:
    """Return the range of a loop, the current value of its variable, and its words, or None."""
    if isinstance(loop, ast.While):
        return None
    try:
        over = _value(loop.iter, frame)
    except (ArithmeticError, LookupError, TypeError, ValueError):  # Its variables have changed.
        return None
    if type(over) is not range:
        over = _contents(over).get("iterable")  # of tqdm
    if type(over) is not range or not 0 < abs(over.stop - over.start) <= LONGEST_LOOP:
        return None
    target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
    return over, _value(target, frame), ast.unparse(loop.iter)


_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_CALLS: dict[str, Callable[..., Any]] = {"range": range, "trange": range, "int": int}


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Evaluate an expression without running code of the script. None if that is impossible."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
        case ast.Attribute():
            return _contents(_value(node.value, frame)).get(node.attr)
        case ast.Subscript(ast.Attribute(owner, "shape"), ast.Constant(0)):
            return _length(_value(owner, frame))
        case ast.Subscript(owner, ast.Constant(key)):
            return _contents(_value(owner, frame)).get(key)
        case ast.BinOp():
            both = [_value(node.left, frame), _value(node.right, frame)]
            return _ARITHMETIC[type(node.op)](*both) if _are_numbers(both) else None
        case ast.Call():
            return _called(node, frame)
    return None


def _called(node: ast.Call, frame: FrameType) -> Any:
    """Return the value of `range`, `int`, `len` or `size`, or the range in `tqdm(...)` and such."""
    values = [_value(argument, frame) for argument in node.args]
    name = ast.unparse(node.func).rpartition(".")[2]
    if name == "len":
        return _length(*values)
    if values == [0] and isinstance(node.func, ast.Attribute):  # X.size(0)
        return _length(_value(node.func.value, frame))
    make = _CALLS.get(name)
    if make is not None:
        return make(*values) if _are_numbers(values) else None
    return next((value for value in values if type(value) is range), None)


def _length(value: Any) -> int | None:
    """Return the length of a built-in collection, a tensor or a NumPy array, or else None."""
    kind = type(value)
    is_array = kind.__module__ in ("torch", "numpy") and hasattr(value, "shape") and value.ndim
    return len(value) if is_array or kind in (list, tuple, dict, str) else None


def _are_numbers(values: Sequence[Any]) -> bool:
    return bool(values) and all(type(value) in (int, float) for value in values)


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, file) of variables and of objects' contents, innermost function first.

    For a variable of a library, `file` is the script's file that called the library.
    """
    modules = []
    for at in islice(frames_from(frame), MOST_FRAMES):
        if not _is_own(at):
            caller = next(filter(_is_of_script, frames_from(at)), at)
            place = os.path.basename(caller.f_code.co_filename)
            yield from _of(at.f_locals, place)
            if not is_installed(at.f_code.co_filename) and at.f_globals is not at.f_locals:
                modules.append((at.f_globals, place))
    for variables, place in modules:
        yield from _of(variables, place)


def _of(variables: dict[str, Any], place: str) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, file) of variables and of their objects' contents."""
    values = list(variables.items())
    for name, value in values:
        if issubclass(type(value), int | float):
            yield name, value, place
    for _, value in values:
        kind = type(value)
        if issubclass(kind, ModuleType | type) or str(kind.__module__).partition(".")[0] in _OWN:
            continue
        yield from _named(_contents(value), place)


def _contents(value: Any) -> Mapping[Any, Any]:
    """Return the contents of a dict or the attributes of an object.

    Attributes are read past `__getattribute__`, so that no code of the script runs.
    """
    if issubclass(type(value), dict):
        return value
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _named(
    inner: Mapping[Any, Any], place: str, deep: int = MOST_DEEP
) -> Iterator[tuple[str, Any, str]]:
    """Yield the named contents of an object. OmegaConf keeps values in objects of its own."""
    for name, each in list(inner.items()):
        if not isinstance(name, str) or name == "_parent":
            continue
        held = {"_content": each} if name == "_content" else {}
        if str(type(each).__module__).partition(".")[0] == "omegaconf":
            held = object.__getattribute__(each, "__dict__")
        yield name, held.get("_val", each), place
        if deep and type(held.get("_content")) is dict:
            yield from _named(held["_content"], place, deep - 1)


class Environments:
    """Decides for each call of a policy without gradients whether it collects experience."""

    def __init__(self) -> None:
        self._training: int | None = None
        """Id of the training's environment."""
        self._collects: dict[tuple[int, ...], bool] = {}
        """Decisions by the code of the calling functions. A decision holds for later calls."""

    def collects(self) -> bool:
        """Return True if the calling functions step through the training's environment."""
        frames = [
            frame
            for frame in islice(frames_from(sys._getframe(1)), MOST_FRAMES)
            if not _is_own(frame)
        ]
        key = tuple(id(frame.f_code) for frame in frames)
        if key not in self._collects:
            self._collects[key] = self._finds_training(frames)
        return self._collects[key]

    def _finds_training(self, frames: list[FrameType]) -> bool:
        found = next(_environments(frames), None)
        if found is None:
            return False
        if self._training is None:
            self._training = id(found)
        return id(found) == self._training


def _environments(frames: list[FrameType]) -> Iterator[Any]:
    """Yield the environments in the variables of functions, then in their objects' attributes.

    Variables come first, because an evaluation gets its own environment as an argument, while its
    agent may hold the environment of the training.
    """
    variables = [value for frame in frames for value in list(frame.f_locals.values())]
    yield from filter(is_environment, variables)
    for value in variables:
        if issubclass(type(value), ModuleType | type):
            continue
        yield from filter(is_environment, list(_contents(value).values()))


def is_environment(value: Any) -> bool:
    """Return True if the object has `reset` and `step(action)`, as in Gym and dm_env.

    Optimizers, schedulers and timers have a `step` that needs no argument.
    """
    kind = type(value)
    step = getattr(kind, "step", None)
    if not (callable(step) and callable(getattr(kind, "reset", None))):
        return False
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(required) > 1  # The first one is `self`.

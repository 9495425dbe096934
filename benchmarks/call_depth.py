"""How long the way from a question to its answer is: calls and functions of one forecast.

Run `python benchmarks/call_depth.py [ARGUMENTS OF TRAINPACE]`; without arguments it measures
`forecast resnet50 --gpu A100 --batch 64`. The command runs once in this process under
`sys.setprofile`, imports included; its output goes nowhere. It counts the named functions of
trainpace that run (not modules, class bodies, lambdas or comprehensions), how often, how deep they
nest, and how many of them are on the stack at the first arithmetic: the first function that
computes seconds of operators.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import trainpace
from trainpace.__main__ import main

QUESTION = ("forecast", "resnet50", "--gpu", "A100", "--batch", "64")
PACKAGE = str(Path(trainpace.__file__).parent)
ARITHMETIC = {"KernelTable.times", "KernelTable.matmul_times", "machine_times"}
"""Functions that compute seconds of operators."""

Function = tuple[str, str]
"""A file of trainpace and the qualified name of a function in it."""


def function_of(frame: FrameType) -> Function | None:
    """Return the named function of trainpace that a frame runs, if it runs one."""
    code = frame.f_code
    is_function = code.co_flags & inspect.CO_OPTIMIZED  # the body of a class is not
    if not code.co_filename.startswith(PACKAGE) or "<" in code.co_name or not is_function:
        return None
    return code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname


def stack_of(frame: FrameType | None) -> list[Function]:
    """Return the named functions of trainpace on the stack, the outermost first."""
    stack: list[Function] = []
    while frame is not None:
        function = function_of(frame)
        if function is not None:
            stack.append(function)
        frame = frame.f_back
    return stack[::-1]


def profiled(arguments: tuple[str, ...]) -> tuple[Counter[Function], int, list[Function]]:
    """Return (calls of every function, deepest nesting, the stack at the first arithmetic)."""
    calls: Counter[Function] = Counter()
    deepest = 0
    first: list[Function] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal deepest, first
        function = function_of(frame) if event == "call" else None
        if function is None:
            return
        calls[function] += 1
        stack = stack_of(frame)
        deepest = max(deepest, len(stack))
        if not first and function[1] in ARITHMETIC:
            first = stack

    sys.setprofile(profile)
    try:
        run(arguments)
    finally:
        sys.setprofile(None)
    return calls, deepest, first


def run(arguments: tuple[str, ...]) -> None:
    """Run a command of trainpace without its output."""
    sys.argv = ["trainpace", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()


def report(arguments: tuple[str, ...]) -> None:
    calls, deepest, first = profiled(arguments)
    print(f"trainpace {' '.join(arguments)}")
    print(f"{len(calls)} functions of trainpace, {calls.total():,} calls, {deepest} deep")
    by_package = Counter(file.partition("/")[0] for file, _ in calls)
    print("functions by package: " + ", ".join(f"{k} {n}" for k, n in by_package.most_common()))
    print(f"{len(first)} calls to the first arithmetic:")
    for depth, (file, name) in enumerate(first, 1):
        print(f"{depth:4} {name} ({file})")


if __name__ == "__main__":
    report(tuple(sys.argv[1:]) or QUESTION)

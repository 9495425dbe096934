"""Write the keywords of the verbs, for editors and type checkers, into
src/trainpace/api/__init__.pyi.

    python tools/api_stub.py          (python -m tools generate)

The functions stand in src/trainpace/api/__init__.py; the keywords of each are the fields of the
request that it makes, with their types as a Python program may write them. tests/api fails where
the file is stale.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import get_args

from trainpace.verbs.request import Argument, Request, ResolvedField, fields_of

ROOT = Path(__file__).parents[1]
VERBS = ROOT / "src/trainpace/api/__init__.py"
STUB = ROOT / "src/trainpace/api/__init__.pyi"
HEAD = '''"""The verbs as functions, with every keyword.

Generated from their requests by tools/api_stub.py: do not edit.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

'''
LIVE = ("example: Any = ...", "loss: Any = ...", "task_optimizer: Any = ...")
"""What goes with a model that is a live `nn.Module`."""


def stub() -> str:
    """The text of the stub."""
    module = ast.parse(VERBS.read_text())
    blocks = [
        ast.unparse(node)
        for guard in module.body
        if isinstance(guard, ast.If)
        for node in guard.body
    ]
    functions = [
        n for n in module.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")
    ]
    text = (
        HEAD
        + "\n".join(blocks)
        + "\n\n"
        + "\n\n".join(_function(node) for node in functions)
        + "\n"
    )
    for job in (["check", "--quiet", "--select", "I,F401", "--fix"], ["format"]):
        command = [sys.executable, "-m", "ruff", *job, "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(
            command, input=text, capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
    return text


def _function(node: ast.FunctionDef) -> str:
    request = _request_of(node)
    own = [*node.args.args, *node.args.kwonlyargs]
    defaults = [None] * (len(node.args.args) - len(node.args.defaults)) + [
        *node.args.defaults,
        *node.args.kw_defaults,
    ]
    written = [
        f"{a.arg}: {ast.unparse(a.annotation or ast.Name('Any'))}{' = ...' if d else ''}"
        for a, d in zip(own, defaults, strict=True)
    ]
    positional, keywords = written[: len(node.args.args)], written[len(node.args.args) :]
    if request is not None and node.args.kwarg is not None:
        taken = {a.arg for a in own}
        keywords += [
            _keyword(f)
            for f in fields_of(request).values()
            if f.name not in taken and not isinstance(f.about, Argument)
        ]
        keywords += LIVE if "_about(" in ast.unparse(node) else ()
    parameters = ", ".join([*positional, *(["*"] if keywords else []), *keywords])
    doc = ast.get_docstring(node, clean=False) or ""
    return f'def {node.name}({parameters}) -> {ast.unparse(node.returns or ast.Name("Any"))}:\n    """{doc}"""\n'


def _request_of(node: ast.FunctionDef) -> type[Request] | None:
    """The request that a function makes, such as `verbs.match.MatchRequest`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and inner.attr.endswith("Request"):
            module = ast.unparse(inner.value).rpartition(".")[2]
            request: type[Request] = getattr(
                importlib.import_module(f"trainpace.verbs.{module}"), inner.attr
            )
            return request
    return None


def _keyword(field: ResolvedField) -> str:
    return f"{field.name}: {_type(field)}{'' if field.required else ' = ...'}"


def _type(field: ResolvedField) -> str:
    if field.is_flag:
        return "bool"
    unit = field.about.unit
    if field.choices:
        one = f"Literal[{', '.join(map(repr, get_args(field.kind)))}]"
    elif field.kind is str:
        one = "str | os.PathLike[str]"
    elif unit is not None and unit.is_list:
        return "int | str | Iterable[int]" + (" | None" if field.default is None else "")
    else:
        one = f"{field.kind.__name__} | str" if unit is not None else field.kind.__name__
    if field.several:
        one = f"{one} | Iterable[{one}]"
    if field.about.alone is not None:
        one += " | bool"
    return f"{one} | None" if field.default is None else one


if __name__ == "__main__":
    STUB.write_text(stub())

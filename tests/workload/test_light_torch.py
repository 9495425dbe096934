"""A trace without torch's compiler is identical, and code that needs the compiler still gets it."""

import subprocess
import sys

import pytest

from trainpace.core.records import to_json
from trainpace.workload import Variant
from trainpace.workload.trace import trace

START = """
import sys
from trainpace.core.records import to_json
from trainpace.workload.trace_worker import keep_torch_light
from trainpace.workload.trace import trace
from trainpace.workload import Variant
keep_torch_light()
"""


def in_a_process(code):
    return subprocess.run(
        [sys.executable, "-c", START + code], capture_output=True, text=True, check=True
    ).stdout


def traced(spec, form, variant):
    code = f"print(to_json(trace({spec!r}, ({form!r},), Variant({variant.optimizer!r}, checkpointing={variant.checkpointing}))))"
    return in_a_process(f"{code}\nassert 'torch._dynamo.eval_frame' not in sys.modules")


@pytest.mark.parametrize(
    ("spec", "form", "variant"),
    [("resnet18", "amp", Variant()), ("vgg11", "half", Variant("adamw"))],
)
def test_trace_without_torch_compiler_is_identical(spec, form, variant):
    assert traced(spec, form, variant).strip() == to_json(trace(spec, (form,), variant))


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo\nprint(torch._dynamo.config.recompile_limit > 0)",
        "from torch._dynamo import allow_in_graph\nprint(callable(allow_in_graph))",
        "import torch._dynamo.external_utils as e\nprint(callable(e.wrap_inline))",
        "import torch\nprint(float(torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))) == 2.0)",
        "import importlib.util\nprint(importlib.util.find_spec('torch._dynamo').name == 'torch._dynamo')",
    ],
)
def test_torch_compiler_is_imported_on_demand(code):
    assert in_a_process(code).split()[-1] == "True"

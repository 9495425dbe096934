"""Packaged traces equal those of the tracer, and a forecast from one does not import torch."""

import json
import subprocess
import sys

import numpy as np
import pytest

from trainpace.core import records
from trainpace.core.errors import TrainpaceError
from trainpace.workload import Variant, load_workload, packaged_workload
from trainpace.workload.specs import MODELS
from trainpace.workload.trace import trace
from trainpace.workload.workloads import FOLDER, OPTIMIZERS, VARIANTS

FORMS = ("fp32", "amp", "half")


def test_every_zoo_model_is_packaged_in_every_variant():
    packaged = {file.name.split(".")[0] for file in FOLDER.iterdir()}
    assert packaged == set(MODELS)
    for name in MODELS:
        for label, variant in VARIANTS.items():
            workload = packaged_workload(name, FORMS, variant)
            assert (workload.model, tuple(workload.forms)) == (name, FORMS)
            assert workload.optimizer == (label if label in OPTIMIZERS else "none")


@pytest.mark.parametrize("label", VARIANTS)
def test_packaged_vgg11_matches_a_new_trace(label):
    check_against_a_trace("vgg11", VARIANTS[label])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_packaged_workload_matches_a_new_trace(name):
    """If this fails, the tracer, the zoo or torch has changed: run `python -m tools zoo-workloads`."""
    for label in ("adamw", "inference"):
        check_against_a_trace(name, VARIANTS[label])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "label", [label for label in VARIANTS if label not in ("adamw", "inference")]
)
def test_packaged_variants_differ_only_in_optimizer(name, label):
    """So tracing one variant again checks the others; the smallest model checks the optimizers."""
    one, other = (
        packaged_workload(name, FORMS, VARIANTS[variant]).forms for variant in ("adamw", label)
    )
    for form in FORMS:
        assert passes(one[form].operators) == passes(other[form].operators)


def passes(operators):
    """Rows of the forward and backward pass."""
    rows = [i for i, phase in enumerate(operators.phase) if phase != "optimizer"]
    columns = {name: getattr(operators, name) for name in operators.__struct_fields__}
    return {
        name: np.asarray(column)[rows].tolist()
        for name, column in columns.items()
        if len(column) == len(operators)
    }


def check_against_a_trace(name, variant):
    assert records.to_json(packaged_workload(name, FORMS, variant)) == records.to_json(
        trace(name, FORMS, variant)
    )


@pytest.mark.parametrize(
    ("spec", "forms", "variant"),
    [
        ("vgg11", ("amp",), Variant()),
        ("torchvision:vgg11", ("half", "fp32"), Variant("adam", image_size=224)),
        ("vgg11", ("fp32",), Variant("adam", mode="inference")),
    ],
)
def test_packaged_workload_matches_trace_for_equivalent_requests(spec, forms, variant):
    assert records.to_json(packaged_workload(spec, forms, variant)) == records.to_json(
        trace(spec, forms, variant)
    )


@pytest.mark.parametrize(
    ("spec", "variant"),
    [
        ("timm:vgg16", Variant()),
        ("alexnet", Variant()),
        ("../vgg16", Variant()),
        ("vgg16.adam", Variant()),
        ("vgg16", Variant("lion")),
        ("vgg16", Variant(image_size=192)),
        ("vgg16", Variant(sequence_length=8)),
        ("vgg16", Variant(legacy=True)),
        ("vgg16", Variant(checkpointing=True)),
        ("vgg16", Variant(cpu=True)),
    ],
)
def test_other_requests_have_no_packaged_workload(spec, variant):
    assert packaged_workload(spec, ("fp32",), variant) is None


def test_sequence_length_for_image_model_is_an_error():
    with pytest.raises(TrainpaceError, match="has no sequence length"):
        load_workload("vgg16", ("fp32",), Variant(sequence_length=8))


@pytest.mark.parametrize("batches", ["1:70", "32"])
def test_forecast_by_name_imports_no_heavy_package(tmp_path, batches):
    """It also starts no other process, which could import it there."""
    code = (
        "import json, subprocess, sys\n"
        "subprocess.Popen = None\n"
        "from trainpace.cli import main\n"
        f"sys.argv = ['trainpace', 'forecast', 'vgg16', '--gpu', 'T4', '--batch', '{batches}', '--no-journal']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout.splitlines()[-1])
    assert "trainpace" in imported
    heavy = {
        "torch",
        "scipy",
        "pyarrow",
        "pandas",
        "sqlalchemy",
        "sqlite3",
        "jinja2",
        "starlette",
        "asyncio",
        "yaml",
    }
    assert not heavy & set(imported)

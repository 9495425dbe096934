"""Parsing of model specs."""

import subprocess
import sys

import pytest

from trainpace.core.errors import TrainpaceError
from trainpace.workload import ModelSpec, packaged_workload
from trainpace.workload.model_spec import check_packages, import_package
from trainpace.workload.workload import PLAIN


@pytest.mark.parametrize(
    ("text", "kind", "name", "path"),
    [
        ("resnet50", "built_in", "resnet50", ""),
        ("torchvision:resnet50", "torchvision", "resnet50", ""),
        ("timm:vit_base_patch16_224.augreg", "timm", "vit_base_patch16_224.augreg", ""),
        ("timm:", "timm", "", ""),
        ("timm:x.json", "timm", "x.json", ""),
        ("transformers:gpt2.json", "transformers", "gpt2.json", "gpt2.json"),
        ("transformers:a:b/c.json", "transformers", "a:b/c.json", "a:b/c.json"),
        ("diffusers:unet/config.json", "diffusers", "unet/config.json", "unet/config.json"),
        ("train.py:task", "code", "task", "train.py"),
        ("a.py:b", "code", "b", "a.py"),
        ("dir/x.py:make", "code", "make", "dir/x.py"),
        ("odd:name.py:make", "code", "make", "odd:name.py"),
        ("/x/my.json.py:f", "code", "f", "/x/my.json.py"),
        ("a.py:b.json", "code", "b.json", "a.py"),
        ("a.py:", "code", "", "a.py"),
        ("dir/x.py", "script", "", "dir/x.py"),
        ("x.json", "workload", "x.json", "x.json"),
        ("recording/workload.json", "workload") + ("recording/workload.json",) * 2,
        ("odd:name.json", "workload", "odd:name.json", "odd:name.json"),
        ("a.py:b:c", "unknown", "c", ""),
        ("keras:vgg16", "unknown", "vgg16", ""),
        ("x.json:", "unknown", "", ""),
        (":", "unknown", "", ""),
        ("", "built_in", "", ""),
        ("../weights", "built_in", "../weights", ""),
        ("timm", "built_in", "timm", ""),
        ("x.pyc", "built_in", "x.pyc", ""),
    ],
)
def test_spec_is_split_into_kind_name_and_path(text, kind, name, path):
    assert ModelSpec.of(text) == (text, kind, name, path)


@pytest.mark.parametrize(
    ("text", "saved", "code", "checkpointing"),
    [
        ("resnet50", False, False, False),
        ("torchvision:resnet50", False, False, False),
        ("timm:resnet50", False, False, True),
        ("transformers:gpt2.json", False, False, True),
        ("diffusers:unet.json", False, False, True),
        ("x.json", True, False, True),
        ("a.py:b", False, True, False),
        ("a.py", False, False, False),
    ],
)
def test_spec_properties_follow_from_its_kind(text, saved, code, checkpointing):
    spec = ModelSpec.of(text)
    assert (spec.is_saved, spec.runs_code, spec.can_checkpoint) == (saved, code, checkpointing)
    assert spec.has_fixed_length == (saved or code)


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("a.py:b", "/there:b"),
        ("transformers:gpt2.json", "transformers:/there"),
        ("diffusers:unet.json", "diffusers:/there"),
        ("x.json", "/there"),
        ("resnet50", "resnet50"),
        ("timm:resnet50", "timm:resnet50"),
    ],
)
def test_with_path_replaces_file_of_spec(text, moved):
    assert ModelSpec.of(text).with_path("/there") == moved


def test_built_in_models_alias_torchvision_names():
    both = ("resnet50", "torchvision:resnet50")
    assert ModelSpec.of("resnet50").aliases == ModelSpec.of("torchvision:resnet50").aliases == both
    assert ModelSpec.of("timm:resnet50").aliases == ("timm:resnet50",)
    assert ModelSpec.of("timm:resnet50").plain_name == "resnet50"
    assert ModelSpec.of("task.py:resnet50").plain_name == "task.py:resnet50"


def test_in_memory_workload_spec_has_no_path():
    workload = packaged_workload("resnet18", ("fp32",), PLAIN)
    spec = ModelSpec.of(workload)
    assert (spec.is_saved, spec.path, spec.text) == (True, "", "resnet18")
    assert spec.in_words != ModelSpec.of("resnet18").in_words


def test_spec_parsing_does_not_import_numpy_or_torch():
    code = (
        "import sys; from trainpace.workload import ModelSpec; ModelSpec.of('a.py:b');"
        " print([name for name in ('numpy', 'torch', 'msgspec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_all_missing_packages_are_named_at_once(monkeypatch):
    for name in ("transformers", "peft"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TrainpaceError) as caught:
        check_packages("transformers", "peft", "json")
    assert "'trainpace[transformers,peft]'" in caught.value.hint
    assert "json" not in caught.value.hint
    check_packages("json")
    with pytest.raises(TrainpaceError, match="pip install torchao"):
        import_package("no_such_module", "torchao")

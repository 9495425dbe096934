"""A model is traced once; later requests read the trace from the user's cache."""

import json

import pytest

from trainpace.workload import Variant, Workload, load_workload, workloads

CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 1,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 50,
}
SMALL = Variant(image_size=64)
"""Not packaged, so that it has to be traced."""
REQUEST = {"spec": "resnet18", "forms": ["fp32"], "variant": SMALL._asdict()}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(workloads.CACHE_FOLDER, str(tmp_path / "traces"))
    return tmp_path / "traces"


@pytest.fixture
def traced(monkeypatch):
    """Return the specs that a process traced, in order."""
    specs, started = [], workloads.run_isolated

    def counted(worker, request, *rest):
        specs.extend(one["spec"] for one in request["requests"])
        return started(worker, request, *rest)

    monkeypatch.setattr(workloads, "run_isolated", counted)
    return specs


def test_trace_is_cached_until_its_inputs_change(tmp_path, traced):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    spec = f"transformers:{path}"
    first, again = (load_workload(spec, ("fp32",), Variant(sequence_length=8)) for _ in range(2))
    assert again.parameters == first.parameters
    assert len(traced) == 1
    load_workload(spec, ("fp32",), Variant(sequence_length=16))
    assert len(traced) == 2
    path.write_text(json.dumps(CONFIG | {"n_layer": 2}))
    assert load_workload(spec, ("fp32",), Variant(sequence_length=8)).parameters > first.parameters
    assert len(traced) == 3


def test_user_files_are_not_cached(tmp_path, folder):
    assert workloads.cache_file(REQUEST | {"spec": f"{tmp_path}/train.py:task"}) is None
    assert workloads.cache_file(REQUEST | {"spec": f"transformers:{tmp_path}/none.json"}) is None
    assert workloads.cache_file(REQUEST).parent == folder


def test_cache_key_includes_the_tracer(monkeypatch):
    before = workloads.cache_file(REQUEST)
    monkeypatch.setattr(workloads, "_tracer", lambda: "changed")
    assert workloads.cache_file(REQUEST) != before


@pytest.mark.parametrize("content", [b"", b"no gzip", b"\x1f\x8b\x08"])
def test_damaged_cache_file_is_traced_again(folder, traced, content):
    file = workloads.cache_file(REQUEST)
    folder.mkdir()
    file.write_bytes(content)
    load_workload("resnet18", ("fp32",), SMALL)
    assert len(traced) == 1
    assert workloads.from_cache(file, Workload) is not None


def test_unwritable_cache_folder_is_ignored(folder, tmp_path):
    folder.write_text("a file where the folder should be")
    assert load_workload("resnet18", ("fp32",), SMALL).parameters > 0


def test_cache_size_is_limited(folder, monkeypatch):
    monkeypatch.setattr(workloads, "MOST_KEPT", 2)
    for name in "abc":
        workloads.into_cache(folder / f"{name}.json.gz", "{}")
    assert len(list(folder.iterdir())) == 2


def test_cache_can_be_disabled(monkeypatch):
    monkeypatch.setenv(workloads.CACHE_FOLDER, workloads.OFF)
    assert workloads.cache_file(REQUEST) is None

"""The recorder does not change the behavior of scripts, and its errors do not end them."""

import gc
import importlib
import importlib.machinery
import os
import sys
import time
import weakref
from collections import Counter
from types import SimpleNamespace

import torch

from made_logs import read_log
from trainpace.watch.inside.event_log import OPTIMIZER, OTHER, EventLogWriter, Step
from trainpace.watch.inside.loaders import timed_fetch
from trainpace.watch.inside.patches import Optimizers
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.script import Sampler
from trainpace.watch.inside.start import when_imported
from watch.test_watch_scripts import run

ODD = """
import functools, pickle, warnings
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x, y):
        return F.cross_entropy(self.layer(x), y)

torch.jit.script(WithLoss())
torch.jit.script(nn.CrossEntropyLoss())

@torch.jit.script
def without_gradients(x):
    with torch.no_grad():
        return x * 2

assert not without_gradients(torch.ones(2, requires_grad=True)).requires_grad

class Batch(dict):
    __getattr__ = dict.__getitem__  # raises KeyError where getattr expects AttributeError

def collate(samples):
    return Batch(x=torch.stack([x for x, _ in samples]), y=torch.tensor([y for _, y in samples]))

class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return 3
    def __iter__(self):
        return iter(range(5))

with warnings.catch_warnings():
    warnings.simplefilter("error")  # a length that the script never asks for must not be checked
    assert len(list(torch.utils.data.DataLoader(Stream()))) == 5

class Loader(torch.utils.data.DataLoader):
    def __eq__(self, other):  # so it has no hash
        return False

calls = []

def doubled(plain):
    @functools.wraps(plain)
    def loss(*args, **kwargs):
        calls.append(plain)
        return 2 * plain(*args, **kwargs)
    return loss

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.ones(4), 1)] * 32
for i, batch in enumerate(Loader(data, batch_size=4, collate_fn=collate)):
    F.cross_entropy(model(batch.x), batch.y).backward()
    optimizer.step()
    if i == 0:
        F.cross_entropy = doubled(F.cross_entropy)
assert len(calls) == 7, "the script's own loss was taken away"
nn.LazyLinear(3).to("cpu")
assert all(pickle.loads(pickle.dumps(f)) is f for f in (torch.save, nn.utils.clip_grad_norm_, print))
traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
assert [n.op for n in traced.graph.nodes] == ["placeholder", "call_module", "output"]
"""


def test_unusual_scripts_run_unchanged_under_the_recorder(tmp_path, capfd):
    code, recording = run(tmp_path, ODD)
    assert "Traceback" not in capfd.readouterr().err
    assert code == 0
    assert recording.ranks[0].steps == 6
    assert recording.ranks[0].samples_per_step == 4


def watched(tmp_path):
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    return recorder, Optimizers(recorder)


def optimizer_of():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def test_time_after_a_failed_optimizer_step_is_not_optimizer_time(tmp_path):
    recorder, optimizers = watched(tmp_path)
    optimizer = optimizer_of()
    for _ in range(300):
        optimizers.before(
            optimizer, (), {}
        )  # `after` is not called: the step raised, and the script retries
    optimizers.before(optimizer, (), {})
    optimizers.after(optimizer, (), {})
    assert (recorder.part, recorder._stack, recorder.steps) == (OTHER, [], 1)


def test_failed_optimizer_is_not_kept_alive(tmp_path):
    recorder, optimizers = watched(tmp_path)
    optimizer = optimizer_of()
    optimizers.before(optimizer, (), {})
    assert recorder.part == OPTIMIZER
    del optimizer
    gc.collect()
    assert optimizers.first() is None
    another, third = optimizer_of(), optimizer_of()
    for used in (another, third, another, third):  # only steps of the first one count now
        optimizers.before(used, (), {})
        optimizers.after(used, (), {})
    assert (recorder.part, recorder.steps) == (OTHER, 2)


def test_nested_step_of_one_optimizer_counts_once(tmp_path):
    recorder, optimizers = watched(tmp_path)
    optimizer = optimizer_of()
    for _ in range(2):
        optimizers.before(optimizer, (), {})  # a subclass and its base class both call the hooks
        optimizers.before(optimizer, (), {})
        optimizers.after(optimizer, (), {})
        optimizers.after(optimizer, (), {})
    recorder.log.flush()
    steps = [r for r in read_log((tmp_path / "a.trail").read_bytes())[1] if isinstance(r, Step)]
    assert len(steps) == 2
    assert [sum(s.parts_ns) for s in steps] == [s.end_ns - s.start_ns for s in steps]


IMPORTS_TORCH = """
from safetensors.torch import save_file  # which imports torch, and so is half imported when torch has come
import torch
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(5):
    save_file({}, 'model.safetensors')
    optimizer.step()
"""


def test_packages_importing_torch_are_recorded_without_msgspec(tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    (packages / "safetensors").mkdir(parents=True)
    (packages / "safetensors" / "__init__.py").touch()
    (packages / "safetensors" / "torch.py").write_text(
        "import time, torch\ndef save_file(tensors, filename): time.sleep(0.01)\ndef save_model(): pass\n"
    )
    (packages / "msgspec.py").write_text("raise ImportError('not in this environment')")
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    code, recording = run(tmp_path, IMPORTS_TORCH)
    assert code == 0
    assert recording.ranks[0].parts_ms["checkpoint"] > 9


def test_worker_without_file_descriptors_still_fetches(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=0))
    recorder, _ = watched(tmp_path)
    fetcher = SimpleNamespace(collate_fn=list)
    fetch = timed_fetch(
        lambda self, indices: self.collate_fn(indices), recorder, str(tmp_path / "gone")
    )
    assert fetch(fetcher, [1, 2]) == [1, 2]


def test_sampled_lines_can_be_read_during_sampling(tmp_path):
    recorder, _ = watched(tmp_path)
    sampler = Sampler(recorder)

    class Counted(Counter):
        def items(self):  # simulates the sampling thread adding a line during iteration
            for item in super().items():
                self[0, f"line {len(self)}", ""] = 1
                yield item

    sampler._counts = Counted({(0, "line", ""): 3})
    assert sampler.counts()[0] == ("other", "line", "", 3)


def test_sampler_keeps_no_reference_to_frames(tmp_path):
    recorder, _ = watched(tmp_path)
    sampler = Sampler(recorder)
    sampler.at_step(None)

    class Large:
        pass

    def function():
        large = Large()
        gone.append(weakref.ref(large))
        while not sampler._counts:
            time.sleep(0.001)

    gone = []
    for _ in range(10):
        sampler._counts.clear()
        function()
        time.sleep(0.002)
        assert gone[-1]() is None
    sampler.stop()


OWN_LOSS = """
import gc, weakref
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        logits = self.layer(x)
        return {"loss": logits.sum(), "logits": logits}

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outputs = []
for _ in range(5):
    output = model(torch.ones(2, 4))
    outputs.append(weakref.ref(output["logits"]))
    output["loss"].backward()
    optimizer.step()
del output
gc.collect()
assert not any(ref() is not None for ref in outputs), "an output is still held"
"""


def test_outputs_are_released_after_their_step(tmp_path, capfd):
    code, _ = run(tmp_path, OWN_LOSS)
    assert "still held" not in capfd.readouterr().err
    assert code == 0
    assert (tmp_path / "recording" / "workload.json").exists()


class Unchangeable:
    """A module loader that accepts no attributes."""

    __slots__ = ()

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.loaded = True


class Finder:
    def find_spec(self, name, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, Unchangeable()) if name == "odd_to_load" else None
        )


def test_module_with_a_read_only_loader_can_be_imported(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    when_imported("odd_to_load", lambda module: None)
    assert importlib.import_module("odd_to_load").loaded
    sys.modules.pop("odd_to_load")

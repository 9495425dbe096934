"""Tests of real scripts under the recorder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import load
from trainpace.watch import environment, read_recording, watch
from trainpace.workload import Workload
from watch.scripts import losses, script, watched


def test_plain_script_trains_the_same_under_the_recorder(tmp_path, monkeypatch):
    path = script(tmp_path, sleep_s=0.001)
    code, recording, watched_losses = watched(path, monkeypatch)
    assert code == 0
    assert watched_losses == losses(path)
    (rank,) = recording.ranks
    assert rank.steps == 45
    assert sum(rank.parts_ms.values()) == pytest.approx(rank.step_ms, rel=1e-6)
    assert rank.parts_ms["data"] > 8  # eight samples that sleep for 1 ms
    assert rank.samples_per_step == 8
    assert rank.optimizer == "AdamW"
    assert rank.loader.samples_in_dataset == 192
    assert rank.fetch.sample_wall_ms > 1 > rank.fetch.sample_cpu_ms
    assert rank.lines[0].line.split()[0].endswith("train.py:10")


def test_model_is_captured_as_a_workload(tmp_path, monkeypatch):
    path = script(tmp_path)
    watched(path, monkeypatch)
    workload = load(tmp_path / "recording" / "workload.json", Workload)
    assert workload.parameters == 16 * 64 + 64 + 64 * 4 + 4
    assert workload.optimizer == "adamw"
    flops = workload.form("fp32").operators.flops
    assert flops.sum(axis=0)[-1] > 0


def test_workers_record_their_own_times(tmp_path, monkeypatch):
    path = script(tmp_path, sleep_s=0.002, workers=2)
    code, recording, watched_losses = watched(path, monkeypatch)
    assert code == 0
    assert watched_losses == losses(path)
    (rank,) = recording.ranks
    assert rank.fetch.in_workers
    assert rank.fetch.sample_wall_ms > 2
    assert rank.parts_ms["loader_start"] > 0
    assert len(list((tmp_path / "recording").glob("worker-*"))) == 4  # two workers, two epochs


EXTRA = """
if len(losses) % 4 == 0:
    torch.save(model.state_dict(), os.environ["LOSSES"] + ".pt")
if len(losses) % 12 == 0:
    model.eval()
    with torch.no_grad():
        for x, y in torch.utils.data.DataLoader(Data(), batch_size=64):
            model(x)
    model.train()
print(loss.item(), file=sys.stderr)
"""


def test_evaluation_checkpoints_and_logging_are_separate_parts(tmp_path, monkeypatch):
    path = script(tmp_path, sleep_s=0.0005, extra=EXTRA)
    code, recording, watched_losses = watched(path, monkeypatch)
    assert code == 0
    assert watched_losses == losses(path)
    parts = recording.ranks[0].parts_ms
    assert parts["evaluation"] > 3 * 192 * 0.5 / 45  # time after the last step does not count
    assert 192 * 0.5 < recording.ranks[0].after_last_ms["evaluation"] < 60 * parts["evaluation"]
    assert parts["checkpoint"] > 0.02
    assert parts["logging"] > 0
    assert parts["data"] > 4


def test_killed_run_keeps_its_steps(tmp_path):
    path = script(tmp_path, sleep_s=0.001, epochs=1000)
    folder = tmp_path / "recording"
    folder.mkdir()
    (folder / "command.json").write_text(
        json.dumps({"command": ["x"], "seconds": None, "exit_code": None})
    )
    process = subprocess.Popen(
        [sys.executable, str(path)],
        env={**environment(folder, os.environ), "LOSSES": str(tmp_path / "l")},
    )
    deadline = time.monotonic() + 60
    while (
        time.monotonic() < deadline
        and sum(f.stat().st_size for f in folder.glob("*.trail")) < 20_000
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    recording = read_recording(folder)
    assert recording.ranks[0].steps > 20
    assert not recording.ranks[0].complete


def run(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    code = watch([sys.executable, str(path)], tmp_path / "recording")
    return code, read_recording(tmp_path / "recording")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("print('no torch here')", "No Python process of this command imported torch"),
        ("import torch", "no batch of a DataLoader, no model call, no optimizer step"),
        (
            "import torch; m = torch.nn.Linear(2, 2)\nfor i in range(3): m(torch.ones(1, 2))",
            "3 model calls",
        ),
    ],
)
def test_script_without_steps_is_reported(tmp_path, text, seen):
    code, recording = run(tmp_path, text)
    assert code == 0
    assert recording.ranks == ()
    assert seen in recording.seen


def test_exit_code_of_the_script_is_returned(tmp_path):
    assert run(tmp_path, "import torch, sys; sys.exit(7)")[0] == 7


def test_failing_script_is_recorded_up_to_the_error(tmp_path, monkeypatch):
    path = script(tmp_path, extra="if len(losses) == 20: raise RuntimeError('no more')")
    code, recording, _ = watched(path, monkeypatch)
    assert code == 1
    assert 15 <= recording.ranks[0].steps <= 20


CHECKS_FIRST = """
import torch
def loader(n): return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(n, 16)), batch_size=4)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
training, validation = loader(48), loader(400)
for epoch in range(2):
    with torch.no_grad():
        for (x,) in validation: model(x)
    for (x,) in training:
        loss = model(x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_epoch_length_comes_from_the_training_loader(tmp_path):
    """Lightning first runs a validation loader of the same batch size."""
    _, recording = run(tmp_path, CHECKS_FIRST)
    assert recording.ranks[0].loader.batches == 12


TRANSFORMS = """
import time, torch
class Normalize(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.001)
        return x - 1
class Data(torch.utils.data.Dataset):
    normalize = Normalize()
    def __len__(self): return 80
    def __getitem__(self, i): return self.normalize(torch.ones(16))
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.utils.data.DataLoader(Data(), batch_size=4):
    loss = model(x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_transform_modules_do_not_count_as_forward(tmp_path):
    """The transforms of torchvision are modules."""
    _, recording = run(tmp_path, TRANSFORMS)
    parts = recording.ranks[0].parts_ms
    assert parts["data"] > max(4, parts["forward"])


FORGETS_NO_GRAD = """
import time, torch
class Net(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.002)
        return super().forward(x)
model = Net(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.ones(8, 16)
for epoch in range(20):
    model.train()
    loss = model(x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    model.eval()
    print(model(x).square().mean())
"""


def test_validation_without_no_grad_counts_as_evaluation(tmp_path):
    """A graph network may be evaluated on other nodes after each step."""
    _, recording = run(tmp_path, FORGETS_NO_GRAD)
    parts = recording.ranks[0].parts_ms
    assert parts["forward"] > 2
    assert parts["evaluation"] > 2


STAYS_IN_EVALUATION_MODE = """
import torch
model, criterion = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)), torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(1280, 256)), batch_size=64)
model.train()
for epoch in range(3):
    for (x,) in data:
        loss = criterion(model(x), x)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    model.eval()
    with torch.no_grad():
        model(x[:1])
"""


def test_training_in_evaluation_mode_counts_as_training(tmp_path):
    """The validation of some U-Nets leaves the model in evaluation mode."""
    _, recording = run(tmp_path, STAYS_IN_EVALUATION_MODE)
    parts = recording.ranks[0].parts_ms
    assert parts["evaluation"] < parts["forward"]


STARTS_WORKERS = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = torch.utils.data.TensorDataset(torch.rand(640, 64))
training = torch.utils.data.DataLoader(data, batch_size=64, num_workers=2)
for epoch in range(4):
    model.train()
    for (x,) in training:
        model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(x)
"""


def test_worker_start_after_evaluation_does_not_count_as_evaluation(tmp_path):
    _, recording = run(tmp_path, STARTS_WORKERS)
    parts = recording.ranks[0].parts_ms
    assert parts["loader_start"] > parts["evaluation"]


PREPARES_EPOCHS = """
import time, torch
from contextlib import nullcontext
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def batches(dataset):
    return torch.utils.data.DataLoader(dataset, batch_size=64)

def evaluate():
    model.eval()
    with AROUND_ALL():
        for (x,) in batches(held_out):
            with AROUND_BATCH():
                model(x)
            time.sleep(0.01)  # metrics
    model.train()

held_out = torch.utils.data.TensorDataset(torch.rand(640, 64))
for epoch in range(4):
    time.sleep(0.3)  # draws its samples anew
    for (x,) in batches(torch.utils.data.TensorDataset(torch.rand(640, 64))):
        model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    evaluate()
"""


@pytest.mark.parametrize(
    "contexts",
    [
        ("nullcontext", "torch.inference_mode"),
        pytest.param(("torch.no_grad", "nullcontext"), marks=pytest.mark.slow),
        pytest.param(
            ("lambda: torch.set_grad_enabled(False)", "nullcontext"), marks=pytest.mark.slow
        ),
    ],
)
def test_epoch_preparation_after_evaluation_counts_as_other(tmp_path, contexts):
    script = PREPARES_EPOCHS
    for place, context in zip(("AROUND_ALL", "AROUND_BATCH"), contexts, strict=True):
        script = script.replace(place, f"({context})")
    _, recording = run(tmp_path, script)
    rank = recording.ranks[0]
    assert rank.parts_ms["other"] * rank.steps > 0.9 * 3 * 300  # the first precedes all steps
    assert rank.parts_ms["evaluation"] * rank.steps > 0.9 * 3 * 100  # the last follows all steps


SAMPLES_FROM_A_COPY = """
import copy, torch
class Net(torch.nn.Sequential):
    pass
model = Net(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
average = copy.deepcopy(model).eval()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(640, 64)), batch_size=64)
for epoch in range(4):
    for (x,) in data:
        with torch.no_grad():
            average(x[:2])  # within a step, as a teacher's: no evaluation
        model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    with torch.no_grad():
        for _ in range(100):
            x = average(torch.rand(256, 64))
"""


def test_sampling_from_an_averaged_model_counts_as_evaluation(tmp_path):
    """Diffusion models draw images with an averaged copy of the model after each epoch."""
    _, recording = run(tmp_path, SAMPLES_FROM_A_COPY)
    (rank,) = recording.ranks
    assert rank.parts_ms["evaluation"] > rank.parts_ms["other"]
    assert rank.occasions["evaluation"] == pytest.approx(1 / 10, abs=0.05)


TRAINS_IN_A_CLOSURE = """
import time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(30):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        time.sleep(0.005)
        return loss
    optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
"""


def test_closure_time_does_not_count_as_optimizer_time(tmp_path):
    """Lightning trains in a closure."""
    _, recording = run(tmp_path, TRAINS_IN_A_CLOSURE)
    parts = recording.ranks[0].parts_ms
    assert parts["other"] > 4.5 > parts["optimizer"]
    assert parts["backward"] > 0


STEPS_WITH_ITS_MODEL = """
import torch
class OfAModel(torch.optim.SGD):
    def step(self, model, closure=None):
        assert list(model.parameters())
        return super().step(closure)
model = torch.nn.Linear(4, 4)
optimizer = OfAModel(model.parameters(), 0.01)
for step in range(10):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step(model) if step % 2 else optimizer.step(model=model)
"""


def test_custom_optimizer_gets_its_arguments_unchanged(tmp_path):
    code, recording = run(tmp_path, STEPS_WITH_ITS_MODEL)
    assert code == 0
    assert recording.ranks[0].steps + recording.ranks[0].warm_up == 10


EVALUATES_BEFORE_FUNCTIONS = """
import torch
weight = torch.zeros(256, 256, requires_grad=True)
net, criterion = torch.nn.Linear(256, 256), torch.nn.MSELoss()
optimizer = torch.optim.SGD([weight, *net.parameters()], 0.01)
x = torch.rand(256, 256)
for epoch in range(20):
    loss = criterion(torch.tanh(x @ weight), x) + (net(x).square().mean() if epoch < 2 else 0)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    net.eval()
    with torch.no_grad():
        net(x[:1])
    net.train()
"""


def test_functional_training_after_evaluation_counts_as_training(tmp_path):
    _, recording = run(tmp_path, EVALUATES_BEFORE_FUNCTIONS)
    parts = recording.ranks[0].parts_ms
    assert parts["evaluation"] < parts["forward"] + parts["other"]


IMPORTS_IN_WORKERS = """
import time, torch
class Data(torch.utils.data.Dataset):
    opened = False
    def __len__(self):
        return 64
    def __getitem__(self, i):
        if not self.opened:
            time.sleep(0.2)
            self.opened = True
        return torch.ones(8)
if __name__ == "__main__":
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1)
    for epoch in range(4):
        for x in loader:
            model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_slow_first_sample_of_a_worker_counts_as_loader_start(tmp_path):
    """For example, 20 workers import librosa in each epoch, and a sample takes 0.4 ms."""
    _, recording = run(tmp_path, IMPORTS_IN_WORKERS)
    (rank,) = recording.ranks
    assert rank.parts_ms["loader_start"] > 200 / 16 * 0.7
    assert rank.parts_ms["data"] < 5
    assert rank.fetch.sample_wall_ms < 5


EVALUATES_A_PART = """
import torch
class Inner(torch.nn.Sequential):
    pass
inner = Inner(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64))
loss = torch.nn.Sequential(inner, torch.nn.Flatten())
optimizer = torch.optim.SGD(loss.parameters(), 0.01)
data = torch.utils.data.TensorDataset(torch.rand(320, 64))
for epoch in range(4):
    for (x,) in torch.utils.data.DataLoader(data, batch_size=32):
        loss(x).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
        with torch.no_grad():
            inner(x[:2])  # within a step: no evaluation
        loss(x).square().mean().backward()
    inner.eval()
    with torch.no_grad():
        for _ in range(10):
            inner(torch.rand(256, 64))
    inner.train()
"""


def test_evaluation_of_a_submodule_counts_as_evaluation(tmp_path):
    """In sentence-transformers, losses contain the model and evaluators call the model alone."""
    _, recording = run(tmp_path, EVALUATES_A_PART)
    (rank,) = recording.ranks
    assert rank.parts_ms["evaluation"] > 0
    assert rank.occasions["evaluation"] == pytest.approx(1 / 10, abs=0.05)


STAGES = """
import torch
layers = [torch.nn.Linear(16, 16) for _ in range(2)]
optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers]
for layer, optimizer in zip(layers, optimizers):
    for step in range(60):
        optimizer.zero_grad(); layer(torch.ones(4, 16)).square().mean().backward(); optimizer.step()
"""


def test_later_stage_with_its_own_optimizer_has_steps(tmp_path):
    """Layers are trained one after the other. The first twenty steps of the second are one."""
    _, recording = run(tmp_path, STAGES)
    assert recording.ranks[0].steps + recording.ranks[0].warm_up == 60 + 40


FORKS = """
import multiprocessing, os, sys, torch
import torch.distributed as dist

def train(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(torch.randn(80, 16))
    for (x,) in torch.utils.data.DataLoader(data, batch_size=4):
        loss = model(x).square().mean()
        optimizer.zero_grad(); loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    dist.destroy_process_group()

with __import__("socket").socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ranks = [multiprocessing.get_context("fork").Process(target=train, args=(rank, port)) for rank in range(2)]
for rank in ranks: rank.start()
for rank in ranks: rank.join()
sys.exit(max(rank.exitcode for rank in ranks))
"""


@pytest.mark.slow
def test_forked_ranks_are_recorded(tmp_path):
    code, recording = run(tmp_path, FORKS)
    assert code == 0
    assert [(r.rank, r.world_size, r.steps + r.warm_up) for r in recording.ranks] == [
        (0, 2, 20),
        (1, 2, 20),
    ]
    assert all(r.complete for r in recording.ranks)
    assert recording.ranks[0].samples_per_step == 4


def test_unknown_command_raises(tmp_path):
    with pytest.raises(TrainpaceError, match="no-such-command"):
        watch(["no-such-command"], tmp_path / "r")


def test_command_outside_the_path_is_reported_with_its_location(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    beside = Path(sys.executable).with_name("torchrun")
    with pytest.raises(
        TrainpaceError, match=f"torchrun is not on the PATH, though {beside} exists"
    ):
        watch(["torchrun", "train.py"], tmp_path / "r")


def test_command_that_cannot_be_started_raises(tmp_path):
    (tmp_path / "odd").write_text("#!/no/such/interpreter\n")
    (tmp_path / "odd").chmod(0o755)
    with pytest.raises(TrainpaceError, match="cannot start"):
        watch([str(tmp_path / "odd")], tmp_path / "r")
    with pytest.raises(TrainpaceError, match="cannot write into"):
        watch([sys.executable], tmp_path / "odd" / "r")


def test_command_ended_by_a_signal_has_the_shell_exit_code(tmp_path):
    assert run(tmp_path, "import os; os.kill(os.getpid(), 9)")[0] == 137


SAVES_ITSELF = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def test_sigterm_reaches_the_script(tmp_path):
    ready = tmp_path / "ready"
    arguments = (
        "watch",
        "--output",
        str(tmp_path / "r"),
        "--",
        sys.executable,
        "-c",
        SAVES_ITSELF,
        str(ready),
    )
    process = subprocess.Popen([sys.executable, "-m", "trainpace", *arguments])
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 5


def test_another_sitecustomize_still_runs(tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("""
import os
class Kept:
    def __del__(self, environ=os.environ):
        environ["SEEN"] = "no more"
kept = Kept()
os.environ["SEEN"] = "yes"
""")
    monkeypatch.setenv("PYTHONPATH", str(other))
    code, _ = run(tmp_path, "import os, torch; assert os.environ['SEEN'] == 'yes'")
    assert code == 0


def test_lazy_modules_are_recorded(tmp_path):
    code, recording = run(
        tmp_path,
        """
import torch
from torch import nn
model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(1))
model(torch.ones(2, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(12):
    optimizer.zero_grad()
    model.forward(torch.ones(2, 4)).sum().backward()
    optimizer.step()
""",
    )
    assert code == 0
    assert recording.ranks[0].steps > 5


def test_trials_end_the_script_and_save_no_checkpoints(tmp_path, monkeypatch):
    extra = (
        "torch.save({'step': len(losses)}, os.environ['LOSSES'] + '.pt')\n"
        "folder = os.environ['LOSSES'] + f'-checkpoints/{len(losses)}'; os.makedirs(folder); torch.save({}, folder + '/a.pt')\n"
        "kept = os.environ['LOSSES'] + '-kept-log'; os.makedirs(kept, exist_ok=True); open(kept + '/log', 'w').close()"
    )
    path = script(tmp_path, sleep_s=0.001, epochs=50, extra=extra)
    trials = {"block_steps": 4, "rounds": 2, "warm_up_steps": 6, "limit_s": 60}
    code, recording, watched_losses = watched(path, monkeypatch, trials=trials)
    assert code == 0
    assert watched_losses is None  # the script was ended early
    assert [path.name for path in tmp_path.glob("losses-watched*")] == ["losses-watched-kept-log"]
    (rank,) = recording.ranks
    assert [b.trial for b in rank.blocks[:4]] == ["plain", "cached_batch"] * 2
    plain, *cached = rank.blocks[0], rank.blocks[1], rank.blocks[3]
    # another program may take the core for some milliseconds in one block
    assert plain.parts_ms["data"] > 8 > 1 > min(block.parts_ms["data"] for block in cached)
    assert rank.operators > 10
    assert rank.flops > 0
    assert rank.matmul_gflops > 0.1
    assert set(rank.optimizer_variants_ms) == {"as it is", "fused", "foreach"}


DDP = """
import gc, os, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for i in range(60):
    x = torch.randn(8, 16)
    loss = nn.functional.cross_entropy(model(x), torch.zeros(8, dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if dist.get_rank() == 0:
    open(os.environ["LOSSES"], "w").write(repr(losses))
dist.barrier()
del model, loss, optimizer  # else gloo's threads outlive the group, and may abort a process that ends (pytorch/pytorch#190489)
gc.collect()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_rank_of_torchrun_is_recorded(tmp_path, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text(DDP)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    code, recording, _ = watched(path, monkeypatch, *launcher)
    assert code == 0
    assert [r.rank for r in recording.ranks] == [0, 1]
    assert all(r.world_size == 2 for r in recording.ranks)
    assert recording.ranks[0].ddp["avg_backward_comm_time"] > 0


@pytest.mark.long
def test_a_compiled_model_trains_the_same(tmp_path, monkeypatch):
    path = script(tmp_path, epochs=1)
    path.write_text(
        path.read_text().replace("optimizer =", "model = torch.compile(model)\n    optimizer =", 1)
    )
    code, recording, watched_losses = watched(path, monkeypatch)
    assert code == 0
    assert watched_losses == losses(path)
    assert recording.ranks[0].parts_ms["forward"] > 0


EVALUATES = """
if len(losses) % 3 == 0:
    model.eval()
    with torch.no_grad():
        for x, y in torch.utils.data.DataLoader(Data(), batch_size=64):
            model(x)
    model.train()
"""


def test_evaluations_and_epochs_end_with_a_cached_batch(tmp_path, monkeypatch):
    path = script(tmp_path, epochs=50, extra=EVALUATES)
    trials = {"block_steps": 30, "rounds": 1, "warm_up_steps": 6, "limit_s": 60}
    code, recording, _ = watched(path, monkeypatch, trials=trials)
    assert code == 0
    cached = next(b for b in recording.ranks[0].blocks if b.trial == "cached_batch")
    assert cached.steps == 30
    assert cached.parts_ms["evaluation"] > 0

"""Scripts of every engine train the same under the recorder, and each rank is recorded."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from trainpace.watch import COMMAND_FILE, environment, read_recording, records_of
from trainpace.watch.inside.engines import OTHER_COLLECTIVES, REDUCTIONS, _collectives, _deepspeed
from trainpace.watch.inside.event_log import EventLogWriter
from trainpace.watch.inside.patches import Optimizers
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trials import NO_SYNC, PLAIN

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "planted"))
from cases import CASES  # noqa: E402
from launch import environment as engines  # noqa: E402
from launch import run  # noqa: E402

NEEDS_ENGINES = pytest.mark.skipif(
    not (ROOT / ".engines").is_dir(), reason="make .engines/installed"
)
EXPECTED = {
    "lightning_checkpoint": ("data", "forward", "backward", "optimizer", "checkpoint"),
    "hf_evaluate": ("data", "forward", "backward", "optimizer", "evaluation"),
    "accelerate_compressed": ("data", "forward", "backward", "optimizer"),
    "fsdp2_gather": ("data", "forward", "backward", "optimizer", "communication"),
    "deepspeed_zero2": ("data", "forward", "backward", "optimizer", "communication"),
    "ddp_accumulation": ("data", "forward", "backward", "optimizer"),
}


def test_deepspeed_engine_steps_are_counted_not_optimizer_steps(tmp_path):
    """ZeRO's optimizer steps once before training and then once per parameter group."""
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))

    class DeepSpeedEngine:
        def __init__(self, optimizer):
            self.optimizer, self.micro_steps = optimizer, 0
            optimizer.step()

        def is_gradient_accumulation_boundary(self):
            return self.micro_steps % 2 == 1

        def backward(self, loss):
            loss.backward()

        def step(self):
            if self.is_gradient_accumulation_boundary():
                for _ in range(2):
                    self.optimizer.step()
            self.micro_steps += 1

        def save_checkpoint(self, save_dir):
            pass

    _deepspeed(SimpleNamespace(DeepSpeedEngine=DeepSpeedEngine), recorder)
    optimizers, weight = Optimizers(recorder), torch.ones(2, requires_grad=True)
    hooks = (
        register_optimizer_step_pre_hook(optimizers.before),
        register_optimizer_step_post_hook(optimizers.after),
    )
    try:
        engine = DeepSpeedEngine(torch.optim.SGD([weight], 0.1))
        counted = [recorder.steps]
        for _ in range(6):
            engine.backward(weight.sum())
            engine.step()
            counted.append(recorder.steps)
    finally:
        for hook in hooks:
            hook.remove()
    assert counted == [0, 0, 1, 1, 2, 2, 3]


def test_alternating_optimizers_start_one_new_stage(tmp_path):
    """PPO alternates between many policy steps and many value steps."""
    recorder = Recorder(EventLogWriter(str(tmp_path / "process.trail"), {}))
    optimizers, weight = Optimizers(recorder), torch.ones(2, requires_grad=True)
    policy, value = (torch.optim.SGD([weight], 0.1) for _ in range(2))
    for one in [policy] * 50 + [value] * 50 + [policy] * 50 + [value] * 50:
        optimizers.before(one, (), {})
        optimizers.after(one, (), {})
    recorder.log.flush()
    notes = [
        r
        for r in records_of(tmp_path / "process.trail")
        if isinstance(r, dict) and "begins_anew" in r
    ]
    assert len(notes) == 1


@pytest.fixture
def second_rank_is_a_fake(monkeypatch):
    for owner in (dist, distributed_c10d):
        for name in (*REDUCTIONS, *OTHER_COLLECTIVES):
            if hasattr(owner, name):  # restore the functions that the hooks replace
                monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(distributed_c10d.Work, "wait", distributed_c10d.Work.wait)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_no_sync_trial_skips_all_fsdp2_collectives(tmp_path, second_rank_is_a_fake):
    """The names of the collectives depend on the version of torch."""
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    _collectives(distributed_c10d, recorder)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    for module in (layers[0], layers):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    exchanged = []

    class Exchanges(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            exchanged.extend([str(function)] if function.namespace == "c10d" else [])
            return function(*args, **(kwargs or {}))

    def of_a_step(trial):
        recorder.active_trial = trial
        exchanged.clear()
        with Exchanges():
            layers(torch.ones(4, 64)).sum().backward()
        return list(exchanged)

    assert len(of_a_step(PLAIN)) > 3
    assert of_a_step(NO_SYNC) == []


def losses(case, kept: Path, env: dict[str, str] | None = None) -> list[str]:
    """Return every rank's losses, or none if the run failed, as gloo sometimes does."""
    outcome = run(case, env={**(env or {}), "LOSSES": str(kept)})
    found = [path.read_text() for path in sorted(kept.parent.glob(f"{kept.name}*"))]
    if not found:
        print(outcome.output[-4000:])
    return found


@NEEDS_ENGINES
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_engine_script_trains_the_same_under_the_recorder(name, tmp_path):
    case = next(c for c in CASES if c.name == name)
    bare = losses(case, tmp_path / "bare") or losses(case, tmp_path / "bare")
    for logs in (tmp_path / "trails", tmp_path / "once more"):
        logs.mkdir()
        (logs / COMMAND_FILE).write_text(
            json.dumps({"command": [name], "seconds": 1.0, "exit_code": 0})
        )
        if watched := losses(case, tmp_path / "watched", environment(logs, engines())):
            break
    ranks = read_recording(logs).ranks
    assert bare
    assert watched == bare
    assert [r.rank for r in ranks] == list(range(case.ranks))
    for rank in ranks:
        assert rank.steps > 20
        assert rank.micro_steps == case.micro_steps
        assert sum(rank.parts_ms.values()) == pytest.approx(rank.step_ms)
        assert all(rank.parts_ms[part] > 0 for part in EXPECTED[name])

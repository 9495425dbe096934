"""Steps with the model in bf16: what is called so, what bears it, and which blocks are made."""

import pytest
import torch

from trainpace.watch.inside import observers
from trainpace.watch.inside import trials as trials_module
from trainpace.watch.inside.event_log import PARTS, TRIALS, EventLogWriter, Step
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trials import BF16, PAIRS, PLAIN, SETTLING, InBf16, Trials

SETTINGS = {"block_steps": 2, "rounds": 2, "warm_up_steps": 4, "limit_s": 60, "without": []}


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    recorder.matmul_dtype = torch.float32
    return recorder


@pytest.fixture
def fast_bf16(monkeypatch):
    """A CPU that multiplies twice as fast in bf16."""
    monkeypatch.setattr(
        observers, "matmul_rate_gflops", lambda dtype: 2.0 if dtype is torch.bfloat16 else 1.0
    )


def test_a_module_computes_in_bf16_and_gives_fp32(recorder):
    seen = []

    class Net(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append(y.dtype)
            return {"scores": y, "more": (y, 3)}

    net, in_bf16 = Net(8, 4), InBf16(recorder)
    output = in_bf16.calls(torch.nn.Module.__call__)(net, torch.rand(2, 8))
    assert seen == [torch.bfloat16]
    assert (output["scores"].dtype, output["more"][0].dtype, output["more"][1]) == (
        torch.float32,
        torch.float32,
        3,
    )
    torch.nn.functional.binary_cross_entropy(
        output["scores"].sigmoid(), torch.rand(2, 4)
    ).backward()
    assert net.weight.grad.dtype is torch.float32
    assert in_bf16.applies


def test_a_model_that_does_not_bear_it_is_called_as_it_is(recorder):
    calls = []

    class Net(torch.nn.Module):
        def forward(self, x):
            calls.append(torch.is_autocast_enabled("cpu"))
            if calls[-1]:
                raise RuntimeError("not for bf16")
            return x

    in_bf16, net = InBf16(recorder), Net()
    call = in_bf16.calls(torch.nn.Module.__call__)
    assert call(net, torch.ones(2)).sum() == call(net, torch.ones(2)).sum() == 2
    assert calls == [True, False, False]
    assert not in_bf16.applies


def test_an_error_of_the_model_itself_is_the_scripts_own(recorder):
    class Net(torch.nn.Module):
        def forward(self, x):
            raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        InBf16(recorder).calls(torch.nn.Module.__call__)(Net(), torch.ones(2))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"compiled": True}, False),
        ({"step_is_the_engines": True}, False),
        ({"matmul_dtype": torch.bfloat16}, False),
        ({"matmul_dtype": None}, False),
    ],
)
def test_it_is_tried_where_it_may_gain(recorder, fast_bf16, changes, expected):
    for name, value in changes.items():
        setattr(recorder, name, value)
    assert InBf16(recorder).may_gain() is expected


def test_it_is_not_tried_where_bf16_is_no_faster(recorder, monkeypatch):
    monkeypatch.setattr(observers, "matmul_rate_gflops", lambda dtype: 1.0)
    assert not InBf16(recorder).may_gain()


@pytest.mark.parametrize("bears", [True, False])
def test_blocks_in_bf16_come_after_all_rounds_and_beside_plain_ones(
    recorder, monkeypatch, fast_bf16, bears
):
    monkeypatch.setattr(trials_module, "end", lambda recorder: None)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    recorder.optimizer = lambda: optimizer
    trials = recorder.trials = Trials(recorder, SETTINGS | {"only_steps": True})
    counted = []

    def net(module):
        if torch.is_autocast_enabled("cpu") and not bears:
            raise RuntimeError("no")

    for number in range(60):
        before = recorder.trial
        if recorder.calls_as is not None:
            assert recorder.active_trial == BF16
            recorder.calls_as(net)(torch.nn.Linear(1, 1))
        trials.at_step(Step(recorder.trial, 1, number, 0, 1, 0, 0.0, 0.0, (0,) * len(PARTS)))
        if number >= SETTINGS["warm_up_steps"] and before != SETTLING:
            counted.append(before)
        if trials.programme == [] and trials.left <= 0:
            break
    blocks = [kind for i, kind in enumerate(counted) if i % 2 == 0]
    in_turns = [BF16, PLAIN] if bears else [PLAIN]
    assert blocks == [PLAIN] * SETTINGS["rounds"] + in_turns * PAIRS
    assert TRIALS[BF16] == "bf16"
    assert recorder.calls_as is None


def test_a_loss_alone_is_no_model(recorder):
    in_bf16 = InBf16(recorder)
    in_bf16.calls(torch.nn.Module.__call__)(torch.nn.MSELoss(), torch.ones(2), torch.ones(2))
    assert not in_bf16.applies


def test_where_time_is_short_bf16_and_a_loaders_stock_get_a_share_of_it(recorder, fast_bf16):
    """Of 60 steps that there is time for, eight workers with two batches each would take 18 before every block."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    recorder.optimizer = lambda: optimizer

    def planned(stock):
        trials = recorder.trials = Trials(
            recorder, SETTINGS | {"budget_s": 60.0, "rounds": 4, "block_steps": 8}
        )
        trials.deadline_ns, trials.step_ns, trials.stock = (
            trials_module.now_ns() + 60 * 10**9,
            10**9,
            stock,
        )
        trials.remembered = {1: trials_module.RememberedBatch(None, torch.ones(8), 8)}
        trials._steps_fed.update([1])
        a_round, _, rounds = trials.planned(4)
        kinds = [TRIALS[kind] for kind, counted_as, _ in a_round if counted_as != SETTLING]
        return kinds, sum(steps for *_, steps in a_round) * rounds

    kinds, steps = planned(0)
    assert kinds == ["plain", "cached_batch"]
    assert steps <= 60 * (1 - trials_module.MOST_FOR_BF16) + 1
    assert planned(16)[0] == ["plain"]

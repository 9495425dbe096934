"""Gradient norms from real backward passes, compared with the known noise scale of a linear regression."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from trainpace.core.errors import TrainpaceError
from trainpace.job import noise_scale
from trainpace.measure.engine import NoiseNorms, squared_norm
from trainpace.measure.sweep import Conditions, measure_noise_scale


def analytic(covariance, off, deviation):
    """Return B = tr(Sigma) / |G|^2 of 0.5 (w x - y)^2 at weights `off` the true ones, with normal x and normal noise on y.

    The gradient of one sample is x (x d - e). By Isserlis' theorem E|g|^2 = tr(C) (dCd + s^2) + 2 |Cd|^2, and G = C d.
    """
    pulled = covariance @ off
    trace = torch.trace(covariance) * (off @ pulled + deviation**2) + pulled @ pulled
    return float(trace / (pulled @ pulled))


def test_noise_scale_of_linear_regression_matches_theory():
    torch.manual_seed(0)
    variances = torch.linspace(0.2, 2.0, 10)
    off, deviation, batch, parts = torch.full((10,), 0.5), 1.0, 16, 4
    model = nn.Linear(10, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(off)  # the true weights are 0
    gathered = NoiseNorms(model, batch, parts)
    for _ in range(4000):  # The standard error of the estimate is then 4 %.
        model.zero_grad()
        for part in range(parts):
            x = torch.randn(batch, 10) * variances.sqrt()
            y = deviation * torch.randn(batch, 1)
            (0.5 * (model(x) - y).square().mean() / parts).backward()
            if part == 0:
                gathered.after_first()
        gathered.after_last()
    found, known = noise_scale(gathered.norms()), analytic(torch.diag(variances), off, deviation)
    assert found.samples == pytest.approx(known, rel=0.1)
    assert found.low < known < found.high


def test_gradient_norm_covers_all_parameters_without_loss_scale():
    model = nn.Linear(3, 2)
    assert squared_norm(model.parameters()) == 0
    x = torch.randn(4, 3)
    gathered = [NoiseNorms(model, 2, 2), NoiseNorms(model, 2, 2, loss_scale=lambda: 1024.0)]
    for norms, scale in zip(gathered, (1.0, 1024.0), strict=True):
        model.zero_grad()
        (scale * model(x[:2]).square().mean() / 2).backward()
        norms.after_first()
        (scale * model(x[2:]).square().mean() / 2).backward()
        norms.after_last()
    plain, scaled = (norms.norms() for norms in gathered)
    assert scaled.small_squared[0] == pytest.approx(plain.small_squared[0], rel=1e-5)
    assert scaled.big_squared[0] == pytest.approx(plain.big_squared[0], rel=1e-5)
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float(flat.square().sum()) / 1024**2 == pytest.approx(plain.big_squared[0], rel=1e-5)


def test_overflowing_steps_are_skipped():
    model = nn.Linear(3, 2)
    gathered = NoiseNorms(model, 2, 2)
    for value in (1.0, float("inf"), 2.0):
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        gathered.after_first()
        gathered.after_last()
    assert len(gathered.norms().big_squared) == 2


RANK = """
import sys, os, json, torch, torch.distributed as dist
from torch import nn
from trainpace.measure.engine import DdpNoiseNorms, squared_norm
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
ddp = nn.parallel.DistributedDataParallel(model)
norms = DdpNoiseNorms(ddp, 3)
expected = []
for step in range(3):
    x = torch.randn(6, 4)
    whole = []
    for part in (x[:3], x[3:], x):
        grads = torch.autograd.grad(model(part).square().mean(), list(model.parameters()))
        whole.append(float(sum(g.square().sum() for g in grads)))
    expected.append(((whole[0] + whole[1]) / 2, whole[2]))
    ddp.zero_grad()
    ddp(x[3 * rank : 3 * rank + 3]).square().mean().backward()
    norms.after_last()
found = norms.norms()
print(json.dumps([found.small_batch, found.big_batch, found.small_squared, found.big_squared, expected]), flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
def test_ranks_measure_gradient_norms_before_all_reduce(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, str(tmp_path / "rank.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    assert said[0] == said[1]
    small_batch, big_batch, small, big, expected = said[0]
    assert (small_batch, big_batch) == (3, 6)
    assert small == pytest.approx([s for s, _ in expected], rel=1e-5)
    assert big == pytest.approx([b for _, b in expected], rel=1e-5)


TASK = """
import torch
from torch import nn
def task():
    torch.manual_seed(0)
    x = torch.randn(4096, 6)
    y = x.sum(1, keepdim=True) + torch.randn(4096, 1)
    model = nn.Linear(6, 1)
    return model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=1e-6), list(zip(x, y))
"""


def test_noise_scale_needs_samples_of_the_task(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    found = measure_noise_scale(Conditions(model=f"{tmp_path}/mine.py:task", seconds=0.0), 32)
    assert (found.batch, found.parts) == (32, 2)
    assert found.scale.samples is not None
    assert found.norms_ms > 0
    with pytest.raises(TrainpaceError, match="no data"):
        measure_noise_scale(Conditions(model="resnet18", seconds=0.0), 32)

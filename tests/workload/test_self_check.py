"""The trace compares its FLOPs with torch's own count and rejects operators that it cannot count."""

import pytest
import torch
from torch import nn

from trainpace.core.errors import TrainpaceError
from trainpace.workload import Variant, operators
from trainpace.workload.task import Task
from trainpace.workload.trace import trace_task

INFERENCE = Variant(mode="inference")


class Applied(nn.Module):
    """A counted matmul and one more call on its result."""

    def __init__(self, call):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.call = call

    def forward(self, x):
        return self.call(self.linear(x))


def task(model):
    return Task(
        "planted",
        model,
        lambda m, x: m(x),
        lambda m, x: m(x).sum(),
        lambda n: torch.randn(n, 16),
        None,
        "a vector",
    )


@torch.library.custom_op("planted::product", mutates_args=())
def planted_product(x: torch.Tensor) -> torch.Tensor:
    return x @ x.T


@planted_product.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[0], x.shape[0], dtype=x.dtype, device=x.device)


def test_unknown_library_operator_is_rejected_with_its_module():
    model = nn.Sequential(nn.Linear(16, 16), Applied(lambda x: planted_product(x)))
    with pytest.raises(TrainpaceError, match=r"planted::product in 1.*trainpace watch"):
        trace_task(task(model), variant=INFERENCE)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: torch.cdist(x, x), "aten::_cdist_forward"),
        (lambda x: torch.linalg.svd(x)[1], "aten::_linalg_svd"),
        (lambda x: torch.linalg.inv(x[:1].T @ x[:1]), "aten::linalg_inv_ex"),
    ],
)
def test_uncounted_matmul_operator_is_rejected_by_name(call, name):
    with pytest.raises(TrainpaceError, match=name):
        trace_task(task(Applied(call)), variant=INFERENCE)


@pytest.mark.parametrize(
    "call",
    [
        torch.linalg.vector_norm,
        torch.cumsum,
        lambda x: x.softmax(-1),
        lambda x: torch.fft.rfft(x).abs(),
    ],
)
def test_operators_without_matmul_are_traced(call):
    model = Applied(lambda x: call(x, dim=-1) if call is torch.cumsum else call(x))
    assert trace_task(task(model), variant=INFERENCE).notes == ()


def test_wrong_flop_count_gives_a_note(monkeypatch):
    def twice(call):
        (row,) = operators._gemm(call)
        return [row._replace(flops=2 * row.flops, dims=(*row.dims[:3], 2 * row.dims[3]))]

    for name in operators._GEMMS:
        monkeypatch.setitem(operators._BY_NAME, name, twice)
    (note,) = trace_task(task(nn.Linear(16, 16)), variant=Variant("sgd")).notes
    assert "100%" in note
    assert "aten::addmm" in note or "aten::mm" in note


def test_convolution_flops_agree_with_torch():
    model = nn.Sequential(
        nn.Unflatten(1, (4, 2, 2)),
        nn.Conv2d(4, 8, 1, groups=2),
        nn.ConvTranspose2d(8, 4, 2),
        nn.Flatten(),
        nn.Linear(36, 16),
    )
    workload = trace_task(task(model), ("fp32", "amp", "half"), Variant("sgd"))
    assert workload.notes == ()

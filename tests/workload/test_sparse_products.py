"""Matmuls with a sparse matrix are counted by its stored values."""

import pytest
import torch
from torch import nn

from trainpace.core.errors import TrainpaceError
from trainpace.workload import Task, trace_task
from trainpace.workload.task import forward, loss_by

VALUES, NODES, WIDTH = 200, 60, 16


class Convolution(nn.Module):
    def __init__(self, multiply):
        super().__init__()
        self.weight, self.multiply = nn.Parameter(torch.zeros(8, WIDTH)), multiply

    def forward(self, batch):
        x, matrix = batch
        return self.multiply(matrix, x @ self.weight)


def task_of(multiply, layout=torch.sparse_coo, learns=False, nodes=NODES):
    def make_batch(n):
        at = torch.zeros(2, VALUES, dtype=torch.int64)
        matrix = torch.sparse_coo_tensor(
            at, torch.zeros(VALUES), (NODES, NODES), device="meta", check_invariants=False
        )
        return torch.zeros(nodes, 8, device="meta"), matrix._coalesced_(True)

    def loss(model, batch):
        x, matrix = batch
        return model((x, matrix.requires_grad_() if learns else matrix)).sum()

    return Task(
        "graph",
        Convolution(multiply),
        lambda model, batch: model(batch),
        loss,
        make_batch,
        None,
        "",
    )


@pytest.mark.parametrize(
    "multiply", [torch.spmm, torch.sparse.mm, torch.mm, torch.matmul, lambda a, b: a @ b]
)
def test_sparse_matmul_cost_depends_on_nonzeros(multiply):
    table = trace_task(task_of(multiply), only_batch=NODES).form("fp32").operators
    rows = [i for i, name in enumerate(table.function) if name == "sparse_product"]
    assert [table.phase[i] for i in rows] == ["forward", "backward"]
    assert [table.flops[i, 0] for i in rows] == [2 * VALUES * WIDTH] * 2
    assert table.read_bytes[rows[0], 0] == VALUES * (2 * 8 + 4) + VALUES * WIDTH * 4
    assert table.written_bytes[rows[0], 0] == NODES * WIDTH * 4


def test_sparse_matmul_rejects_wrong_sizes_and_trained_matrices():
    with pytest.raises(TrainpaceError, match="multiply"):
        trace_task(task_of(torch.spmm, nodes=3), only_batch=NODES)
    with pytest.raises(TrainpaceError, match="trained"):
        trace_task(task_of(torch.spmm, learns=True), only_batch=NODES)


class Solve(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix, self.right = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return torch.linalg.solve_triangular(self.matrix(x), self.right(x), upper=False)


def test_triangular_solve_costs_half_a_matmul():
    def batch(n):
        return torch.randn(n, 3, 8, 8), torch.randn(n, 3, 8, 4)

    loss = loss_by(nn.functional.mse_loss)
    workload = trace_task(Task("solve", Solve(), forward, loss, batch, None, ""))
    operators = workload.forms["fp32"].operators
    rows = [i for i, name in enumerate(operators.function) if "solve" in name]
    assert {operators.phase[i] for i in rows} == {"forward", "backward"}
    assert operators.flops[rows].tolist() == [[0.0, 3 * 8 * 8 * 4]] * len(rows)

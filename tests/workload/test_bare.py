"""Copies of models without data, including models that copy.deepcopy rejects."""

import threading
import warnings

import pytest
import torch
from torch import nn

from trainpace.workload import Copier, on_meta
from trainpace.workload.meta import bare, sparse, without_data


class Odd(nn.Module):
    """A model with a lock, a Python module, a generator, a function attribute and constants."""

    def __init__(self):
        super().__init__()
        self.lock, self.python, self.endless = threading.Lock(), torch, (n for n in range(3))
        self.layer = nn.Linear(3, 3)
        self.act = lambda x: self.layer(x) * self.scale
        self.scale, self.large = torch.full((3,), 2.0), torch.zeros(5000)
        self.steps = {"again": [self.layer, self.layer.weight], "forward": self.forward}

    def forward(self, x):
        return self.act(x)


def test_meta_copy_shares_objects_deepcopy_rejects():
    model = Odd()
    copied, _ = on_meta(model, None)
    assert copied.lock is model.lock
    assert copied.endless is model.endless
    assert copied.layer is not model.layer
    assert {p.device.type for p in copied.parameters()} == {"meta"}
    assert copied.act.__closure__[0].cell_contents is copied
    assert copied.steps["again"] == [copied.layer, copied.layer.weight]
    assert copied.steps["forward"].__self__ is copied
    assert model.act.__closure__[0].cell_contents is model


def test_meta_copy_keeps_values_of_small_constants():
    copied, _ = on_meta(Odd(), None)
    assert copied.scale.tolist() == [2.0, 2.0, 2.0]
    assert copied.large.is_meta
    assert bare(torch.zeros(3, requires_grad=True)).is_meta
    assert bare(torch.zeros(3, requires_grad=True)).requires_grad


def test_weight_norm_module_is_copied():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.utils.weight_norm(nn.Linear(3, 4))
    model(torch.zeros(2, 3)).sum().backward()
    copied, _ = on_meta(model, None)
    assert copied(torch.zeros(2, 3, device="meta")).shape == (2, 4)
    assert copied.weight_g.is_meta


def test_meta_copy_keeps_tied_weights_and_optimizer_references():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    copied, stepper = on_meta(model, optimizer)
    assert copied[0].weight is copied[1].weight
    assert [id(p) for p in stepper.param_groups[0]["params"]] == [
        id(p) for p in copied.parameters()
    ]
    assert not stepper.state


def test_copied_recurrent_and_parametrized_modules_run():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.ReLU())
    copied, _ = on_meta(model, None)
    assert copied(torch.zeros(2, 3, device="meta")).shape == (2, 3)
    rnn, _ = on_meta(nn.LSTM(3, 5), None)
    assert rnn._flat_weights[0] is rnn.weight_ih_l0


def test_model_with_open_file_is_not_copied(tmp_path):
    model = nn.Linear(2, 2)
    model.log = (tmp_path / "log").open("w")
    with model.log, pytest.raises(TypeError, match="open file"):
        Copier({})(model)


def test_sparse_matrix_copy_keeps_number_of_values():
    matrix = torch.eye(5).to_sparse()
    with warnings.catch_warnings(action="ignore"):  # rows in this layout are in beta
        rows = matrix.to_sparse_csr()
    for one in (matrix, rows):
        found = without_data(one)
        assert (found.shape, found._nnz(), found.is_meta) == ((5, 5), 5, True)
    assert sparse((3, 4), 2, torch.float64)._values().dtype is torch.float64

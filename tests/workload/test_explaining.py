"""Error messages for models that cannot be traced."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainpace.workload.trace import asks_for_values, explained, in_short


class Peeking(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class SparseMoeBlock(Peeking):
    pass


def raised(model):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever torch raises
        model(torch.zeros(2, 2, device="meta"))
    return caught.value


@pytest.mark.parametrize(("part", "advised"), [(Peeking(), False), (SparseMoeBlock(), True)])
def test_only_mixture_of_experts_gets_expert_advice(part, advised):
    model = nn.Sequential(nn.Identity(), part)
    said = str(explained("Net", raised(model), model))
    assert " in 1 (" in said
    assert "trainpace measure" in said
    assert ("grouped_mm" in said) == advised


@pytest.mark.parametrize("name", ["smoe", "homoeopathy", "moved", "Demoer"])
def test_module_names_resembling_expert_get_no_expert_advice(name):
    model = nn.Module()
    model.add_module(name, Peeking())
    model.forward = getattr(model, name).forward
    assert "xpert" not in str(explained("Net", raised(model), model))


@pytest.mark.parametrize(("part", "advised"), [(Peeking(), False), (SparseMoeBlock(), True)])
def test_only_a_model_with_experts_is_told_to_set_their_implementation(part, advised):
    part.config = SimpleNamespace(_experts_implementation="eager")
    said = str(explained("Net", raised(part), nn.Sequential(part)))
    assert ("experts_implementation" in said) == advised


def test_short_reason_names_the_source_line():
    error = raised(Peeking())
    assert asks_for_values(error)
    assert "test_explaining.py line" in in_short(error)
    assert in_short(RuntimeError("no.\nmore")).endswith("(no)")


def test_cpu_tensor_constructor_error_is_explained():
    with pytest.raises(Exception, match="TensorOptions") as caught:
        torch.LongTensor(torch.zeros(3, dtype=torch.long, device="meta"))
    assert "torch.LongTensor" in in_short(caught.value)

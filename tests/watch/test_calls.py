"""Tests of recorded module calls that can be replayed without data."""

import pytest
import torch
from torch import nn

from trainpace.watch.inside.capture import (
    Call,
    Derived,
    FromOutput,
    Outputs,
    Shape,
    described,
    tensors_of,
)


def outputs_of(*returned):
    outputs = Outputs()
    for output in returned:
        outputs.begin()
        outputs.put(tensors_of(output))
    return outputs


def test_made_inputs_scale_the_batch_dimension():
    x, state, mask = torch.zeros(6, 3), torch.zeros(2, 6, 5), torch.ones(12)
    call = described(0, (x, state), {"mask": mask, "n": 3}, Outputs())
    assert [tuple(t.shape) for t in call.made(2, 6) if isinstance(t, torch.Tensor)] == [
        (2, 3),
        (2, 6, 5),
        (4,),
    ]
    assert [tuple(t.shape) for t in call.made(6, 6) if isinstance(t, torch.Tensor)] == [
        (6, 3),
        (2, 6, 5),
        (12,),
    ]
    of_one = described(0, (torch.zeros(1, 3), torch.zeros(4, 1)), {}, Outputs())
    assert [tuple(t.shape) for t in of_one.made(5, 1)] == [(5, 3), (4, 1)]


def test_arguments_from_earlier_outputs_are_recognized_unless_detached():
    layer = nn.Linear(3, 4)
    out = layer(torch.zeros(6, 3))
    outputs = outputs_of(out)
    assert described("loss", (out,), {}, outputs).arguments == [FromOutput(0, 0, (6, 4))]
    assert described("loss", (out.view(-1),), {}, outputs).arguments == [FromOutput(0, 0, (24,))]
    assert described(0, (out.detach(),), {}, outputs).arguments == [Shape((6, 4), torch.float32)]
    assert described(0, (out * 2 + 1,), {}, outputs).arguments == [
        Derived(((0, 0),), (6, 4), torch.float32)
    ]
    assert not described(0, (out.detach(),), {}, outputs).follows


def test_replayed_call_passes_gradients_through_derived_tensors():
    first, second = nn.Linear(3, 4, device="meta"), nn.Linear(4, 2, device="meta")
    own = first(torch.zeros(6, 3, device="meta"))
    call = Call(
        0,
        [Derived(((0, 0),), (6, 4), torch.float32)],
        torch.utils._pytree.tree_flatten(((0,), {}))[1],
    )
    call.run(second, call.made(3, 6), [[own]], 3, 6).sum().backward()
    assert first.weight.grad is not None


def test_loss_reaches_only_the_outputs_it_depends_on():
    cell = nn.Linear(3, 3)
    one = cell(torch.zeros(2, 3))
    two, other = cell(one), cell(one)
    outputs = outputs_of(one, two, other)
    assert outputs.reached([(two * 3).sum()]) == [(1, 0)]
    assert outputs.reached([two.sum() + other.mean()]) == [(1, 0), (2, 0)]
    assert outputs.reached([torch.zeros(())]) == []


def test_tensors_of_a_distribution_are_found():
    logits = torch.zeros(4, 2, requires_grad=True) * 1
    found = tensors_of((torch.distributions.Categorical(logits=logits), torch.ones(4)))
    assert {tuple(t.shape) for t in found} == {(4, 2), (4,)}
    assert any(t.requires_grad for t in found)


@pytest.mark.parametrize(
    ("argument", "still"),
    [
        (torch.zeros(2, 90, dtype=torch.int64), True),
        (torch.eye(30).to_sparse(), True),
        (torch.zeros(2, 90), False),
        (torch.zeros(1, 90, dtype=torch.int64), False),
        (torch.zeros(60, 2, dtype=torch.int64), False),
    ],
)
def test_edge_index_or_sparse_matrix_fixes_the_batch(argument, still):
    assert described(0, (torch.zeros(30, 4), argument), {}, Outputs()).has_fixed_batch(30) == still

"""Tests of the batches that the interventions return in place of the loader's."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from trainpace.watch.inside.event_log import FEW
from trainpace.watch.inside.loaders import copy_of

Pair = namedtuple("Pair", "image label")
BATCHES = [
    (torch.ones(8, 3), torch.zeros(8)),
    [torch.ones(8, 3), torch.zeros(8)],
    {
        "input_ids": torch.ones(8, 5),
        "text": [f"text {i}" for i in range(8)],
        "weight": torch.tensor(0.5),
    },
    OrderedDict(a=torch.ones(8)),
    Pair(torch.ones(8, 3), {"deep": [torch.ones(8)]}),
]


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: type(b).__name__)
def test_copy_keeps_the_requested_number_of_samples(batch):
    few = copy_of(batch, 8, FEW)
    assert type(few) is type(batch)
    sizes = {len(leaf) for leaf in leaves(few) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    assert sizes == {FEW}
    if isinstance(batch, dict) and "text" in batch:
        assert few["text"] == ["text 0", "text 1"]
        assert few["weight"] == 0.5


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: type(b).__name__)
def test_copy_makes_new_containers_with_the_same_tensors(batch):
    again = copy_of(batch, 8, 8)
    assert all(a is b for a, b in zip(leaves(batch), leaves(again), strict=True))
    if isinstance(batch, dict):
        again.popitem()
        assert len(batch) == len(again) + 1


def test_copy_moves_only_tensors_to_a_device():
    moved = copy_of(BATCHES[2], 8, 8, "meta")
    assert moved["input_ids"].device.type == "meta"
    assert moved["text"] == BATCHES[2]["text"]

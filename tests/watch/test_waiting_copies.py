"""Copies to the device that synchronize first are recognized for every call form."""

import pytest
import torch

from trainpace.watch.inside import patches


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("cuda",), {}),
        (("cuda", torch.float32, True, False), {}),
        (("cuda", torch.float32), {"copy": True}),
        ((None, torch.float32, True, True), {}),
        ((torch.float64, True, False), {}),
        (("cpu", None, False, True), {}),
    ],
)
def test_copies_to_the_device_are_recognized_for_every_call_form(args, kwargs):
    torch.ones(2).to(
        *(("cpu" if arg == "cuda" else arg) for arg in args), **kwargs
    )  # torch accepts this call form
    to_the_device = args[0] == "cuda"
    assert patches._waits_first(torch, "cuda", "to", torch.ones(2), args, kwargs) is to_the_device

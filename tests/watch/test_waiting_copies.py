"""A copy to the device that begins by waiting for it is told from one that does not, however it is called."""

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
def test_whether_a_copy_waits_is_found_for_every_way_to_call_it(args, kwargs):
    torch.ones(2).to(
        *(("cpu" if arg == "cuda" else arg) for arg in args), **kwargs
    )  # torch takes it
    to_the_device = args[0] == "cuda"
    assert patches._waits_first(torch, "cuda", "to", torch.ones(2), args, kwargs) is to_the_device

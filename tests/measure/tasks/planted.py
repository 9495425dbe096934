"""Task whose kernels take a known time on the simulated accelerator.

WORK_US is "forward,backward" in microseconds per sample. The first SLOW_STEPS forward passes take 40 ms longer, like cuDNN benchmarking.
"""

import os

import torch
from torch import nn

FORWARD_US, BACKWARD_US = map(float, os.environ.get("WORK_US", "0,0").split(","))
ACTIVATION_MIB = float(os.environ.get("ACTIVATION_MIB", "0"))
SLOW_STEPS = int(os.environ.get("SLOW_STEPS", "0"))


class Work(torch.autograd.Function):
    """Module with a planted kernel time per sample and an activation of planted size, kept for the backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.new_empty(len(x), int(ACTIVATION_MIB * 2**18)))
        global SLOW_STEPS
        slow_us = 40_000.0 if SLOW_STEPS > 0 else 0.0
        SLOW_STEPS -= 1
        return (
            torch.ops.sim.work(x, FORWARD_US * len(x) + slow_us)
            if x.device.type == "sim"
            else x.clone()
        )

    @staticmethod
    def backward(ctx, grad):
        return (
            torch.ops.sim.work(grad, BACKWARD_US * len(grad))
            if grad.device.type == "sim"
            else grad.clone()
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(Work.apply(self.first(x)))


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        return torch.full((16,), i / 256), i % 4


def task():
    torch.manual_seed(0)
    model = Net()
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01), Samples()

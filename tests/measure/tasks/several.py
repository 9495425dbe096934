"""Custom training step of two models, each with a known kernel time on the simulated accelerator."""

import torch
from torch import nn


def gan():
    torch.manual_seed(0)
    generator, critic = nn.Linear(16, 128), nn.Linear(128, 1)
    of_generator, of_critic = (torch.optim.Adam(m.parameters()) for m in (generator, critic))

    def step(batch):
        real = batch["input"]
        fake = generator(real[:, :16])
        if real.device.type == "sim":
            torch.ops.sim.work(real, 12_000.0)
        of_critic.zero_grad()
        loss = (critic(fake.detach()) - critic(real)).mean()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(fake)).mean().backward()
        of_generator.step()
        return loss

    dataset = [{"input": torch.full((128,), i / 64)} for i in range(64)]
    return {
        "model": [generator, critic],
        "optimizer": [of_generator, of_critic],
        "step": step,
        "dataset": dataset,
    }

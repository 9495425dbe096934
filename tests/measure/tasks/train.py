"""Training script on the simulated accelerator. `item` reads every loss; `pinned` overlaps copies with the host."""

import sys

import torch
from planted import task

model, criterion, optimizer, samples = task()
model.to("sim")
loader = torch.utils.data.DataLoader(samples, batch_size=8, pin_memory="pinned" in sys.argv)
for _ in range(2):
    for x, y in loader:
        x, y = (t.to("sim", non_blocking="pinned" in sys.argv) for t in (x, y))
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if "item" in sys.argv:
            loss.item()
torch.accelerator.synchronize()
print(f"loss {loss.item():.6f}")

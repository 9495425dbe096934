"""Script that copies the next batch on its own stream. The step's stream waits for the copy; with `hasty` it does not."""

import sys

import torch
from planted import task

model, criterion, optimizer, samples = task()
model.to("sim")
copying = torch.Stream("sim")
batches = [next(iter(torch.utils.data.DataLoader(samples, batch_size=8))) for _ in range(4)]
pinned = [tuple(t.pin_memory() for t in batch) for batch in batches]
for step in range(24):
    with copying:
        x, y = (t.to("sim", non_blocking=True) for t in pinned[step % 4])
        there = copying.record_event()
    if "hasty" not in sys.argv:
        torch.accelerator.current_stream().wait_event(there)
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    loss.item()
print(f"loss {loss.item():.6f}")

"""Small training scripts and functions that run them under the recorder."""

import os
import subprocess
import sys
from pathlib import Path

from trainpace.watch import environment, read_recording, watch

TRAIN = """
import os, sys, time
import torch
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 192
    def __getitem__(self, i):
        time.sleep(SLEEP_S)
        return torch.randn(16, generator=torch.Generator().manual_seed(i)), i % 4

def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    criterion = nn.CrossEntropyLoss()
    losses = []
    loader = torch.utils.data.DataLoader(Data(), batch_size=8, shuffle=True, num_workers=WORKERS)
    for epoch in range(EPOCHS):
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            EXTRA
    with open(os.environ["LOSSES"], "w") as file:
        file.write(repr(losses))

if __name__ == "__main__":
    main()
"""


def script(folder: Path, sleep_s=0.0, workers=0, epochs=2, extra="pass") -> Path:
    text = (
        TRAIN.replace("SLEEP_S", str(sleep_s))
        .replace("WORKERS", str(workers))
        .replace("EPOCHS", str(epochs))
    )
    path = folder / "train.py"
    path.write_text(
        text.replace(
            "            EXTRA", "\n".join("            " + line for line in extra.splitlines())
        )
    )
    return path


def losses(path: Path, env=None) -> str:
    """Return the losses of the script without the recorder."""
    target = path.parent / f"losses-{len(list(path.parent.glob('losses-*')))}"
    run = subprocess.run(
        [sys.executable, str(path)], env={**(env or os.environ), "LOSSES": str(target)}, check=False
    )
    assert run.returncode == 0
    return target.read_text()


def watched(path: Path, monkeypatch, *launcher, trials=None):
    """Return the exit code, recording and losses of the script under the recorder."""
    target = path.parent / "losses-watched"
    monkeypatch.setenv("LOSSES", str(target))
    folder = path.parent / "recording"
    code = watch([sys.executable, *launcher, str(path)], folder, trials)
    return code, read_recording(folder), target.read_text() if target.exists() else None


__all__ = ["environment", "losses", "script", "watched"]

"""A training as people write it, and its data path as the thesis had it: every photograph is
searched for what matters in it, cropped and marked, anew in every epoch. `ladder.toml` beside it
says what to try, `trainpace run` tries it.

The work is that of examples/face_crops.py on larger photographs: a correlation at five scales, then
corner strength.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from face_crops import Faces, SmallNet, augment, make_photos  # noqa: E402

PHOTOS = HERE.parents[1] / "out" / "ladder-photos"
COUNT, SIDE = 320, 420


def photographs() -> Faces:
    """(crop, points, label) of every photograph:

    expensive, and the same at every call. What `precompute` makes into shards.
    """
    if not PHOTOS.is_dir():
        aside = PHOTOS.with_name(f"{PHOTOS.name}-{os.getpid()}")
        make_photos(aside, COUNT, SIDE)
        if not PHOTOS.is_dir():
            aside.rename(PHOTOS)
    return Faces(PHOTOS)


class Training(Dataset):
    """The photographs, and `online`: what has to stay in the training, for it is random."""

    online = staticmethod(augment)

    def __init__(self) -> None:
        self.photographs = photographs()

    def __len__(self) -> int:
        return len(self.photographs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return augment(self.photographs[index])


def task():
    """(model, loss, optimizer, dataset)."""
    model = SmallNet()
    return model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-3), Training()

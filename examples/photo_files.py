"""A dataset as most people write it: JPEG files, decoded and augmented in ``__getitem__``.

    trainpace loader examples/photo_files.py:photos --batch 32

The photographs (a temple, a flower) come with scikit-learn; pieces of them are written to a folder
of the system's own for temporary files once.
"""

import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from torch.utils.data import Dataset

FILES = 512


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


def resize(image):
    return image.resize((96, 96), Image.Resampling.LANCZOS)


def flip(image):
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def to_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)


class Photos(Dataset):
    """Files and their labels."""

    def __init__(self, folder, transform):
        self.files, self.transform = sorted(folder.glob("*.jpg")), transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(self.files[index]).convert("RGB")
        return self.transform(image), int(self.files[index].stem[-1])


def write_photos(folder):
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    places = random.Random(0)
    for i in range(FILES):
        left, top = places.randrange(300), places.randrange(150)
        photos[i % 2].crop((left, top, left + 320, top + 260)).save(
            folder / f"{i // 2:04d}_{i % 2}.jpg", quality=90
        )


def photos():
    folder = Path(tempfile.gettempdir()) / "trainpace-photo-files"
    folder.mkdir(exist_ok=True)
    if len(list(folder.glob("*.jpg"))) != FILES:
        write_photos(folder)
    return Photos(folder, Compose(resize, flip, to_tensor))


def task():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 2),
    )
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01), photos()

"""A dataset to precompute: crops of two photographs, resized by Lanczos. The second one also flips
at random, and is refused.

    trainpace precompute examples/photo_augmentations.py:Crops --out out/crops

The photographs come with scikit-learn.
"""

import random

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

SIDE = 64


class Crops:
    """((SIDE, SIDE, 3) uint8, which photograph) by index."""

    def __init__(self, length: int = 1000) -> None:
        self.photos = load_sample_images().images
        self.places = np.random.default_rng(0).random((length, 3))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        label = index % len(self.photos)
        photo = Image.fromarray(self.photos[label])
        left, top, size = self.places[index]
        side = int(200 + 200 * size)
        x, y = int(left * (photo.width - side)), int(top * (photo.height - side))
        box = (x, y, x + side, y + side)
        return np.asarray(photo.resize((SIDE, SIDE), Image.Resampling.LANCZOS, box=box)), label


class FlippedCrops(Crops):
    """The same, one in two mirrored: its samples differ from epoch to epoch."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, label = super().__getitem__(index)
        if random.random() < 0.5:
            image = image[:, ::-1]
        return image, label

"""Photographs that come with scikit-learn, cropped and resized in many ways into JPEG files, and the dataset over them."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

SIDE, STORED = 160, 320
FOLDER = Path(os.environ.get("PHOTO_FOLDER", "out/photos"))


def make_photos(folder: Path, count: int) -> None:
    """`count` JPEG files of 320 x 320 pixels; those that are there already stay."""
    from sklearn.datasets import load_sample_images

    originals = [Image.fromarray(image) for image in load_sample_images().images]
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        width, left, top = rng.integers(120, 400), rng.random(), rng.random()
        original = originals[i % len(originals)]
        x, y = int(left * (original.width - width)), int(top * (original.height - width))
        if (folder / f"{i:06d}.jpg").exists():
            continue
        crop = original.crop((x, y, x + int(width), y + int(width))).resize(
            (STORED, STORED), Image.Resampling.BILINEAR
        )
        crop.save(folder / f"{i:06d}.jpg", quality=90)


def decode(data: bytes) -> np.ndarray:
    """The expensive, deterministic part: decode, and resize by Lanczos. (160, 160, 3) uint8."""
    return np.asarray(
        Image.open(io.BytesIO(data)).convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    )


class Photos:
    """(picture, label) by index."""

    def __init__(self) -> None:
        self.files = sorted(str(path) for path in FOLDER.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return decode(Path(self.files[index]).read_bytes()), index % 10

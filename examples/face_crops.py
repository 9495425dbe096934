"""An ordinary training script whose data path is the problem, as in the thesis that Trainpace grew
from: find what matters in each photograph, crop it, mark five points on it; then train a small
network on crops and points.

    python examples/face_crops.py --photos FOLDER                  everything for every sample in
    every epoch python examples/face_crops.py --photos FOLDER --shards SHARDS  the expensive part
    read back, flips and brightness online

FOLDER is made by `python examples/face_crops.py --make FOLDER`: JPEGs of the two photographs that
come with scikit-learn. The photographs show no faces; the work is that of a detector and a landmark
finder (a correlation at five scales, corner strength).
"""

import argparse
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy import ndimage, signal
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 48
POINTS = 5
SCALES = (0.35, 0.45, 0.6, 0.8, 1.0)
PHOTOS = Path("out/faces")


def make_photos(folder: Path, count: int = 480, side: int = 320) -> None:
    """Crops of real photographs at many places and sizes, as JPEG files; the label is in the name."""
    from sklearn.datasets import load_sample_images

    folder.mkdir(parents=True, exist_ok=True)
    draw, photos = np.random.default_rng(0), load_sample_images().images
    for i in range(count):
        photo = photos[i % 2]
        size = int(draw.integers(240, 400))
        top, left = (int(draw.integers(0, extent - size)) for extent in photo.shape[:2])
        crop = Image.fromarray(photo[top : top + size, left : left + size]).resize(
            (side, side), Image.Resampling.BICUBIC
        )
        crop.save(folder / f"{i:04d}-{i % 2}.jpg", quality=92)


def find(gray: np.ndarray) -> tuple[int, int, int]:
    """(top, left, side) of the place that looks most like a round thing before a darker ground,
    over several scales.
    """
    y, x = np.mgrid[-1:1:32j, -1:1:32j]
    disc = (x**2 + y**2 < 0.6).astype(np.float32)
    template = disc - disc.mean()
    best = (-np.inf, 0, 0, 32)
    for scale in SCALES:
        small = ndimage.zoom(gray, scale, order=1)
        score = signal.fftconvolve(small - small.mean(), template, mode="valid")
        contrast = np.sqrt(ndimage.uniform_filter(small**2, 32) + 1e-3)
        score = score / contrast[16 : 16 + score.shape[0], 16 : 16 + score.shape[1]]
        at = np.unravel_index(np.argmax(score), score.shape)
        if score[at] > best[0]:
            best = (score[at], int(at[0] / scale), int(at[1] / scale), int(32 / scale))
    return best[1:]


def points(crop: np.ndarray) -> np.ndarray:
    """Five corners by Harris' measure, as (y, x) in 0..1: what a landmark finder would give."""
    dy, dx = np.gradient(ndimage.gaussian_filter(crop, 1.0))
    yy, xx, xy = (ndimage.gaussian_filter(p, 2.0) for p in (dy * dy, dx * dx, dx * dy))
    strength = yy * xx - xy**2 - 0.05 * (yy + xx) ** 2
    peaks = (strength == ndimage.maximum_filter(strength, 7)) * strength
    order = np.argsort(peaks.ravel())[::-1][:POINTS]
    return np.stack(np.unravel_index(order, peaks.shape), 1).astype(np.float32).ravel() / SIDE


class Faces(Dataset):
    """(crop, points, label), the same at every call."""

    def __init__(self, folder: Path = PHOTOS) -> None:
        self.files = sorted(str(path) for path in Path(folder).glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        photo = Image.open(self.files[index]).convert("RGB")
        top, left, side = find(np.asarray(photo.convert("L"), dtype=np.float32) / 255)
        crop = photo.crop((left, top, left + side, top + side)).resize(
            (SIDE, SIDE), Image.Resampling.LANCZOS
        )
        gray = np.asarray(crop.convert("L"), dtype=np.float32) / 255
        return (
            np.asarray(crop).transpose(2, 0, 1).copy(),
            points(gray),
            int(Path(self.files[index]).stem.split("-")[1]),
        )


def augment(sample: tuple[np.ndarray, np.ndarray, int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What has to stay online, for it is random: a flip, and brightness."""
    crop, marks, label = sample
    image = torch.as_tensor(crop).float().div(255)
    marks = torch.as_tensor(marks)
    if torch.rand(()) < 0.5:
        image = image.flip(-1)
        marks = marks.clone()
        marks[1::2] = 1 - marks[1::2]
    return image * (0.8 + 0.4 * torch.rand(())), marks, label


class Online(Dataset):
    """A dataset with its augmentation."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return augment(self.dataset[index])


class SmallNet(nn.Module):
    """Three convolutions on the crop, then a layer that also sees the points."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64)
        self.features = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
                for a, b in pairwise(widths)
            )
        )
        self.head = nn.Linear(64 * (SIDE // 8) ** 2 + 2 * POINTS, 2)

    def forward(self, image: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.features(image).flatten(1), marks], 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--photos", type=Path, default=PHOTOS)
    parser.add_argument("--make", type=Path)
    parser.add_argument("--shards")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    if args.make:
        make_photos(args.make)
        return
    if args.shards:
        from trainpace.shards import ShardDataset

        dataset = ShardDataset(args.shards, transform=augment)
    else:
        dataset = Online(Faces(args.photos))
    torch.manual_seed(0)
    model, criterion = SmallNet(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, args.batch, shuffle=True, num_workers=args.workers, drop_last=True)
    for epoch in range(args.epochs):
        start, total = time.perf_counter(), 0.0
        for image, marks, label in loader:
            loss = criterion(model(image, marks), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.3f}, {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()

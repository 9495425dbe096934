"""Two small tasks on real photographs, in the form that trainpace takes: one function that returns
(model, loss, optimizer, dataset).

    trainpace forecast examples/photo_tasks.py:cnn --gpu T4 --batch 8:64
    trainpace measure examples/photo_tasks.py:transformer --batch 16,32

The photographs (a temple, a flower) come with scikit-learn. The task: from which of the two is this
crop?
"""

import torch
from sklearn.datasets import load_sample_images
from torch import nn
from torch.utils.data import Dataset

CROP = 48


class PhotoCrops(Dataset):
    """Crops of CROP x CROP pixels at fixed pseudo-random places; the label is the photograph."""

    def __init__(self, length: int = 2048) -> None:
        photos = load_sample_images().images
        self.photos = [
            torch.from_numpy(photo.copy()).permute(2, 0, 1).float().div(127.5).sub(1)
            for photo in photos
        ]
        generator = torch.Generator().manual_seed(0)
        self.places = torch.rand(length, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % len(self.photos)
        photo = self.photos[label]
        top, left = (
            int(p * (size - CROP))
            for p, size in zip(self.places[index], photo.shape[1:], strict=True)
        )
        return photo[:, top : top + CROP, left : left + CROP], label


class PatchTransformer(nn.Module):
    """A vision transformer: patches of 6 x 6 pixels, four layers of width 192."""

    def __init__(self, patch: int = 6, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (CROP // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.layers(tokens).mean(dim=1))


def cnn():
    """A small convolutional network with batch normalisation."""
    layers, channels = [], 3
    for width in (32, 64, 128, 128):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 2))
    return (
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        PhotoCrops(),
    )


def transformer():
    """A small vision transformer."""
    model = PatchTransformer()
    return (
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=3e-4),
        PhotoCrops(),
    )

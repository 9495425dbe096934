"""A ResNet-18 on photographs from files, as most people write it: every JPEG file is decoded,
resized, cropped and mirrored anew in every epoch, by the process that trains. The photographs are
pieces of two that come with scikit-learn, enlarged to the 1,024 pixels that photographs of Open
Images have.

    python train.py settings.json
    torchrun --nproc-per-node 2 train.py settings.json
    trainpace run ladder.toml
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

HERE = Path(__file__).resolve().parent
PHOTOS = HERE.parents[1] / "out" / "photographs"
COUNT, LONG, RESIZED, SIDE = 480, 1024, 72, 64


class Block(nn.Module):
    """He et al., Deep residual learning for image recognition, 2016:

    the block of ResNet-18 and 34.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.beside = nn.Sequential()
        if stride > 1 or before != after:
            self.beside = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.main(x) + self.beside(x))


def resnet18(classes: int) -> nn.Module:
    blocks = [Block(64, 64, 1), Block(64, 64, 1)]
    for before, after in ((64, 128), (128, 256), (256, 512)):
        blocks += [Block(before, after, 2), Block(after, after, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


def make_photographs(folder: Path) -> None:
    """COUNT pieces, each LONG pixels wide and two thirds as high, as JPEG files; the name ends with the label."""
    from sklearn.datasets import load_sample_images

    aside = folder.with_name(f"{folder.name}-{os.getpid()}")
    aside.mkdir(parents=True)
    draw, whole = (
        np.random.default_rng(0),
        [Image.fromarray(photo) for photo in load_sample_images().images],
    )
    for i in range(COUNT):
        photo = whole[i % 2]
        width = int(draw.integers(400, 600))
        height = width * 2 // 3
        left, top = (
            int(draw.integers(0, photo.width - width)),
            int(draw.integers(0, photo.height - height)),
        )
        piece = photo.resize((LONG, LONG * 2 // 3), box=(left, top, left + width, top + height))
        piece.save(aside / f"{i:04d}-{i % 2}.jpg", quality=90)
    if not folder.is_dir():
        aside.rename(folder)


class Photographs(Dataset):
    """(RESIZED x RESIZED x 3 uint8, label):

    the same at every call, and so what `precompute` makes into shards.
    """

    def __init__(self) -> None:
        if not PHOTOS.is_dir():
            make_photographs(PHOTOS)
        self.files = sorted(PHOTOS.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        with Image.open(self.files[index]) as file:
            photo = file.convert("RGB").resize((RESIZED, RESIZED), Image.Resampling.LANCZOS)
        return np.asarray(photo), int(self.files[index].stem[-1])


def augment(sample: tuple[np.ndarray, int]) -> tuple[torch.Tensor, int]:
    """A random crop, mirrored at random."""
    photo, label = sample
    top, left = (int(i) for i in torch.randint(RESIZED - SIDE + 1, (2,)))
    crop = (
        torch.as_tensor(np.array(photo[top : top + SIDE, left : left + SIDE]))
        .permute(2, 0, 1)
        .float()
        / 255
    )
    return (crop.flip(2) if torch.rand(()) < 0.5 else crop), int(label)


class Training(Dataset):
    """The photographs, and `online`: what has to stay in the training, for it is random."""

    online = staticmethod(augment)

    def __init__(self) -> None:
        self.photographs = Photographs()

    def __len__(self) -> int:
        return len(self.photographs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return augment(self.photographs[index])


def task():
    """(model, loss, optimizer, dataset), for forecasts of a step."""
    model = resnet18(2)
    return model, nn.CrossEntropyLoss(), optimizer_of(model), Training()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


def main() -> None:
    with open(sys.argv[1]) as file:
        settings = json.load(file)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(settings["seed"])
    data: Dataset = Training()
    if settings["shards"]:
        from trainpace.shards import ShardDataset

        data = ShardDataset(settings["shards"], transform=augment)
    sampler = DistributedSampler(data, seed=settings["seed"]) if ranks > 1 else None
    loader = DataLoader(
        data,
        settings["per_device_train_batch_size"],
        shuffle=sampler is None,
        sampler=sampler,
        drop_last=True,
        num_workers=settings["dataloader_num_workers"],
        persistent_workers=settings["dataloader_num_workers"] > 0,
    )
    layout = torch.channels_last if settings["channels_last"] else torch.contiguous_format
    model = resnet18(2).to(memory_format=layout)
    optimizer = optimizer_of(model)
    net = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    net = torch.compile(net) if settings["torch_compile"] else net
    for epoch in range(settings["num_train_epochs"]):
        began, losses = time.perf_counter(), []
        for x, label in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=settings["bf16"]):
                loss = nn.functional.cross_entropy(net(x.to(memory_format=layout)), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seconds = time.perf_counter() - began
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()

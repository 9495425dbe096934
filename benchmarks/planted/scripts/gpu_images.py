"""ResNet-50 on a GPU, fed from JPEG files, or with big arrays that are copied to it."""

import argparse
import io
import tempfile
from pathlib import Path

import numpy
import torch
from PIL import Image
from planting import report
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18, resnet50

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--data", choices=["files", "memory"], default="files")
parser.add_argument(
    "--store",
    choices=["float64", "float32", "uint8"],
    default="float32",
    help="how arrays in memory are kept",
)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--pin", action="store_true")
parser.add_argument("--small", action="store_true", help="ResNet-18")
args = parser.parse_args()


class Photographs(Dataset):
    """300 x 225 pixels of noise that compresses like a photograph, decoded and resized in every step."""

    def __init__(self, folder):
        self.paths = []
        generator = numpy.random.default_rng(0)
        for i in range(64):
            coarse = generator.integers(0, 255, (16, 16, 3), dtype=numpy.uint8)
            image = Image.fromarray(coarse).resize((400, 300), Image.Resampling.BICUBIC)
            kept = io.BytesIO()
            image.save(kept, "jpeg", quality=90)
            self.paths.append(Path(folder, f"{i}.jpg"))
            self.paths[-1].write_bytes(kept.getvalue())

    def __len__(self):
        return args.batch * args.steps

    def __getitem__(self, index):
        image = (
            Image.open(self.paths[index % 64])
            .convert("RGB")
            .resize((224, 224), Image.Resampling.BILINEAR)
        )
        return torch.from_numpy(numpy.asarray(image).copy()).permute(
            2, 0, 1
        ).float() / 255, index % 10


class Arrays(Dataset):
    """Whole batches that lie in memory."""

    def __init__(self):
        values = torch.rand(2, args.batch, 3, 224, 224)
        self.data = (
            (255 * values).to(torch.uint8)
            if args.store == "uint8"
            else values.to(getattr(torch, args.store))
        )
        if args.pin:
            self.data = self.data.pin_memory()

    def __len__(self):
        return args.steps

    def __getitem__(self, index):
        return self.data[index % 2], torch.arange(args.batch) % 10


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = (resnet18 if args.small else resnet50)(num_classes=10).to(
        device, memory_format=torch.channels_last
    )
    if args.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        if args.data == "files":
            loader = DataLoader(
                Photographs(folder),
                args.batch,
                num_workers=args.workers,
                pin_memory=args.pin,
                drop_last=True,
            )
        else:
            loader = DataLoader(Arrays(), batch_size=None)
        losses = []
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=args.pin), labels.to(device)
            images = images.float() / (255 if images.dtype == torch.uint8 else 1)
            with torch.autocast(device.type, torch.bfloat16):
                predicted = model(images.contiguous(memory_format=torch.channels_last))
                loss = nn.functional.cross_entropy(predicted, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    report(losses)


if __name__ == "__main__":
    main()

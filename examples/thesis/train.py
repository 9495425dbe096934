"""A Lightning training of the kind that the thesis had: in every photograph a face is found,
cropped, aligned by five landmarks and cut out along their convex hull, anew in every epoch, before
a small network sees it. Its settings stand in train.yaml.

    python examples/face_crops.py --make out/thesis-photos    once
    cd examples/thesis && python train.py train.yaml          one process; on Slurm: srun python
    train.py train.yaml trainpace run examples/thesis/ladder.toml --launcher slurm

The photographs show no faces: finding, marking and aligning do a detector's work on what looks most
like one.
"""

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image
from scipy.spatial import ConvexHull
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from face_crops import SIDE, find, points  # noqa: E402

TEMPLATE = np.float32([[0.31, 0.46], [0.69, 0.46], [0.5, 0.64], [0.35, 0.82], [0.65, 0.82]])
"""Where eyes, nose and corners of the mouth shall lie, as (x, y) in 0..1."""
HULL_SCALE = 1.6
VALIDATED = 48


def landmarks(crop: Image.Image) -> np.ndarray:
    """Five points as (x, y) in 0..1 in the template's order:

    the upper two from left to right, the middle one, the lower two.
    """
    gray = np.asarray(crop.convert("L"), dtype=np.float32) / 255
    found = np.zeros((5, 2), dtype=np.float32) + 0.5
    corners = points(gray).reshape(-1, 2)[:, ::-1]
    found[: len(corners)] = corners
    found = found[np.argsort(found[:, 1])]
    upper, lower = found[:2], found[3:]
    return np.concatenate(
        [upper[np.argsort(upper[:, 0])], found[2:3], lower[np.argsort(lower[:, 0])]]
    )


def similarity(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The 2 x 3 matrix of the rotation, scale and shift that takes `source` nearest to `target`, by
    least squares (S. Umeyama, Least-squares estimation of transformation parameters between two
    point patterns, PAMI 1991).
    """
    a, b = source - source.mean(0), target - target.mean(0)
    left, sizes, right = np.linalg.svd(b.T @ a)
    mirror = np.array([1.0, np.sign(np.linalg.det(left @ right)) or 1.0])
    turn = (sizes * mirror).sum() / max((a**2).sum(), 1e-9) * (left * mirror) @ right
    return np.column_stack([turn, target.mean(0) - turn @ source.mean(0)])


def hull_mask(marks: np.ndarray, side: int) -> np.ndarray:
    """True inside the convex hull of the marks, widened about its middle."""
    wide = marks.mean(0) + HULL_SCALE * (marks - marks.mean(0))
    y, x = (np.mgrid[0:side, 0:side] + 0.5) / side
    planes = ConvexHull(wide, qhull_options="QJ").equations
    return np.all(
        planes[:, :2] @ np.stack([x.ravel(), y.ravel()]) + planes[:, 2:] <= 0, axis=0
    ).reshape(side, side)


def aligned(photo: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """The face in a photograph, upright in the template's frame and cut out, and its landmarks
    there.
    """
    top, left, side = find(np.asarray(photo.convert("L"), dtype=np.float32) / 255)
    crop = photo.crop((left, top, left + side, top + side)).resize(
        (2 * SIDE, 2 * SIDE), Image.Resampling.LANCZOS
    )
    found = landmarks(crop.resize((SIDE, SIDE), Image.Resampling.BOX))
    back = similarity(TEMPLATE, found)  # an image is warped by where each of its points comes from
    pixels = back * [[2.0, 2.0, 2.0 * SIDE], [2.0, 2.0, 2.0 * SIDE]]
    face = crop.transform(
        (SIDE, SIDE), Image.Transform.AFFINE, pixels.ravel().tolist(), Image.Resampling.BICUBIC
    )
    marks = found @ (there := similarity(found, TEMPLATE))[:, :2].T + there[:, 2]
    return np.asarray(face) * hull_mask(marks, SIDE)[..., None], marks.astype(np.float32)


class Faces(Dataset):
    """(face, landmarks, label), the same at every call: what can be done once."""

    def __init__(self, folder: str | Path) -> None:
        self.files = sorted(Path(folder).glob("*.jpg"))
        if not self.files:
            raise FileNotFoundError(
                f"no photographs in {folder}; make them: python examples/face_crops.py --make {folder}"
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        face, marks = aligned(Image.open(self.files[index]).convert("RGB"))
        return (
            face.transpose(2, 0, 1).astype(np.uint8),
            marks.ravel(),
            int(self.files[index].stem.split("-")[1]),
        )


def augment(sample: tuple[np.ndarray, np.ndarray, int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What has to stay online, for it is random: a flip, and brightness."""
    face, marks, label = sample
    image, marks = torch.as_tensor(face).float().div(255), torch.as_tensor(marks).clone()
    if torch.rand(()) < 0.5:
        image = image.flip(-1)
        marks[0::2] = 1 - marks[0::2]
    return image * (0.8 + 0.4 * torch.rand(())), marks, label


class Online(Dataset):
    """Faces from photographs, with their augmentation."""

    online = staticmethod(augment)

    def __init__(self, folder: str | Path) -> None:
        self.faces = Faces(folder)

    def __len__(self) -> int:
        return len(self.faces)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return augment(self.faces[index])


class Net(nn.Module):
    """Three convolutions on the face, then two layers that also see its landmarks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers, before = [], 3
        for channels in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            before = channels
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Sequential(
            nn.Linear(before * (SIDE // 8) ** 2 + 10, 256), nn.ReLU(), nn.Linear(256, 2)
        )

    def forward(self, face: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.features(face), marks], 1))


def read_settings(file: str | Path) -> dict:
    return yaml.safe_load(Path(file).read_text())


def net_of(settings: dict) -> Net:
    torch.manual_seed(settings["seed"])
    return Net(settings["model"]["width"])


def photographs() -> Path:
    return HERE / read_settings(HERE / "train.yaml")["data"]["photographs"]


def faces() -> Faces:
    """What `trainpace precompute` makes into shards."""
    return Faces(photographs())


def task():
    """(model, loss, optimizer, dataset), for forecasts of a step."""
    settings = read_settings(HERE / "train.yaml")
    model = net_of(settings)
    return (
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters()),
        Online(photographs()),
    )


def main() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, StrategyRegistry

    class ZeroOnCpus(DeepSpeedStrategy):
        """Lightning's strategy without its check for CUDA devices, for a cluster without GPUs."""

        def setup_environment(self) -> None:
            import deepspeed.ops

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
                False  # else it compiles C++ for a minute
            )
            self.parallel_devices = [
                torch.device("cpu", i) for i in range(len(self.parallel_devices))
            ]
            DDPStrategy.setup_environment(self)

    class Training(pl.LightningModule):
        def __init__(self, settings: dict) -> None:
            super().__init__()
            self.net, self.criterion, self.rate = (
                net_of(settings),
                nn.CrossEntropyLoss(),
                settings["model"]["learning_rate"],
            )

        def training_step(self, batch: list, _: int) -> torch.Tensor:
            face, marks, label = batch
            return self.criterion(self.net(face, marks).float(), label)

        def validation_step(self, batch: list, _: int) -> None:
            face, marks, label = batch
            self.log(
                "right", (self.net(face, marks).argmax(1) == label).float().mean(), sync_dist=True
            )

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=self.rate)

    for stage in (1, 2, 3):
        config = {
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        StrategyRegistry.register(
            f"deepspeed_stage_{stage}",
            ZeroOnCpus,
            override=True,
            config=config,
            process_group_backend="gloo",
        )
    settings = read_settings(sys.argv[1])
    data = settings["data"]
    if data["shards"]:
        from trainpace.shards import ShardDataset

        whole: Dataset = ShardDataset(data["shards"], transform=augment)
    else:
        whole = Online(data["photographs"])
    count = len(whole) - VALIDATED
    options = {"batch_size": data["batch_size"], "num_workers": data["num_workers"]}
    trained = DataLoader(Subset(whole, range(count)), shuffle=True, drop_last=True, **options)
    validated = DataLoader(Subset(whole, range(count, len(whole))), **options)
    pl.Trainer(**settings["trainer"]).fit(Training(settings), trained, validated)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", ".*(num_workers|srun|logger|log_every_n_steps).*")
    main()

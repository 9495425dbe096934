"""The traces of the built-in models that come with the package, so that a forecast of one needs no torch.

``zoo_workloads/NAME.VARIANT.json.gz`` holds a workload in all three number forms, where VARIANT is an optimizer, or a mode in
which none steps. ``make zoo-workloads`` traces them with the torch of requirements.lock.
"""

import gzip
import re
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from trainpace.records import from_json
from trainpace.workload import Form, Variant, Workload

FOLDER = Path(__file__).parent / "zoo_workloads"
IMAGE_SIDE = 224
OPTIMIZERS = ("sgd", "sgd_momentum", "adam", "adamw")
VARIANTS = {name: Variant(name) for name in OPTIMIZERS} | {
    "forward_backward": Variant(mode="forward_backward"),
    "inference": Variant(mode="inference"),
}


def packaged_models() -> list[str]:
    """The names of the built-in models, in order."""
    return sorted(file.name.removesuffix(".inference.json.gz") for file in FOLDER.glob("*.inference.json.gz"))


def packaged_workload(spec: str, forms: Sequence[Form], variant: Variant) -> Workload | None:
    """The packaged trace of a built-in model, None for everything else."""
    name = re.fullmatch(r"(?:torchvision:)?(\w+)", spec)
    optimizer = variant.optimizer or "sgd_momentum"
    side = variant.image_size or IMAGE_SIDE
    if not name or side != IMAGE_SIDE or optimizer not in OPTIMIZERS:
        return None
    if variant._replace(optimizer=None, image_size=None) != Variant(mode=variant.mode):
        return None
    file = packaged_file(name[1], optimizer if variant.mode == "train" else variant.mode)
    if not file.is_file():
        return None
    workload = from_json(gzip.decompress(file.read_bytes()), Workload, str(file))
    return replace(workload, model=spec, forms={form: workload.forms[form] for form in forms})


def packaged_file(name: str, variant: str) -> Path:
    return FOLDER / f"{name}.{variant}.json.gz"

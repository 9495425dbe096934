"""One contender a process: `write NAME FOLDER` computes the photographs once, `read NAME FOLDER WORKERS` times epochs of it.

Peers (litdata, webdataset, Hugging Face datasets) lie in .peers, outside the environment: make .peers/installed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from photo_dataset import SIDE, Photos, decode

BATCH, EPOCHS, PROCESSES = 64, 3, 2
SHAPE = (SIDE, SIDE, 3)


def _sample(path: str) -> dict[str, Any]:
    # as bytes, which litdata reads 20 times as fast as arrays and twice as fast as tensors
    return {"image": decode(Path(path).read_bytes()).tobytes(), "label": int(Path(path).stem) % 10}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return _sample(row["path"])


def write_huggingface(folder: Path) -> None:
    import datasets

    source = datasets.Dataset.from_dict({"path": Photos().files})
    features = datasets.Features(
        {"image": datasets.Value("binary"), "label": datasets.Value("int64")}
    )
    done = source.map(
        _row,
        num_proc=PROCESSES,
        remove_columns=["path"],
        features=features,
        cache_file_name=str(folder / "map.arrow"),
    )
    assert len(done) == len(source)


def write_huggingface_kept(folder: Path) -> None:
    """As above, then in one place to be read from."""
    import datasets

    write_huggingface(folder)
    files = sorted(str(p) for p in folder.glob("map*.arrow"))
    datasets.concatenate_datasets([datasets.Dataset.from_file(f) for f in files]).save_to_disk(
        str(folder / "kept")
    )


def write_litdata(folder: Path) -> None:
    import litdata

    litdata.optimize(
        fn=_sample,
        inputs=Photos().files,
        output_dir=str(folder / "lit"),
        num_workers=PROCESSES,
        chunk_bytes="64MB",
    )


def write_webdataset(folder: Path) -> None:
    import webdataset

    with webdataset.ShardWriter(str(folder / "photos-%06d.tar"), maxsize=64e6, verbose=0) as sink:
        for i in range(len(photos := Photos())):
            image, label = photos[i]
            sink.write({"__key__": f"{i:06d}", "image.bin": image.tobytes(), "label.cls": label})


def write_memmap(folder: Path) -> None:
    photos = Photos()
    target = np.lib.format.open_memmap(folder / "photos.npy", "w+", np.uint8, (len(photos), *SHAPE))
    for i in range(len(photos)):
        target[i] = photos[i][0]
    target.flush()


class _Memmap:
    def __init__(self, folder: Path) -> None:
        self.images = np.load(folder / "photos.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(np.array(self.images[index])), index % 10


class _MemmapBatches(_Memmap):
    def __getitem__(self, index: Any) -> Any:
        import torch

        return torch.from_numpy(self.images[index]), torch.tensor(index) % 10


class _HuggingFace:
    def __init__(self, folder: Path) -> None:
        import datasets

        self.rows = datasets.load_from_disk(str(folder / "kept"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        import torch

        rows = self.rows[indices]
        return [
            (torch.frombuffer(bytearray(image), dtype=torch.uint8).reshape(SHAPE), label)
            for image, label in zip(rows["image"], rows["label"], strict=True)
        ]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]


def _loader(data: Any, workers: int, **options: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(data, num_workers=workers, persistent_workers=workers > 0, **options)


def read_memmap(folder: Path, workers: int) -> Iterable[Any]:
    return _loader(_Memmap(folder), workers, batch_size=BATCH, shuffle=True)


def read_memmap_batches(folder: Path, workers: int) -> Iterable[Any]:
    from torch.utils.data import BatchSampler, RandomSampler

    data = _MemmapBatches(folder)
    return _loader(
        data, workers, batch_size=None, sampler=BatchSampler(RandomSampler(data), BATCH, False)
    )


def read_huggingface(folder: Path, workers: int) -> Iterable[Any]:
    return _loader(_HuggingFace(folder), workers, batch_size=BATCH, shuffle=True)


def read_litdata(folder: Path, workers: int) -> Iterable[Any]:
    import litdata
    import torch

    class Photographs(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return torch.frombuffer(bytearray(sample["image"]), dtype=torch.uint8).reshape(
                SHAPE
            ), sample["label"]

    data = Photographs(str(folder / "lit"), shuffle=True)
    return litdata.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0
    )


def _web_sample(sample: dict[str, Any]) -> Any:
    import torch

    return torch.frombuffer(bytearray(sample["image.bin"]), dtype=torch.uint8).reshape(SHAPE), int(
        sample["label.cls"]
    )


def read_webdataset(folder: Path, workers: int) -> Iterable[Any]:
    import webdataset

    files = sorted(str(path) for path in folder.glob("*.tar"))
    data = (
        webdataset.WebDataset(files, shardshuffle=100, empty_check=False)
        .shuffle(1000)
        .map(_web_sample)
    )
    return _loader(data, workers, batch_size=BATCH)


def read_trainpace(folder: Path, workers: int) -> Iterable[Any]:
    from trainpace.shards import ShardDataset

    return ShardDataset(folder).loader(BATCH, num_workers=workers, persistent_workers=workers > 0)


def read_trainpace_plain(folder: Path, workers: int) -> Iterable[Any]:
    from trainpace.shards import ShardDataset

    return _loader(ShardDataset(folder), workers, batch_size=BATCH, shuffle=True)


def time_epochs(loader: Iterable[Any]) -> Iterator[tuple[int, float]]:
    """(samples, seconds) of each epoch but the first, in which workers start and files are mapped."""
    for epoch in range(EPOCHS + 1):
        start, samples, total = time.perf_counter(), 0, 0
        for batch in loader:
            images = batch[0]
            samples += len(images)
            total += int(images[0, 0, 0, 0])  # the batch is really there
        if epoch:
            yield samples, time.perf_counter() - start


def main() -> None:
    verb, name, folder, *rest = sys.argv[1:]
    if verb == "write":
        Path(folder).mkdir(parents=True, exist_ok=True)
        write: Callable[[Path], None] = globals()[f"write_{name}"]
        write(Path(folder))
        return
    import torch

    torch.set_num_threads(1)
    read: Callable[[Path, int], Iterable[Any]] = globals()[f"read_{name}"]
    epochs = list(time_epochs(read(Path(folder), int(rest[0]))))
    print(json.dumps({"samples": [n for n, _ in epochs], "seconds": [s for _, s in epochs]}))
    sys.stdout.flush()
    os._exit(0)  # litdata's threads outlive the work


if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()

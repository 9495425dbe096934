"""Loaders of other libraries work the same under the recorder and are timed."""

import pytest

from watch.beside_bare import lacking, trained, use_libraries

FOLDERS = (".zoo", ".engines", ".frameworks")
COMMON = """
import time
folder = os.environ["LOSSES"] + "-data"
def written(i):
    generator = torch.Generator().manual_seed(i)
    return torch.rand(8, generator=generator), i % 3
def train(loader, epochs=2):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for epoch in range(epochs):
        for batch in loader:
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            losses.append(loss.item())
    keep(losses)
"""
WEBDATASET = (
    COMMON
    + """
import webdataset
def slowly(x):
    time.sleep(0.002)
    return x
def main():
    os.makedirs(folder)
    for part in range(2):
        with webdataset.TarWriter(f"{folder}/part-{part}.tar") as tar:
            for i in range(part * 64, part * 64 + 64):
                x, y = written(i)
                tar.write({"__key__": f"{i:04d}", "x.pth": x, "y.cls": y})
    stream = webdataset.WebDataset(folder + "/part-{0..1}.tar", shardshuffle=False).shuffle(16, seed=0).decode()
    stream = stream.to_tuple("x.pth", "y.cls").map_tuple(slowly, torch.tensor)
    train(LOADER)
if __name__ == "__main__":
    main()
"""
)
SCRIPTS = {
    "webdataset, batches made in two workers": (
        WEBDATASET.replace(
            "LOADER", "webdataset.WebLoader(stream.batched(4), batch_size=None, num_workers=2)"
        ),
        64,
        4,
        2,
        None,
    ),
    "webdataset, batches made of single samples in this process": (
        WEBDATASET.replace(
            "LOADER", "webdataset.WebLoader(stream, batch_size=None, num_workers=0).batched(4)"
        ),
        64,
        4,
        0,
        None,
    ),
    "litdata": (
        COMMON
        + """
import litdata
from litdata.streaming import Cache
class Samples(litdata.StreamingDataset):
    def __getitem__(self, i):
        time.sleep(0.002)
        return super().__getitem__(i)
def main():
    cache = Cache(folder, chunk_size=32)
    for i in range(128):
        cache[i] = dict(zip("xy", written(i)))
    cache.done(); cache.merge()
    train(litdata.StreamingDataLoader(Samples(folder, shuffle=True, seed=1), batch_size=4, num_workers=2))
if __name__ == "__main__":
    main()
""",
        64,
        4,
        2,
        32,
    ),
    "mosaicml-streaming": (
        COMMON
        + """
import streaming
class Samples(streaming.StreamingDataset):
    def __getitem__(self, i):
        time.sleep(0.002)
        return super().__getitem__(i)
def main():
    with streaming.MDSWriter(out=folder, columns={"x": "ndarray:float32:8", "y": "int"}) as out:
        for i in range(128):
            x, y = written(i)
            out.write({"x": x.numpy(), "y": y})
    data = Samples(local=folder, shuffle=True, shuffle_seed=1, batch_size=4)
    train(streaming.StreamingDataLoader(data, batch_size=4, num_workers=2))
if __name__ == "__main__":
    main()
""",
        64,
        4,
        2,
        32,
    ),
    "torchdata's StatefulDataLoader": (
        COMMON
        + """
from torchdata.stateful_dataloader import StatefulDataLoader
class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 128
    def __getitem__(self, i):
        time.sleep(0.002)
        return written(i)
if __name__ == "__main__":
    train(StatefulDataLoader(Samples(), batch_size=4, num_workers=2, shuffle=True))
""",
        64,
        4,
        2,
        32,
    ),
}


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    use_libraries(monkeypatch, *FOLDERS)


@pytest.mark.slow
@pytest.mark.skipif(bool(lacking(*FOLDERS)), reason=f"make {lacking(*FOLDERS)}")
@pytest.mark.parametrize("name", SCRIPTS)
def test_loader_of_another_library_is_recorded(name, tmp_path):
    text, steps, samples, workers, batches = SCRIPTS[name]
    bare, watched, recording = trained(text, tmp_path)
    assert watched == bare
    (rank,) = recording.ranks
    assert rank.steps + 3 == steps == len(bare)
    assert rank.samples_per_step == pytest.approx(
        samples, abs=0.05
    )  # webdataset fetches one sample ahead
    assert (rank.loader.workers, rank.loader.batches) == (workers, batches)
    # the training waits for the sleep of a sample, divided among the workers
    assert 2 < rank.fetch.sample_wall_ms < 2 * samples
    assert rank.fetch.in_workers == bool(workers)
    waits_ms = rank.parts_ms["data"] + rank.parts_ms["loader_start"]
    assert waits_ms > 0.8 * 2 * samples / max(1, workers)
    assert rank.parts_ms["loader_start"] > 0 or not workers

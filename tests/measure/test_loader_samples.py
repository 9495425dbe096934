"""Planted costs of a sample are attributed to the right part."""

import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate as collate

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.host import random_states
from trainpace.measure.loader_worker import (
    OTHER,
    REST,
    LoaderTarget,
    Setting,
    choose,
    first_pass,
    function_stages,
    is_random,
    load_target,
    loader_cost,
    loader_failure,
    run_loader,
    sample_cost,
    transform_stages,
)
from trainpace.shards.user_dataset import same


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


class Burn:
    def __init__(self, ms):
        self.ms = ms

    def __call__(self, x):
        burn(self.ms / 1e3)
        return x + 1


class Noise:
    def __call__(self, x):
        return x + torch.rand(x.shape)


class OwnGenerator:
    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __call__(self, x):
        return x * self.generator.random()


AUGMENT = Compose(Burn(1), Noise())


class Data:
    def __init__(self, transform=None, sleep_ms=0.0, burn_ms=0.0, target_transform=None, length=40):
        self.transform, self.target_transform = transform, target_transform
        self.sleep_ms, self.burn_ms, self.length = sleep_ms, burn_ms, length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if not 0 <= i < self.length:
            raise IndexError(i)
        time.sleep(self.sleep_ms / 1e3)
        burn(self.burn_ms / 1e3)
        x, y = torch.full((4,), float(i)), i
        x = self.transform(x) if self.transform else x
        return x, self.target_transform(y) if self.target_transform else y


def target_of(dataset):
    return LoaderTarget("mine.py:data", dataset, len(dataset), collate, 4, False)


def test_sample_cost_separates_waiting_from_cpu_time():
    cost = sample_cost(target_of(Data(sleep_ms=6, burn_ms=2)), range(10), 8.0, passes=2)
    assert cost.cpu_ms == pytest.approx(2, rel=0.3)
    assert cost.wall_ms >= 8
    assert cost.wait_ms >= 5
    assert cost.cold_wall_ms is None
    assert "in memory" in cost.note


def test_sample_cost_includes_cold_file_reads(tmp_path):
    class Files(Data):
        def __getitem__(self, i):
            return torch.from_numpy(np.load(tmp_path / f"{i}.npy"))

    for i in range(10):
        np.save(tmp_path / f"{i}.npy", np.zeros(100_000, np.uint8))
    cost = sample_cost(target_of(Files(length=10)), range(10), 1.0, passes=2)
    assert cost.files == 1
    assert cost.file_bytes == pytest.approx(100_128)
    assert (cost.cold_wall_ms is not None) or "page cache" in cost.note
    assert cost.fetch_ms is None or cost.fetch_ms >= 0


class Inner(Data, torch.utils.data.Dataset):
    pass


def test_concatenated_datasets_have_separate_transform_stages():
    parts = [Inner(Compose(Burn(2), Noise()), length=4) for _ in range(2)]
    rest, *stages = transform_stages(target_of(torch.utils.data.ConcatDataset(parts)), range(8))
    assert (rest.name, [s.name for s in stages]) == (REST, ["Burn", "Noise"] * 2)
    assert sum(s.cpu_ms for s in stages if s.name == "Burn") == pytest.approx(2, rel=0.3)
    assert [s.offline for s in stages] == [True, False] * 2


def test_transforms_are_ranked_and_random_ones_marked():
    data = Data(
        Compose(Burn(1), Compose(Burn(4), Noise()), Burn(2)),
        burn_ms=3,
        target_transform=lambda y: y + 1,
    )
    before = list(data.transform.transforms)
    stages = transform_stages(target_of(data), range(12), passes=2)
    assert [s.name for s in stages[:5]] == [REST, "Burn", "Burn", "Noise", "Burn"]
    assert stages[5].kind == "target_transform"
    assert [s.cpu_ms for s in stages[:3]] == pytest.approx([3, 1, 4], rel=0.35)
    assert stages[4].cpu_ms == pytest.approx(2, rel=0.35)
    assert [s.random for s in stages] == [False, False, False, True, False, False]
    assert [s.offline for s in stages] == [True, True, True, False, False, True]
    assert data.transform.transforms == before  # put back


def test_random_dataset_keeps_all_transforms_online():
    class Crops(Data):
        def __getitem__(self, i):
            return self.transform(torch.full((4,), random.random()))

    stages = transform_stages(target_of(Crops(Compose(Burn(0.1)))), range(8))
    assert [s.random for s in stages] == [True, False]
    assert not any(s.offline for s in stages)


def test_transform_with_own_generator_is_random():
    stages = transform_stages(target_of(Data(OwnGenerator())), range(8))
    assert [(s.name, s.random) for s in stages] == [(REST, False), ("OwnGenerator", True)]


def test_randomness_check_preserves_random_random_states():
    torch.manual_seed(3)
    before = random_states()
    assert is_random(target_of(Data(Noise())), 0)
    assert not is_random(target_of(Data(Burn(0))), 0)
    assert random_states() == before


def test_dataset_functions_are_ranked_without_transforms():
    def decode(i):
        burn(0.004)
        return torch.zeros(3) + i

    class Plain(Data):
        def __getitem__(self, i):
            time.sleep(0.008)
            return decode(i)

    target = target_of(Plain())
    assert transform_stages(target, range(8)) == ()
    stages = function_stages(target, range(8), 12.0, random=False)
    assert sum(s.wall_ms for s in stages) == pytest.approx(12, rel=0.03)
    assert "time.sleep in __getitem__" in [s.name for s in stages[:2]]
    # Wall time: a busy machine shifts the shares of 8 ms sleep and 4 ms work.
    assert 2 < sum(s.wall_ms for s in stages if "burn" in s.name) < 10
    assert all(s.offline for s in stages if s.name != OTHER)


def test_functions_before_the_first_random_number_can_run_offline():
    def decode(i):
        time.sleep(0.002)
        return torch.zeros(3) + i

    def augment(x):
        x = x * random.random()
        time.sleep(0.002)
        return x

    class Augmented(Data):
        def __getitem__(self, i):
            return augment(decode(i))

    stages = function_stages(target_of(Augmented()), range(8), 12.0)
    offline = {s.name: s.offline for s in stages}
    assert offline["time.sleep in decode"]
    assert not offline["time.sleep in augment"]


def test_transforms_of_the_class_and_of_the_module_are_timed():
    class OfClass(Data):
        transform = Compose(Burn(1), Noise())

        def __init__(self):
            pass

        def __len__(self):
            return 8

        def __getitem__(self, i):
            return self.transform(torch.full((4,), float(i)))

    class OfModule(OfClass):
        transform = None

        def __getitem__(self, i):
            return AUGMENT(torch.full((4,), float(i)))

    for kind in (OfClass, OfModule):
        stages = transform_stages(target_of(kind()), range(8))
        assert [(s.name, s.offline) for s in stages[1:]] == [("Burn", True), ("Noise", False)]


def test_a_transform_of_the_base_class_is_not_timed_if_overridden():
    class Base(Data):
        transform = Compose(Noise())

    class Overridden(Base):
        transform = Burn(0)

        def __init__(self):
            self.sleep_ms = self.burn_ms = 0
            self.length, self.target_transform = 8, None

    data = Overridden()
    assert [s.name for s in transform_stages(target_of(data), range(8))] == [REST, "Burn"]
    assert data.transform is Overridden.transform


def test_raising_sample_is_named_in_error():
    class Broken(Data):
        def __getitem__(self, i):
            if i == 3:
                raise KeyError("no such label")
            return torch.zeros(1)

    with pytest.raises(UserCodeError, match=r"sample 3 .*KeyError at .* line \d+"):
        first_pass(target_of(Broken()), choose(40, 0), 1.0)


def test_chosen_sample_indices_are_distinct_and_in_range():
    for length in (1, 3, 8, 600, 10**9):
        indices = choose(length, 0)
        assert len(set(indices)) == len(indices) == min(length, 512)
        assert max(indices) < length
        assert indices[0] == 0


def test_sample_equality_compares_types_and_values():
    tensor, array = torch.tensor([1.0, float("nan")]), np.arange(3)
    assert same((tensor, {"a": [array]}, "x"), (tensor.clone(), {"a": [array.copy()]}, "x"))
    assert not same((tensor, 1), (tensor, 2))
    assert not same(array, array.astype(np.int32))
    assert not same([1], (1,))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def data(): return []", "is a dataset of no samples"),
        ("def data(): return 3", "is of type int, which is no dataset"),
        ("def data(): return {'a': 1}", "is of type dict"),
        (
            "import torch.utils.data as d\nclass I(d.IterableDataset):\n  def __iter__(self): return iter([1])\ndef data(): return I()",
            "IterableDataset",
        ),
        (
            "import torch.utils.data as d\ndef data(): return d.DataLoader([1, 2], batch_size=None)",
            "has no batch size",
        ),
        ("data = 3", "is of type int"),
    ],
)
def test_invalid_dataset_is_an_error(tmp_path, code, said):
    file = tmp_path / "bad_target.py"
    file.write_text(code)
    with pytest.raises(TrainpaceError, match=said):
        load_target(f"{file}:data")


def test_dataloader_settings_are_taken_over(tmp_path):
    file = tmp_path / "with_loader.py"
    file.write_text(
        "import torch.utils.data as d\ndef f(samples): return samples\n"
        "def data(): return d.DataLoader(list(range(9)), 4, num_workers=1, drop_last=True, collate_fn=f, prefetch_factor=3)"
    )
    target = load_target(f"{file}:data")
    assert (target.batch_size, target.drop_last, target.given_workers, target.prefetch_factor) == (
        4,
        True,
        1,
        3,
    )
    assert target.collated([1]) == [1]
    assert load_target(f"{file}:data", 2).batch_size == 2


def test_uncollatable_samples_are_an_error():
    target = target_of(Data())
    with pytest.raises(UserCodeError, match="2 samples do not make a batch"):
        target.collated([torch.zeros(2), torch.zeros(3)])


@pytest.mark.slow
def test_workers_speed_up_waiting_loader():
    target = target_of(Data(sleep_ms=5))
    cost = loader_cost(target, 5.0, 0.0, range(8), 4)
    alone = run_loader(target, Setting(0, 4), range(8), 0.2, 20)
    two = run_loader(target, Setting(2, 4), range(8), 0.2, 10)
    assert alone.batch_ms >= 20
    assert two.batch_ms < 0.8 * alone.batch_ms
    assert cost.batch_size == 4
    assert cost.collate_ms > 0


@pytest.mark.parametrize(
    ("error", "workers", "sentence"),
    [
        (
            EOFError(),
            1,
            "a worker of the DataLoader with 1 worker exited unexpectedly (EOFError: no message)",
        ),
        (
            ConnectionResetError(104, "Connection reset by peer"),
            2,
            "a worker of the DataLoader with 2 workers exited unexpectedly "
            "(ConnectionResetError: [Errno 104] Connection reset by peer)",
        ),
        (
            EOFError(
                "Caught EOFError in DataLoader worker process 0.\n"
                "Original Traceback (most recent call last):\n  ...\nEOFError: no data left"
            ),
            2,
            "the DataLoader with 2 workers raised EOFError: no data left",
        ),
        (
            EOFError("no data left"),
            0,
            "the DataLoader with no workers raised EOFError: no data left",
        ),
        (
            RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"),
            1,
            "the DataLoader with 1 worker raised RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly",
        ),
    ],
)
def test_loader_failure_separates_dead_and_raising_workers(error, workers, sentence):
    assert loader_failure(error, workers) == sentence

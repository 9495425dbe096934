"""A random dataset is rejected, and its random part is named."""

import random
import sys
import types

import numpy as np
import pytest
import torch

from trainpace.shards.user_dataset import NotDeterministic, computed_twice


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, x):
        for t in self.transforms:
            x = t(x)
        return x


def scale(x):
    return x * 2


class Flip:
    def __call__(self, x):
        return x.flip(-1) if torch.rand(()) < 0.5 else x


class Data:
    def __init__(self, transform=None, extra=lambda: 0):
        self.transform, self.extra = transform, extra

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = torch.arange(12.0).reshape(3, 4) + index
        return {"image": self.transform(x) if self.transform else x, "extra": self.extra()}


def said(data):
    state = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    with pytest.raises(NotDeterministic) as caught:
        computed_twice(data, 2)
    assert random.getstate() == state[0]
    assert np.random.get_state()[1].tobytes() == state[1]
    assert torch.equal(torch.get_rng_state(), state[2])
    assert "ShardDataset(folder, transform=...)" in caught.value.hint
    return caught.value.message


def test_deterministic_sample_is_returned():
    assert computed_twice(Data(Compose(scale, torch.relu)), 1).layout.fields[0].name == "image"


def test_random_draw_without_effect_is_allowed():
    assert computed_twice(Data(extra=lambda: 0 * random.randrange(9)), 0).values[1] == 0


def test_random_transform_is_named():
    inner = Compose(scale, Flip())
    assert "in image" in said(Data(Compose(scale, inner)))
    assert "Flip, transform 2 of 2 in transform.transforms[1], is random" in said(
        Data(Compose(scale, inner))
    )
    assert "Flip, transform 3 of 3 in transform, is random" in said(
        Data(Compose(scale, scale, Flip()))
    )


def test_compose_is_unchanged_by_determinism_check():
    members = [scale, Flip()]
    data = Data(Compose(*members))
    said(data)
    assert data.transform.transforms == members


def draw_python():
    return random.random()


def draw_numpy():
    return float(np.random.rand())


def draw_torch():
    return torch.rand(2)


@pytest.mark.parametrize("draw", [draw_python, draw_numpy, draw_torch])
def test_error_names_field_and_random_generator(draw):
    generator = draw.__name__.removeprefix("draw_").replace("python", "Python")
    message = said(Data(extra=draw))
    assert "(in extra)" in message
    assert message.endswith(f": it draws from the generator of {generator}.")


def test_generator_use_inside_a_library_is_named(monkeypatch):
    library = types.ModuleType("library")
    exec(
        compile(
            "import random\ndef draw():\n    return random.random()\n",
            "/elsewhere/library.py",
            "exec",
        ),
        library.__dict__,
    )
    data = Data(extra=library.draw)
    assert "draws from the generator of Python" in said(data)


def test_own_generators_and_state_are_distinguished():
    own = np.random.default_rng(0)
    assert "not by a generator of Python, numpy or torch" in said(
        Data(extra=lambda: float(own.random()))
    )
    counter = iter(range(10**6))
    assert "what it did before" in said(Data(extra=lambda: next(counter)))


def test_rare_random_change_is_found():
    random.seed(1)
    first = random.random()
    random.seed(20_011)
    second = random.random()
    # The first two seeds give the same outcome, but the generator advanced, so more seeds are tried.
    limit = min(first, second) * 0.9
    assert "in extra" in said(Data(extra=lambda: int(random.random() < max(limit, 0.1))))


def test_random_shapes_are_rejected():
    class Crop(Data):
        def __getitem__(self, index):
            return np.zeros(random.randrange(1, 99))

    assert "it draws from the generator of Python" in said(Crop())


def test_determinism_check_works_without_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")

    class Plain(Data):
        def __getitem__(self, index):
            return np.ones(3)

    assert computed_twice(Plain(), 0).shapes == [(3,)]

"""Every architecture of the benchmark in a tiny size: traced with the FLOPs of an independent count, or refused by name."""

import pytest
from architecture_list import DIFFUSERS, OTHERS, REFUSED, TRANSFORMERS, architectures
from architectures import WITHIN, difference

from trainpace.core.errors import TrainpaceError

LIBRARIES = dict.fromkeys(TRANSFORMERS, "transformers") | dict.fromkeys(DIFFUSERS, "diffusers")
LIBRARIES |= {name: "timm" for name, (_, tiny) in OTHERS.items() if tiny.startswith("timm")}
LIBRARIES |= {"GraphSAGE": "torch_geometric"}
NAMES = [*TRANSFORMERS, *DIFFUSERS, *OTHERS]
EVERY = 4
"""Of the tiny ones so many times fewer are traced by `make test`; `pytest -m long` traces all."""


def test_the_list_is_whole():
    assert len(set(NAMES)) >= 40
    assert set(REFUSED) <= set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if i % EVERY == 0 else pytest.mark.long)
        for i, name in enumerate(NAMES)
    ],
)
def test_a_tiny_one_is_traced_as_it_is_counted(name, tmp_path):
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    architecture = next(one for one in architectures(tmp_path, tiny=True) if one.name == name)
    if name in REFUSED:
        with pytest.raises(TrainpaceError, match=REFUSED[name]) as refused:
            difference(architecture)
        assert refused.value.hint
        return
    workload, ours, theirs = difference(architecture)
    assert ours == pytest.approx(theirs, rel=WITHIN)
    assert workload.parameters > 0

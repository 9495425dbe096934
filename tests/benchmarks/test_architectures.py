"""A tiny version of every benchmark architecture is traced with the FLOPs of an independent count, or rejected by name."""

import pytest
from architecture_list import DIFFUSERS, OTHERS, REFUSED, TRANSFORMERS, architectures
from architectures import WITHIN, difference

from trainpace.core.errors import TrainpaceError

LIBRARIES = dict.fromkeys(TRANSFORMERS, "transformers") | dict.fromkeys(DIFFUSERS, "diffusers")
LIBRARIES |= {name: "timm" for name, (_, tiny) in OTHERS.items() if tiny.startswith("timm")}
LIBRARIES |= {"GraphSAGE": "torch_geometric"}
NAMES = [*TRANSFORMERS, *DIFFUSERS, *OTHERS]
EVERY = 4
"""`make test` traces one of this many tiny architectures; `pytest -m long` traces all."""


def test_benchmark_lists_at_least_40_architectures():
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
def test_traced_flops_match_independent_count(name, tmp_path):
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

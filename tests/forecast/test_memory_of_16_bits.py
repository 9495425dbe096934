"""Memory with 16-bit weights and paged optimizer states, and the probability that a run fits."""

import numpy as np
import pytest
from msgspec.structs import replace

from nouns import stacked, step_memory
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.outcome import FITS_AT
from trainpace.forecast import Forecaster, Target
from trainpace.forecast.memory import (
    COMPILED_NEED_SD,
    NEED_SD,
    fit_probability,
    fits,
    needed_gib,
    room_gib,
    usable_gib,
)

FORM = stacked().forms["half"]


def memory(form=FORM, **changes):
    return step_memory(form, Execution(**{"micro_batch": 1, "precision": "bf16", **changes}), True)


def with_update(temporary):
    """Return a form whose optimizer update needs this many extra bytes and sets the peak."""
    gradients = float(FORM.memory.peaks[:, 0].max())
    peaks = np.concatenate([FORM.memory.peaks, [[gradients, temporary, 0.0]]])
    return replace(FORM, memory=replace(FORM.memory, peaks=peaks))


def test_pure_16_bit_halves_optimizer_shards():
    sharded = {"zero_stage": 3, "nproc_per_node": 4}
    wide, pure = memory(**sharded), memory(**sharded, pure_16_bit=True)
    assert pure.optimizer_states_gib == pytest.approx(wide.optimizer_states_gib / 2)
    assert pure.parameters_gib < wide.parameters_gib
    assert pure.optimizer_states_gib == pytest.approx(memory().optimizer_states_gib / 4)


def test_fsdp_keeps_no_gathered_parameters_during_update():
    form = with_update(1e12)
    shard = FORM.memory.parameter_bytes / 4 / 2**30
    ranks = {"zero_stage": 3, "nproc_per_node": 4, "pure_16_bit": True}
    assert memory(form, **ranks).parameters_gib == pytest.approx(shard)
    assert memory(form, **ranks, reshard_after_forward=False).parameters_gib > 2 * shard
    assert memory(**ranks).parameters_gib > shard


def test_fit_probability_is_half_at_full_memory():
    m = memory()
    capacity = float(needed_gib(m)) / usable_gib(1.0)
    assert fit_probability(m, capacity) == pytest.approx(0.5)
    assert fit_probability(m, capacity * np.exp(NEED_SD)) == pytest.approx(0.841, abs=0.001)
    assert fit_probability(m, 2 * capacity) > 0.999 > 0.001 > fit_probability(m, capacity / 2)
    compiled = fit_probability(m, capacity * np.exp(COMPILED_NEED_SD), compiles=True)
    assert compiled == pytest.approx(0.841, abs=0.001)


@pytest.mark.parametrize("compiles", [False, True])
def test_training_fits_from_one_probability_on(compiles):
    m = memory()
    least = float(needed_gib(m)) / float(room_gib(1.0, compiles))
    assert fit_probability(m, least, compiles) == pytest.approx(FITS_AT)
    assert fits(m, least * 1.001, compiles)
    assert not fits(m, least * 0.999, compiles)


def test_paged_states_spill_over_pcie_when_memory_is_full():
    device = find_device("T4")
    room = usable_gib(device.memory_gib.value)

    def forecast(paged_gib):
        form = replace(FORM, memory=replace(FORM.memory, paged_bytes=paged_gib * 2**30))
        w = replace(stacked(), optimizer="paged_adamw_8bit", forms={"half": form})
        return Forecaster(w, Target(Cluster(device=device))).forecast(
            Execution(precision="fp16", optimizer=w.optimizer)
        )

    some, none = forecast(0.5 * room), forecast(0.0)
    assert some.exposed_ms.get("offload", 0.0) == 0.0
    assert some.memory == none.memory
    free = room - float(needed_gib(none.memory))
    spilled = forecast(free + 4.0)
    assert spilled.fits
    assert spilled.exposed_ms["offload"] == pytest.approx(
        2 * 4 * 2**30 / (15.76e9 * 0.8) * 1e3, rel=0.01
    )

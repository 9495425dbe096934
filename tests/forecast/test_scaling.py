"""Scaling efficiency is relative to the fewest devices that fit the model, or None if no fewer devices do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import forecast, stacked, step_memory
from scenes import forecasts
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.outcome import forecast_row
from trainpace.forecast.memory import needed_gib, room_gib
from trainpace.report import forecast_sections, show

WORKLOAD = stacked(8192)  # large enough that communicator buffers do not matter


def on(memory_gib, nodes=4, devices=8):
    h100 = find_device("H100")
    device = replace(h100, memory_gib=replace(h100.memory_gib, value=memory_gib))
    return Cluster(
        device=device, devices_per_node=devices, nodes=nodes, network_gb_per_s_per_device=25.0
    )


def run(nodes=4, devices=8, **changes):
    return Execution(
        nnodes=nodes, nproc_per_node=devices, precision="bf16", **{"micro_batch": 4, **changes}
    )


def card_for(execution):
    """Return the memory in GiB of the smallest card on which the execution fits."""
    return (
        float(needed_gib(step_memory(WORKLOAD.forms["half"], execution, True)))
        / room_gib(1.0)
        * (1 + 1e-9)
    )


def each(f):
    return f.samples_per_second / f.num_devices


def test_reference_is_one_device_if_model_fits():
    found, alone = (
        forecast(WORKLOAD, run(), on(80.0)),
        forecast(WORKLOAD, run(1, 1), on(80.0, 1, 1)),
    )
    assert found.scaling_reference_devices == 1
    assert found.scaling_efficiency == pytest.approx(each(found) / each(alone))
    assert alone.scaling_efficiency is alone.scaling_reference_devices is None


@pytest.mark.parametrize(("nodes", "devices"), [(1, 4), (1, 8), (2, 8)])
@pytest.mark.parametrize("tp", [1, 2])
def test_reference_is_fewest_devices_that_fit_model(nodes, devices, tp):
    fewest = run(nodes, devices, zero_stage=3, tp=tp)
    size = card_for(fewest)
    found = forecast(WORKLOAD, run(zero_stage=3, tp=tp), on(size))
    small = forecast(WORKLOAD, fewest, on(size, nodes, devices))
    assert found.scaling_reference_devices == nodes * devices
    assert found.scaling_efficiency == pytest.approx(each(found) / each(small))
    assert (
        found.scaling_efficiency <= 1.05
    )  # smaller optimizer shards can raise it slightly above 1


def test_efficiency_is_none_if_fewer_devices_do_not_fit():
    found = forecast(WORKLOAD, run(zero_stage=3), on(card_for(run(zero_stage=3))))
    assert found.fits
    assert found.scaling_efficiency is found.scaling_reference_devices is None
    assert (
        forecast(WORKLOAD, run(), on(0.5)).scaling_efficiency is None
    )  # also None if the execution itself does not fit


@given(st.floats(8.0, 200.0), st.sampled_from([0, 1, 3]), st.sampled_from([None, 8]))
def test_reference_has_fewer_devices_and_efficiency_stays_bounded(gib, stage, shard):
    found = forecast(WORKLOAD, run(zero_stage=stage, shard_size=shard), on(gib))
    assert (found.scaling_efficiency is None) == (found.scaling_reference_devices is None)
    if found.scaling_reference_devices is not None:
        assert found.scaling_reference_devices < 32
        assert 0 < found.scaling_efficiency <= 1.05


def test_scaling_reference_is_shown(capsys):
    size = card_for(run(1, 4, zero_stage=3))
    for cluster, execution, words in (
        (on(80.0), run(), "per device, relative to one device alone."),
        (on(size), run(zero_stage=3), "relative to 4 devices, the fewest that fit."),
        (
            on(card_for(run(zero_stage=3))),
            run(zero_stage=3),
            "unknown, because fewer devices cannot hold this model.",
        ),
    ):
        found = forecast(WORKLOAD, execution, cluster)
        assert forecast_row(found)["scaling_reference_devices"] == found.scaling_reference_devices
        show(forecast_sections(forecasts([found], WORKLOAD)))
        assert words in " ".join(capsys.readouterr().out.split())


def test_efficiency_above_one_is_explained(capsys):
    """Answers used to show an efficiency of 102 to 104 % without an explanation."""
    found = forecast(WORKLOAD, run(), on(80.0))
    for efficiency in (0.97, 1.0, 1.03):
        shown_row = replace(found, scaling_efficiency=efficiency)
        show(forecast_sections(forecasts([shown_row], WORKLOAD)))
        shown = " ".join(capsys.readouterr().out.split())
        assert ("above 100% is no error" in shown) == (efficiency > 1)

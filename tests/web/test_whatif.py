"""The what-if page agrees with `forecast` and answers every request."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import forecast, stacked, workload
from trainpace.core.execution import PRECISIONS, Execution
from trainpace.core.hardware import Cluster, catalogue, find_device
from trainpace.core.outcome import STEP_PARTS
from trainpace.job import Schedule
from trainpace.offers import Job, rank, snapshot
from trainpace.web.whatif import (
    BUILT_IN,
    Price,
    WhatIfRequest,
    forecaster_of,
    page_of,
    price_of,
    run,
    sizes_around,
)

GPUS = [d for d in catalogue() if d.kind == "gpu"]
PRICE = Price(usd_per_device_hour=2.0, source="test")
questions = st.builds(
    WhatIfRequest,
    batch=st.integers(1, 65536),
    accumulate=st.integers(1, 65536),
    gpus=st.integers(1, 1024),
    nodes=st.integers(1, 100_000),
    network=st.floats(1e-3, 1e5),
    precision=st.sampled_from(PRECISIONS),
    zero=st.integers(0, 3),
    checkpointing=st.sampled_from(["none", "selective", "full"]),
    epochs=st.floats(1e-6, 1e6),
    samples=st.integers(1, 10**12),
    price=st.none() | st.floats(0, 1e5),
)


def test_whatif_matches_forecast():
    q = WhatIfRequest(
        batch=16,
        gpus=8,
        nodes=2,
        network=50.0,
        precision="bf16",
        zero=1,
        epochs=3.0,
        samples=10_000,
    )
    device = find_device("H100")
    found = page_of(run(q, forecaster_of(stacked()), device, PRICE))
    cluster = Cluster(
        device=device,
        devices_per_node=8,
        nodes=2,
        network_gb_per_s_per_device=50 / 8,
        price_usd_per_device_hour=2.0,
    )
    execution = Execution(
        micro_batch=16,
        nnodes=2,
        nproc_per_node=8,
        precision="bf16",
        optimizer=stacked().optimizer,
        zero_stage=1,
    )
    assert found.forecast == forecast(
        stacked(), execution, cluster, Schedule(samples=10_000, epochs=3)
    )
    assert found.cost_usd.low <= found.forecast.cost_usd <= found.cost_usd.high
    assert found.forecast.cost_usd == pytest.approx(
        2 * 16 * found.forecast.training_time.total_s / 3600
    )
    bar = found.parts.groups[0].bars[0]
    assert bar.total == pytest.approx(
        sum(getattr(found.forecast.step, name) for name in STEP_PARTS)
    )
    line = found.curve.series[0]
    assert line.y[line.x.index(16.0)] == pytest.approx(found.forecast.step.total_ms)


@settings(max_examples=10)
@given(questions, st.sampled_from(GPUS), st.sampled_from([workload(), stacked()]))
def test_whatif_answers_every_request(question, device, model):
    found = page_of(run(question, forecaster_of(model), device, PRICE))
    assert found.verdict
    assert all(re.fullmatch(r"[^\n]+", line) for line in found.verdict)
    assert found.possible <= (not found.reason)


def test_shared_forecaster_matches_a_new_one():
    shared = forecaster_of(stacked())
    for q in (
        WhatIfRequest(batch=16),
        WhatIfRequest(batch=4, gpus=8, price=1.0),
        WhatIfRequest(batch=16, precision="fp32"),
    ):
        for gpu in ("T4", "H100"):
            alone = run(q, forecaster_of(stacked()), find_device(gpu), PRICE)
            assert page_of(run(q, shared, find_device(gpu), PRICE)) == page_of(alone)


def test_named_host_is_used_and_unknown_host_is_rejected():
    device = find_device("H100")
    named = run(
        WhatIfRequest(batch=1, host="13900K"), forecaster_of(workload()), device, None
    ).forecast
    typical = run(WhatIfRequest(batch=1), forecaster_of(workload()), device, None).forecast
    assert (named.host, named.host_assumed, typical.host_assumed) == ("Core i9-13900K", False, True)
    assert named.step.total_ms < typical.step.total_ms
    assert (
        "unknown host CPU"
        in run(WhatIfRequest(host="a fast one"), forecaster_of(workload()), device, None).reason
    )


def test_out_of_memory_is_reported_as_does_not_fit():
    q = WhatIfRequest(batch=65536, precision="fp32")
    found = page_of(run(q, forecaster_of(stacked()), find_device("T4"), None))
    assert not found.possible
    assert found.verdict[0].startswith("Does not fit")
    assert found.forecast is not None
    assert found.cost_usd is None


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (2, 1), (8, 1), (8, 2), (8, 8), (4, 4)])
def test_whatif_price_matches_match(gpus, nodes):
    """Regression: 64 networked H100s were priced as single cards without a network."""
    device = find_device("H100").name
    price = price_of(snapshot(), device, gpus, nodes)
    job = Job(schedule=Schedule(max_steps=100), global_batch=4096, most_nodes=nodes)
    offers = [offer for offer in snapshot() if offer.device == device and offer.count == gpus]
    ranking = rank(workload(), offers, {device: find_device("H100")}, job)
    same = [m.offer.price_usd_per_hour / gpus for m in ranking.matches if m.nodes == nodes]
    assert same or price is None or "are used" in price.source
    if same:
        assert price is not None
        assert price.usd_per_device_hour <= min(same)
        if "are used" not in price.source:
            assert price.usd_per_device_hour == pytest.approx(min(same))


def test_price_covers_the_whole_server():
    device = find_device("H100").name
    offer = next(
        o for o in snapshot() if o.device == device and o.count == 8 and o.network_gb_per_s
    )
    price = price_of((offer,), offer.device, 3, 2)
    assert price.usd_per_device_hour == pytest.approx(offer.price_usd_per_hour / 3)
    assert price.source.startswith(
        f"2 of the cheapest servers that can be joined, on demand: {offer.provider}"
    )
    assert "of whose 8 GPUs 3 are used" in price.source
    assert price_of((offer,), offer.device, 9, 1) is None
    alone = replace(offer, network_gb_per_s=None)
    assert price_of((alone,), offer.device, 8, 2) is None
    assert price_of((replace(offer, most_nodes=2),), offer.device, 8, 3) is None


@given(st.integers(1, 65536))
def test_batch_sizes_include_the_chosen_batch_and_larger_ones(batch):
    sizes = sizes_around(batch)
    assert batch in sizes
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= 66
    assert sizes[-1] >= 2 * batch


def test_built_in_names_match_the_model_zoo():
    from trainpace.workload.specs import MODELS

    assert set(BUILT_IN) == {name for name in MODELS if not name.endswith("_keras")}

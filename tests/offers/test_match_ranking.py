"""The ranking of offers: one global batch, the fastest execution that fits, and the binding limit if none does."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from nouns import forecast, stacked, workload
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.outcome import FITS_AT
from trainpace.forecast import needed_gib, room_gib
from trainpace.forecast.grid import divisors
from trainpace.job import JobConditions, Schedule
from trainpace.offers import Offer
from trainpace.offers.match import NEARLY, Job, nearest, rank

QUIET = JobConditions(startup_s=0.0, device_mtbf_h=None)
MIXED = ("amp_bf16", "amp_fp16")
JOB = Job(
    schedule=Schedule(samples=100_000, epochs=2),
    global_batch=64,
    precisions=MIXED,
    conditions=QUIET,
)


def offer(name, device, count=1, price=1.0, **more):
    return Offer(
        provider="p",
        instance_type=name,
        device=device,
        count=count,
        price_usd_per_hour=price,
        **more,
    )


def ranked(offers, job=JOB, by="usd", **sizes):
    return rank(
        workload(**sizes), offers, {o.device: find_device(o.device) for o in offers}, job, by
    )


T4, A100, JOINED = (
    offer("t4", "T4", price=0.5),
    offer("a100", "A100", price=2.0, spot_price_usd_per_hour=1.0),
    offer("8 a100", "A100", 8, price=16.0, network_gb_per_s=50.0),
)


def test_match_time_is_steps_times_forecast_step_time():
    (match,) = ranked([T4]).matches
    alone = forecast(workload(), match.forecast.execution, Cluster(device=find_device("T4")))
    assert match.time.steps == 2 * math.ceil(100_000 / 64)
    assert match.time.stepping_s == pytest.approx(match.time.steps * alone.step.total_ms / 1e3)
    assert match.mean_usd == pytest.approx(0.5 * match.mean_hours)
    assert match.usd.low <= match.mean_usd <= match.usd.high


def test_match_uses_host_of_each_server():
    quick, slow = (
        offer("quick", "A100", host="Core i9-13900K"),
        offer("slow", "A100", host="EPYC 7551"),
    )
    unnamed = offer("unnamed", "A100")
    found = {m.offer.instance_type: m.forecast for m in ranked([unnamed, quick, slow]).matches}
    times = [found[name].step.total_ms for name in ("quick", "unnamed", "slow")]
    assert times == sorted(times)
    assert times[0] < times[2]
    assert [found[name].host_assumed for name in ("quick", "unnamed", "slow")] == [
        False,
        True,
        False,
    ]


def test_all_matches_train_at_the_same_global_batch():
    ranking = ranked([T4, A100, JOINED])
    assert {m.forecast.execution.global_batch for m in ranking.matches} == {64}
    assert sorted(m.nodes for m in ranking.matches) == [1, 1, 1, 2, 4]


def test_workload_traced_at_one_batch_is_accumulated_to_multiples():
    only = replace(workload(), traced_batches=(16,))
    (found,) = rank(only, [T4], {"T4": find_device("T4")}, JOB, "usd").matches
    assert (found.forecast.execution.micro_batch, found.forecast.execution.accumulation) == (16, 4)
    with pytest.raises(TrainpaceError, match="--global-batch 7"):
        rank(replace(only, traced_batches=(7,)), [T4], {"T4": find_device("T4")}, JOB, "usd")


def test_servers_that_cannot_run_the_only_traced_batch_are_rejected_with_the_reason():
    only = replace(workload(), traced_batches=(64,))
    devices = {name: find_device(name) for name in ("T4", "A100")}
    ranking = rank(only, [T4, JOINED], devices, JOB, "usd")
    assert [m.offer for m in ranking.matches] == [T4]
    assert {r.binding for r in ranking.rejected} == {"batch"}
    assert "batch size of 64 per GPU, and 8 GPUs would get 8 samples" in ranking.rejected[0].reason


def test_activations_are_recomputed_only_where_they_do_not_fit():
    model, card = stacked(), find_device("A100")
    run = Execution(precision="bf16", accumulation=64, optimizer=model.optimizer)
    plain, recomputed = (
        float(needed_gib(forecast(model, one, Cluster(device=card)).memory))
        for one in (run, replace(run, activation_checkpointing="full"))
    )
    between = math.sqrt(plain * recomputed) / float(room_gib(1.0))
    small = replace(card, name="small", memory_gib=replace(card.memory_gib, value=between))
    devices = {"A100": card, "small": small}
    job = replace(JOB, precisions=("bf16",))
    found = rank(model, [A100, offer("small", "small")], devices, job).matches
    way = {m.offer.device: m.forecast.execution.activation_checkpointing for m in found}
    assert way == {"A100": "none", "small": "full"}
    assert all(m.forecast.fit_probability >= FITS_AT for m in found)


def test_match_uses_fastest_supported_precision():
    assert ranked([T4]).matches[0].forecast.execution.precision == "amp_fp16"
    both = ranked([A100], replace(JOB, precisions=("fp32", "amp_bf16"))).matches
    assert [m.forecast.execution.precision for m in both] == ["amp_bf16"]
    only = ranked([T4], replace(JOB, precisions=("fp8",)))
    assert not only.matches
    assert only.rejected[0].binding == "device"


def test_match_defaults_to_torch_precision_of_each_card():
    found = {
        m.offer.device: m.forecast.execution.precision
        for m in ranked([T4, A100], replace(JOB, precisions=())).matches
    }
    assert found == {"T4": "fp32", "A100": "torch_fp32"}


def test_match_uses_fastest_micro_batch():
    (match,) = ranked([A100]).matches
    chosen = match.forecast.execution
    for micro in divisors(64):
        other = replace(chosen, micro_batch=micro, accumulation=64 // micro)
        assert (
            match.forecast.step.total_ms
            <= forecast(workload(), other, Cluster(device=find_device("A100"))).step.total_ms
        )


WAYS = [(0, None), (1, None), (3, None), (3, 8)]


@pytest.mark.parametrize("network_gb_per_s", [1.0, 50.0])
@pytest.mark.parametrize("gib", [0.5, 30.0, 60.0])
def test_match_is_within_tolerance_of_fastest_sharding(gib, network_gb_per_s):
    device = find_device("A100 SXM 80GB")
    model = heavy(gib * 2.0**30)
    servers = [offer("8", device.name, 8, network_gb_per_s=network_gb_per_s)]
    for match in rank(model, servers, {device.name: device}, JOB).matches:
        chosen, ranks = match.forecast.execution, 8 * match.nodes
        cluster = Cluster(
            device=device,
            devices_per_node=8,
            nodes=match.nodes,
            network_gb_per_s_per_device=network_gb_per_s / 8,
        )
        others = [
            replace(
                chosen,
                micro_batch=micro,
                accumulation=64 // ranks // micro,
                zero_stage=stage,
                shard_size=shard,
            )
            for micro in divisors(64 // ranks)
            for stage, shard in WAYS
        ]
        found = [forecast(model, other, cluster) for other in others]
        fastest = min(f.step.total_ms for f in found if f.fits)
        assert match.forecast.step.total_ms <= fastest * (1 + NEARLY)
        simpler = [
            f
            for f in found
            if f.fits and WAYS.index((f.execution.zero_stage, f.execution.shard_size)) == 0
        ]
        if chosen.zero_stage:
            assert all(f.step.total_ms > fastest * (1 + NEARLY) for f in simpler)


def test_matches_are_sorted_by_hours_or_dollars():
    by_usd, by_hours = (
        ranked([T4, A100, JOINED]).matches,
        ranked([T4, A100, JOINED], by="hours").matches,
    )
    assert [m.mean_usd for m in by_usd] == sorted(m.mean_usd for m in by_usd)
    assert [m.mean_hours for m in by_hours] == sorted(m.mean_hours for m in by_hours)


def test_front_contains_exactly_the_undominated_matches():
    matches = ranked(
        [T4, A100, JOINED, offer("dear", "T4", price=5.0)], replace(JOB, spot=True)
    ).matches
    for m in matches:
        beaten = any(
            (o.mean_usd, o.mean_hours) != (m.mean_usd, m.mean_hours)
            and o.mean_usd <= m.mean_usd
            and o.mean_hours <= m.mean_hours
            for o in matches
        )
        assert m.on_front != beaten


def test_spot_match_takes_more_hours():
    job = replace(
        JOB, spot=True, conditions=JobConditions(preemption_mean_h=0.5, device_mtbf_h=None)
    )
    spot, usual = sorted(ranked([A100], job).matches, key=lambda m: not m.spot)
    assert (spot.spot, usual.spot) == (True, False)
    assert spot.mean_hours > usual.mean_hours


def test_missed_deadline_and_budget_are_reported():
    free = ranked([T4, A100])
    slow = max(m.mean_hours for m in free.matches)
    some = ranked([T4, A100], replace(JOB, deadline_s=3600 * slow * 0.99))
    assert len(some.matches) == len(some.missed) == 1
    none = ranked([T4, A100], job := replace(JOB, deadline_s=1e-3))
    binding, reason, close = nearest(none, job)
    assert (binding, close.mean_hours) == ("deadline", min(m.mean_hours for m in free.matches))
    assert "missed by" in reason
    none = ranked([T4, A100], job := replace(JOB, budget_usd=1e-9))
    assert nearest(none, job)[0] == "budget"


def heavy(bytes_of_states):
    one = workload()
    forms = {
        name: replace(
            form,
            memory=replace(
                form.memory,
                parameter_bytes=0.2 * bytes_of_states,
                optimizer_bytes=0.8 * bytes_of_states,
            ),
        )
        for name, form in one.forms.items()
    }
    return replace(one, forms=forms)


def test_states_too_large_for_one_card_are_sharded_or_rejected():
    devices = {"A100 SXM 80GB": find_device("A100 SXM 80GB")}
    alone, eight = offer("1", "A100 SXM 80GB"), offer("8", "A100 SXM 80GB", 8)
    ranking = rank(heavy(100 * 2.0**30), [alone, eight], devices, JOB)
    assert [(m.offer.instance_type, m.forecast.execution.zero_stage) for m in ranking.matches] == [
        ("8", 1)
    ]
    (rejected,) = ranking.rejected
    assert (rejected.binding, rejected.offer.instance_type) == ("memory", "1")
    assert 20 < rejected.short_gib < 60
    none = rank(heavy(10_000 * 2.0**30), [alone, eight], devices, JOB)
    assert nearest(none, JOB)[2].offer.instance_type == "8"


def test_parameters_are_sharded_if_sharding_states_is_not_enough():
    job = replace(JOB, precisions=("bf16",))

    def stage_on(gib):
        card = find_device("A100 SXM 80GB")
        card = replace(card, memory_gib=replace(card.memory_gib, value=gib))
        found = rank(stacked(), [offer("8", card.name, 8)], {card.name: card}, job).matches
        return found[0].forecast.execution.zero_stage if found else None

    stages = [stage_on(gib) for gib in np.geomspace(8.0, 0.5, 40)]
    assert stages[0] in (0, 1)
    assert 3 in stages
    assert stages[-1] is None


def test_sharded_16_bit_checkpoint_contains_fp32_states():
    def written_s(states, **changes):
        (found,) = rank(
            heavy(states),
            [offer("8", "A100 SXM 80GB", 8)],
            {"A100 SXM 80GB": find_device("A100 SXM 80GB")},
            replace(JOB, precisions=("bf16",), **changes),
        ).matches
        return found.forecast.execution.zero_stage, found.time.checkpoint_s / found.time.checkpoints

    (plain, small_s), (sharded, large_s) = written_s(50e9), written_s(100e9)
    assert (plain, sharded) == (0, 1)
    assert small_s == pytest.approx(50.0)  # at 1 GB/s
    assert large_s == pytest.approx(200.0)


def test_indivisible_global_batch_is_rejected():
    ranking = ranked([offer("3", "T4", 3), T4])
    assert [m.offer.instance_type for m in ranking.matches] == ["t4"]
    assert ranking.rejected[0].binding == "batch"


def test_data_from_another_cloud_adds_egress_cost_and_transfer_time():
    job = replace(
        JOB, data_from="aws", conditions=replace(QUIET, data_gb=100.0, download_gb_per_s=0.1)
    )
    (away,) = ranked([T4], job).matches
    (home,) = ranked([replace(T4, provider="aws")], job).matches
    assert away.egress_usd == pytest.approx(9.0)
    assert away.time.transfer_s == pytest.approx(1000.0)
    assert home.egress_usd == 0.0
    assert home.time.transfer_s == pytest.approx(100.0)


def test_electricity_is_added_to_cost():
    own = replace(T4, price_usd_per_hour=0.0, electricity_usd_per_kwh=0.3)
    (match,) = ranked([own]).matches
    assert match.mean_usd == pytest.approx(0.3 * match.time.kwh)


def test_job_that_never_ends_is_not_matched():
    job = replace(
        JOB,
        spot=True,
        conditions=JobConditions(preemption_mean_h=1e-4, checkpoint_every_s=1e6, startup_s=0.0),
    )
    assert {m.spot for m in ranked([A100], job).matches} == {False}


def test_invalid_job_and_untraced_precision_are_rejected():
    with pytest.raises(TrainpaceError, match="global_batch"):
        replace(JOB, global_batch=0)
    with pytest.raises(TrainpaceError, match="traced for"):
        rank(
            replace(workload(), forms={"fp32": workload().forms["fp32"]}),
            [T4],
            {"T4": find_device("T4")},
            JOB,
        )

"""Tests of the analysis across ranks on synthetic recordings with known truth."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from trainpace.diagnose import clocks_in_words, diagnose
from trainpace.watch import LinkRate, read_recording, timeline_of
from trainpace.watch.inside.event_log import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PARTS,
    TRIALS,
    EventLogWriter,
    Span,
    Step,
)
from trainpace.watch.stragglers import (
    Collective,
    RankStep,
    common,
    link_rates,
    offsets_ns,
    rank_steps,
    slow_links,
    together,
)

MS = 1_000_000
BOOTED = 4 * 10**15
"""Uptime of weeks in nanoseconds, beyond the exact range of a float."""
NODES = {0: "a", 1: "b", 2: "c"}


def training(own, transfer=2.0, elements=None, steps=30, clocks_ms=None):
    """Return steps by rank and number.

    `own` holds milliseconds by part for each rank, or a function of the step number. All ranks
    leave the collective `transfer` ms after the last one arrives.
    """
    by_rank, at = {rank: {} for rank in own}, 0
    for number in range(3, 3 + steps):
        parts = {rank: each(number) if callable(each) else each for rank, each in own.items()}
        arrives = {rank: at + round(sum(spent.values()) * MS) for rank, spent in parts.items()}
        leaves = max(arrives.values()) + round(transfer * MS)
        for rank, spent in parts.items():
            shift = BOOTED + round((clocks_ms or {}).get(rank, 0.0) * MS)
            ns = [round(spent.get(i, 0.0) * MS) for i in range(len(PARTS))]
            ns[COMMUNICATION] = leaves - arrives[rank]
            held = elements(rank, number) if callable(elements) else (elements or {}).get(rank, 0)
            by_rank[rank][number] = RankStep(
                number,
                tuple(ns),
                (Collective("gradients", arrives[rank] + shift, leaves + shift),),
                {"gradients": ns[COMMUNICATION]},
                {"gradients": 1},
                held,
            )
        at = leaves
    return by_rank


STEADY = {FORWARD: 8.0, BACKWARD: 2.0}


def found(own, rates=(), **more):
    by_rank = training(own, **more)
    result = together(by_rank, {rank: NODES[rank] for rank in by_rank}, rates)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("slow", "elements", "cause"),
    [
        ({FORWARD: 20.0, BACKWARD: 2.0}, None, "compute"),
        ({FORWARD: 20.0, BACKWARD: 2.0}, {0: 512, 1: 512, 2: 512}, "compute"),
        ({FORWARD: 20.0, BACKWARD: 2.0}, {0: 512, 1: 1200, 2: 512}, "inputs"),
        ({FORWARD: 20.0, BACKWARD: 2.0}, {0: 512, 1: 600, 2: 512}, "compute"),
        ({**STEADY, DATA: 12.0}, {0: 512, 1: 1200, 2: 512}, "data"),
        ({**STEADY, OTHER: 12.0}, None, "host"),
    ],
)
def test_straggler_is_named_with_its_cause(slow, elements, cause):
    result = found({0: STEADY, 1: slow, 2: STEADY}, elements=elements)
    (straggler,) = result.stragglers
    assert (straggler.rank, straggler.node, straggler.cause) == (1, "b", cause)
    assert straggler.ms == pytest.approx(12.0)
    assert straggler.cause_ms == pytest.approx(12.0)
    assert straggler.ms_low <= straggler.ms <= straggler.ms_high
    assert [r.waiting_ms for r in result.ranks] == pytest.approx([12.0, 0.0, 12.0], abs=1e-5)
    assert [r.transfer_ms for r in result.ranks] == pytest.approx([2.0] * 3, abs=1e-5)
    (collective,) = result.collectives
    assert (collective.name, collective.per_step) == ("gradients", 1.0)
    assert (collective.waiting_ms, collective.transfer_ms) == pytest.approx((8.0, 2.0))


def test_all_ranks_of_a_slow_node_are_named():
    result = together(
        training({0: STEADY, 1: {FORWARD: 19.0}, 2: {FORWARD: 20.0}, 3: STEADY, 4: STEADY}),
        {0: "a", 1: "b", 2: "b", 3: "c", 4: "c"},
        (),
    )
    assert [(s.rank, s.node, round(s.ms)) for s in result.stragglers] == [(2, "b", 10), (1, "b", 9)]


def test_equal_or_alternating_ranks_have_no_straggler():
    turns = {rank: lambda n, r=rank: {FORWARD: 20.0 if n % 3 == r else 8.0} for rank in range(3)}
    for own in ({0: STEADY, 1: STEADY}, turns):
        result = found(own)
        assert (result.stragglers, result.slow_links, result.uneven_ms) == ((), (), None)


def test_uneven_lengths_are_reported_if_long_inputs_arrive_last():
    own = {rank: lambda n, r=rank: {FORWARD: 20.0 if n % 3 == r else 8.0} for rank in range(3)}
    result = found(own, elements=lambda rank, n: 900 if n % 3 == rank else 300)
    assert result.stragglers == ()
    assert result.uneven_ms == pytest.approx(8.0, rel=1e-3)
    assert (
        found(own, elements=lambda rank, n: 900 if (n + 1) % 3 == rank else 300).uneven_ms is None
    )


def test_too_few_ranks_or_steps_give_no_analysis():
    assert together(training({0: STEADY}), NODES, ()) is None
    assert together(training({0: STEADY, 1: STEADY}, steps=4), NODES, ()) is None
    steps = training({0: STEADY, 1: STEADY}, steps=8)
    steps[1][5] = steps[1][5]._replace(together=())
    assert [s.number for s in common(steps)[0]] == [3, 4, 6, 7, 8, 9, 10]


RANKS = st.dictionaries(
    st.integers(0, 2),
    st.fixed_dictionaries(
        {part: st.floats(0, 50) for part in (DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER)}
    ),
    min_size=2,
)


@settings(deadline=None)
@given(own=RANKS, transfer=st.floats(0, 30))
def test_rank_parts_add_up_to_the_step(own, transfer):
    for rank in found(own, transfer=transfer, steps=6).ranks:
        parts = (
            rank.compute_ms,
            rank.data_ms,
            rank.host_ms,
            rank.waiting_ms,
            rank.transfer_ms,
            rank.undivided_ms,
        )
        assert sum(parts) == pytest.approx(rank.step_ms, abs=1e-5)
        assert min(parts) >= -1e-6


@settings(deadline=None)
@given(own=RANKS, transfer=st.floats(0, 30), ahead=st.floats(-1e9, 1e9))
def test_different_clock_of_a_node_changes_only_its_offset(own, transfer, ahead):
    last = max(own)
    before, after = (
        found(own, transfer=transfer, steps=6, clocks_ms={last: ms}) for ms in (0.0, ahead)
    )
    assert replace(after, clocks=()) == replace(before, clocks=())
    (moved,) = (
        b.offset_ms - a.offset_ms
        for a, b in zip(before.clocks, after.clocks, strict=True)
        if a.node == NODES[last]
    )
    assert moved == pytest.approx(ahead, abs=1e-5)


def test_clock_offset_is_the_median_over_collectives():
    steps = training({0: STEADY, 1: STEADY}, clocks_ms={1: 90_000.0})
    for number in list(steps[1])[::3]:  # One rank leaves some collectives late.
        (e,) = steps[1][number].together
        late = e._replace(leaves_ns=e.leaves_ns + 40 * MS)
        steps[1][number] = steps[1][number]._replace(together=(late,))
    assert offsets_ns(common(steps), NODES) == {"a": 0, "b": 90_000 * MS}


# ---- links


def rate(sender, receiver, mbit_per_s):
    return LinkRate(sender=sender, receiver=receiver, mb_per_step=2.0, mbit_per_s=mbit_per_s)


def test_slow_link_is_named_without_links_it_delays():
    ring = (
        rate("a", "d", 800.0),
        rate("b", "a", 100.0),
        rate("c", "b", 300.0),
        rate("d", "c", 780.0),
    )
    (slow,) = slow_links(ring)
    assert (slow.sender, slow.receiver, slow.at_least) == ("b", "a", False)
    assert slow.ms == pytest.approx(16e3 * (1 / 100 - 1 / 800))
    (slow,) = slow_links((rate("a", "b", 400.0), rate("b", "a", 100.0)))
    assert (slow.sender, slow.at_least) == ("b", True)
    assert slow_links(ring[:1]) == slow_links((ring[0], ring[3])) == ()


def test_slow_link_cost_is_limited_by_the_transfer_time():
    rates = rate("a", "b", 800.0), rate("b", "a", 100.0)
    for transfer, told in ((500.0, 140.0), (60.0, 60.0)):
        (slow,) = found({0: STEADY, 1: STEADY}, rates, transfer=transfer).slow_links
        assert slow.ms == pytest.approx(told)
    assert found({0: STEADY, 1: STEADY}, rates, transfer=0.1).slow_links == ()


def test_link_rates_use_bytes_sent_between_two_readings():
    def notes(own, peer, sent, busy):
        looks = ((3, 1000, 2000), (13, 1000 + sent, 2000 + busy))
        return [
            {"links": [[own, peer, n, us], ["10.0.0.9", "10.0.0.8", 5, 5]], "link_steps": step}
            for step, n, us in looks
        ]

    logs = {
        0: notes("10.0.0.1", "10.0.0.2", 20_000_000, 400_000),
        1: notes("10.0.0.2", "10.0.0.1", 999_999, 400_000),
    }
    (only,) = link_rates(logs, NODES)
    assert (only.sender, only.receiver, only.mb_per_step, only.mbit_per_s) == ("a", "b", 2.0, 400.0)
    assert link_rates({0: logs[0], 1: []}, NODES) == ()
    assert link_rates({0: logs[0][:1], 1: logs[1]}, NODES) == ()


def test_link_rates_exclude_steps_without_communication_and_rendezvous_traffic():
    """Under `diagnose`, requests to the ranks' store are acknowledged late."""

    def steps(trial, numbers):
        return [Step(trial, 1, n, 0, 1, 8, 0.0, 0.0, (0,) * len(PARTS)) for n in numbers]

    def look(number, sent, busy):
        store = ["10.0.0.1", "10.0.0.2", 20 * number, 40_000 * number]
        return {"links": [["10.0.0.1", "10.0.0.2", sent, busy], store], "link_steps": number}

    no_sync, settling = TRIALS.index("no_sync"), TRIALS.index("settling")
    first, last = look(3, 3_000_000, 60_000), look(13, 3_000_000 + 20_000_000, 60_000 + 400_000)
    plain = [*steps(0, range(4)), first, *steps(0, range(4, 14)), last]
    tried = [
        *steps(0, range(4)),
        first,
        *steps(settling, (4,)),
        *steps(0, range(5, 9)),
        *steps(settling, (9, 10)),
        *steps(no_sync, (11, 12)),
        *steps(settling, (13,)),
        last,
    ]
    for records, mb_per_step in ((plain, 2.0), (tried, 20 / 6)):
        peer = [{"links": [["10.0.0.2", "10.0.0.1", 0, 0]], "link_steps": n} for n in (3, 13)]
        (only,) = link_rates({0: records, 1: peer}, NODES)
        assert (only.mb_per_step, only.mbit_per_s) == (pytest.approx(mb_per_step), 400.0)


# ---- whole recordings, from the files


def write(folder, rank, node, forward_ms, ahead_ms=0, backend="gloo", wall_ms=0):
    log = EventLogWriter(
        str(folder / f"process-7-{node}.trail"),
        {
            "role": "process",
            "pid": 7,
            "host": node,
            "rank": rank,
            "world_size": 2,
            "cpus": 1,
            "clock_to_wall_ns": (wall_ms - ahead_ms) * MS,
        },
    )
    log.note(backend=backend)
    for number in range(20):
        at = BOOTED + (ahead_ms + 30 * number) * MS
        gone, end = at + forward_ms * MS, at + 30 * MS
        log.span(FORWARD, 0, "Net", 0, at, gone)
        log.span(COMMUNICATION, 1, "gradients", 0, gone, end)
        log.span(BACKWARD, 0, "backward", 0, gone, end)
        parts = [0] * len(PARTS)
        parts[FORWARD], parts[COMMUNICATION] = forward_ms * MS, end - gone
        log.step(Step(0, 1, number, at, end, 8, 0.0, 0.0, tuple(parts)))
        log.note(input_elements=64)
    log.note(ended=0)
    log.flush()
    (folder / "command.json").write_text(
        json.dumps({"command": ["x"], "seconds": 1.0, "exit_code": 0})
    )


def test_nodes_with_equal_pids_share_one_recording_and_clock(tmp_path):
    write(tmp_path, 0, "a", 5)
    write(tmp_path, 1, "b", 25, ahead_ms=90_000)
    recording = read_recording(tmp_path)
    (straggler,) = recording.together.stragglers
    assert (straggler.node, straggler.cause, straggler.ms) == ("b", "compute", pytest.approx(20.0))
    assert recording.together.clocks[0].offset_ms == pytest.approx(90_000.0)
    assert recording.together.clocks[0].wall_ms == pytest.approx(0.0)
    assert clocks_in_words(recording.together) == []
    rows = timeline_of(tmp_path, range(5, 7)).lanes
    assert [[(m.start_ms, m.end_ms) for m in row.steps] for row in rows] == [
        [(0.0, 30.0), (30.0, 60.0)]
    ] * 2


@pytest.mark.parametrize(
    ("wall_ms", "words"), [(7_200_000, "2 h ahead of"), (-90_000, "1 min 30 s behind")]
)
def test_wrong_wall_clock_of_a_node_is_reported_only(tmp_path, wall_ms, words):
    write(tmp_path, 0, "a", 5)
    write(tmp_path, 1, "b", 25, ahead_ms=90_000, wall_ms=wall_ms)
    recording = read_recording(tmp_path)
    (straggler,) = recording.together.stragglers
    assert straggler.ms == pytest.approx(20.0)
    (sentence,) = clocks_in_words(recording.together)
    assert f"the clock of b is {words} " in sentence
    assert sentence in diagnose(recording).warnings


def test_nccl_or_a_missing_rank_gives_no_analysis(tmp_path):
    write(tmp_path, 0, "a", 5, backend="nccl")
    write(tmp_path, 1, "b", 25, backend="nccl")
    assert read_recording(tmp_path).together is None
    (tmp_path / "process-7-b.trail").unlink()
    assert read_recording(tmp_path).together is None


def test_nested_collectives_and_trial_steps_are_excluded():
    def span(name, start, end, depth=0):
        return Span(COMMUNICATION, depth, name, 0, start, end)

    parts = [0] * len(PARTS)
    parts[COMMUNICATION] = 50
    records = [{"number": 1, "name": "all_reduce"}, {"number": 2, "name": "wait"}]
    for number, trial in ((3, 0), (4, 1)):
        records += [
            span(2, 20, 30, 1),
            span(1, 10, 40),
            span(2, 50, 70),
            Step(trial, 1, number, 0, 100, 8, 0.0, 0.0, tuple(parts)),
            {"input_elements": 10 * number},
        ]
    (step,) = rank_steps(records).values()
    assert (step.number, step.input_elements) == (3, 30)
    assert step.together == (Collective("all_reduce", 10, 40),)
    assert step.by_name_ns == {"all_reduce": 30, "wait": 20}

"""Sentences about the ranks of a training, and their place in a diagnosis without interventions."""

import math

import pytest
from msgspec.structs import replace

from diagnose.recordings import block, fetch, rank, recording
from trainpace.diagnose import diagnose, faults_in_words
from trainpace.report import diagnosis_sections, page, recording_sections, show
from trainpace.report.diagnosis import ranks_chart
from trainpace.watch import (
    Clock,
    CollectiveShare,
    LinkRate,
    RankShare,
    SlowLink,
    Straggler,
    Together,
)


def share(number, **ms):
    whole = {
        "compute_ms": 10.0,
        "data_ms": 1.0,
        "host_ms": 1.0,
        "waiting_ms": 0.0,
        "transfer_ms": 3.0,
        "undivided_ms": 0.0,
        **ms,
    }
    return RankShare(
        rank=number,
        node=f"node{number + 1}",
        step_ms=math.fsum(whole.values()),
        input_elements=512.0,
        **whole,
    )


def straggler(cause, **more):
    return Straggler(
        rank=1,
        node="node2",
        ms=20.0,
        ms_low=19.0,
        ms_high=21.0,
        cause=cause,
        cause_ms=20.5,
        **{"elements": 512.0, **more},
    )


def together(stragglers=(), links=(), uneven_ms=None):
    return Together(
        steps=77,
        ranks=(share(0, waiting_ms=20.0), share(1, compute_ms=30.0)),
        stragglers=stragglers,
        slow_links=links,
        collectives=(
            CollectiveShare(
                name="gradients", per_step=1.0, exposed_ms=13.0, waiting_ms=10.0, transfer_ms=3.0
            ),
            CollectiveShare(name="wait", per_step=1.0, exposed_ms=2.0),
        ),
        links=(LinkRate(sender="node1", receiver="node2", mb_per_step=1.5, mbit_per_s=700.0),),
        clocks=(Clock(node="node2", offset_ms=5000.4, uncertainty_ms=3.0, wall_ms=0.4),),
        uneven_ms=uneven_ms,
    )


def of_two(found, **more):
    quick = rank(0, 2, forward=10.0, data=1.0, other=1.0, communication=23.0, **more)
    slow = replace(
        rank(1, 2, forward=30.0, data=1.0, other=1.0, communication=3.0, **more), host="node2"
    )
    return recording(quick, slow, together=found)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (straggler("compute"), "inputs as large as the others'"),
        (straggler("inputs", elements=1536.0, usual_elements=512.0), "1,536 elements"),
        (straggler("data"), "slower disk"),
        (straggler("host"), "own code"),
    ],
)
def test_straggler_sentence_names_its_cause(found, said):
    (line,) = faults_in_words(of_two(together((found,))))
    assert said in line


def test_interventions_prove_straggler_compute_and_slow_data():
    def blocks(own, plain=50.0, cached=30.0):
        return [
            block(trial, other=ms + i)
            for i in range(3)
            for trial, ms in (("plain", plain), ("no_sync", own), ("cached_batch", cached))
        ]

    ranks = rank(0, 2, other=10.0, blocks=blocks(11.0)), rank(1, 2, other=30.0, blocks=blocks(31.0))
    own = "its step took 32 ms and the others' 12 ms."
    (words,) = faults_in_words(recording(*ranks, together=together((straggler("compute"),))))
    assert words.endswith(own)
    (words,) = faults_in_words(recording(*ranks, together=together((straggler("data"),))))
    assert own in words
    assert "one cached batch on every rank, a step took 31 ms instead of 51" in words
    unlike = ranks[0], rank(1, 2, other=30.0)  # it ended before
    (words,) = faults_in_words(recording(*unlike, together=together((straggler("compute"),))))
    assert "its step took" not in words


def test_straggler_names_sample_times():
    slow = rank(1, 2, data=20.0, fetch=fetch(wall=2.5))
    words = faults_in_words(
        recording(
            rank(0, 2, data=1.0, fetch=fetch(wall=0.1)),
            slow,
            together=together((straggler("data"),)),
        )
    )
    assert "2.5 ms there and 0.1 ms elsewhere" in words[0]


def test_most_expensive_fault_comes_first():
    link = SlowLink(
        sender="node2", receiver="node1", mbit_per_s=140.0, usual_mbit_per_s=700.0, ms=60.0
    )
    first, second = faults_in_words(of_two(together((straggler("compute"),), (link,))))
    assert "140 Mbit/s" in first
    assert second.startswith("Rank 1")
    (only,) = faults_in_words(of_two(together(uneven_ms=5.0)))
    assert "wait 5 ms per step" in only
    assert faults_in_words(of_two(None)) == []


def test_recording_separates_waiting_from_communication():
    d = diagnose(of_two(together((straggler("compute"),))))
    shares = {s.cause: s.ms for s in d.shares}
    assert (shares["straggler"], shares["communication"]) == pytest.approx((20.0, 3.0))
    assert math.fsum(shares.values()) == pytest.approx(d.step_ms) == pytest.approx(35.0)
    assert d.verdict == "straggler"
    assert any("node2 is a straggler" in line for line in d.why)
    advice = next(a for a in d.advice if a.cause == "straggler")
    assert advice.saves_ms == pytest.approx(20.0)
    assert "of them in forward" in advice.how


def test_details_show_table_of_ranks_clocks_and_links(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    show(recording_sections(of_two(together((straggler("compute"),))), "folder"))
    said = capsys.readouterr().out
    assert "1 on node2" in said
    assert (
        "The clock of node2 is 0.4 ms ahead of that of the first rank's node, give or take 3 ms."
        in said
    )
    assert "Link from node1 to node2: 1.5 MB per step, at 700 Mbit/s while it sends." in said


def test_ranks_chart_bars_are_step_times():
    found = together([straggler("compute")])
    d = diagnose(of_two(found))
    made = ranks_chart(d.together)
    assert [bar.total for bar in made.groups[0].bars] == pytest.approx(
        [r.step_ms for r in found.ranks]
    )
    assert made.finding == "Rank 1 on node2 waits least for the others: 0 ms of a step."
    assert "Each rank&#39;s step" in page("", diagnosis_sections(d, "folder"), {})
    assert ranks_chart(None) is None


def test_proof_command_matches_launcher():
    alone = recording(rank())
    assert alone.proved_by == ["trainpace", "diagnose", "--", "python", "train.py"]
    assert replace(alone, together_by="srun").proved_by == ["srun", *alone.proved_by]
    of_nodes = replace(alone, together_by="torchrun").proved_by
    assert of_nodes == ["trainpace", "diagnose", "--output", "FOLDER", "--", "python", "train.py"]


def test_chart_draws_slowest_of_many_ranks():
    ranks = tuple(share(i, waiting_ms=float(100 - i)) for i in range(40))
    made = ranks_chart(replace(together(), ranks=ranks))
    assert [bar.label for bar in made.groups[0].bars] == [
        f"rank {i} on node{i + 1}" for i in range(24, 40)
    ]
    assert "24 ranks that wait longer are not drawn." in made.note


def test_recorded_diagnosis_prints_proof_command(capsys):
    d = diagnose(of_two(together()))
    again = ("trainpace", "diagnose", "--", "torchrun", "train.py")
    show(diagnosis_sections(d, "folder", again))
    assert "trainpace diagnose -- torchrun train.py" in capsys.readouterr().out
    show(diagnosis_sections(d, "folder"))  # that was just done
    assert "trainpace diagnose --" not in capsys.readouterr().out

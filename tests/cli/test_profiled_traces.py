"""Tests of profiler traces of other tools on the command line and in Python."""

import json
import re

import pytest

import made_traces as made
import trainpace
from trainpace.cli import main
from trainpace.cli.program import meant, place_last
from trainpace.diagnose import ProfiledTraining
from trainpace.report.terminal import LINES
from trainpace.verbs import SUMMARIES


def ran(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Return a folder with one trace per rank. The last rank computes longer."""
    monkeypatch.setenv("COLUMNS", "80")
    for rank in range(4):
        longer = 3000.0 if rank == 3 else 0.0
        kernels = (
            (made.GEMM, 10.0, 100.0, 4100.0 + longer),
            (made.ADD, 12.0, 4100.0 + longer, 5100.0 + longer),
            (made.ALL_REDUCE, 20.0, 4600.0 + longer, 9100.0),
            (made.GEMM, 30.0, 9100.0, 9600.0),
        )
        work = made.Work(
            10_000.0,
            kernels,
            copies=(("Memcpy HtoD (Pageable -> Device)", 3.0, 20.0, 100.0),),
            operators=(("aten::mm", 5.0, 60.0),),
        )
        made.write(
            tmp_path / f"rank{rank}.json.gz",
            made.trace_of(made.events_of(work), rank=rank, world_size=4),
        )
    return tmp_path


def test_rank_traces_are_summarized_on_one_screen(ranks, capsys):
    code, out, _ = ran(capsys, ranks)
    assert code == 0
    assert 0 < out.count("\n") <= LINES
    assert all(len(line) <= 80 for line in out.splitlines())
    joined = " ".join(out.split())
    assert "Verdict: computing" in joined
    assert "4 ranks on NVIDIA H100 80GB HBM3, recorded by torch.profiler; 7 steps each" in joined
    assert "they wait for rank 3, which spends 3 ms more than they do in computing" in joined
    assert "More with --details:" in out


def test_details_show_every_rank_and_kernel(ranks, capsys):
    code, out, _ = ran(capsys, "diagnose", "--details", ranks)
    assert code == 0
    assert re.search("^3 [◀<]", out, re.MULTILINE)
    assert "communication" in out
    assert "More with --details" not in out
    assert "(--details)" not in out


def test_json_has_the_same_verdict(ranks, capfd):
    code, out, _ = ran(capfd, "diagnose", "--json", ranks)
    answer = json.loads(out)
    assert code == 0
    assert (answer["trace"], answer["verdict"], answer["straggler"]) == (str(ranks), "compute", 3)
    assert sum(share["ms"] for share in answer["shares"]) == pytest.approx(answer["step_ms"])
    assert {"cause", "title", "how", "at_most_ms"} == set(answer["bounds"][0])


def test_trace_report_writes_html_figure_and_share_page(ranks, capsys):
    page, figure, shared = (
        ranks.parent / "trace.html",
        ranks.parent / "trace.svg",
        ranks.parent / "shared.html",
    )
    code, _, _ = ran(
        capsys, "diagnose", "--html", page, "--figure", figure, "--share", shared, ranks
    )
    assert code == 0
    assert "could save" in page.read_text().lower()
    assert figure.read_text().startswith("<?xml")
    assert str(ranks) not in shared.read_text()
    assert "rank0.json" not in shared.read_text()


def test_nsight_report_is_read_without_a_verb(tmp_path, capsys):
    file = made.write_nsight(tmp_path / "report.sqlite", [made.SYNCHRONISING])
    code, out, _ = ran(capsys, file)
    assert code == 0
    assert "recorded by Nsight Systems" in " ".join(out.split())


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_trace_without_a_verb_runs_diagnose(name, tmp_path):
    file = str(made.write(tmp_path / name, made.trace_of(made.events_of(made.COMPUTING, 2))))
    assert meant([file, "--details"], tuple(SUMMARIES)) == ["diagnose", "--details", file]


@pytest.mark.parametrize("name", ["t.json", ""])
def test_options_may_follow_the_trace_path(name, tmp_path):
    made.write(tmp_path / "t.json", made.trace_of(made.events_of(made.COMPUTING, 2)))
    place = str(tmp_path / name)
    assert place_last(["diagnose", place, "--details"]) == ["diagnose", "--details", place]
    for as_it_is in (
        ["diagnose", place],
        ["diagnose", "--", place, "--details"],
        ["diagnose", "python", "--details"],
        ["diagnose"],
    ):
        assert place_last(as_it_is) == as_it_is


def test_python_diagnose_returns_a_record(ranks):
    found = trainpace.diagnose(ranks)
    assert isinstance(found, ProfiledTraining)
    assert len(found.ranks) == 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["TRACE", "another"], "takes no further arguments"),
        (["watch", "--from", "TRACE"], "trainpace diagnose"),
        (["look", "TRACE"], "trainpace diagnose"),
        (["diagnose", "CUT"], "not a complete trace"),
        (["REPORT"], "nsys export --type sqlite"),
    ],
)
def test_trace_errors_exit_2_with_a_message(words, says, tmp_path, capsys):
    whole = made.write(tmp_path / "t.json", made.trace_of(made.events_of(made.COMPUTING)))
    cut, report = tmp_path / "cut.json", tmp_path / "r.nsys-rep"
    cut.write_bytes(whole.read_bytes()[:5000])
    report.write_bytes(b"\x00")
    files = {"TRACE": whole, "CUT": cut, "REPORT": report}
    words = ["diagnose", *words] if words[-1] == "another" else words
    code, _, err = ran(capsys, *(files.get(word, word) for word in words))
    assert code == 2
    assert says in " ".join(err.split())
    assert "Traceback" not in err

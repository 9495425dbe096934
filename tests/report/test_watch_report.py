import itertools
import json
import re
from xml.etree import ElementTree

import pytest

from diagnose import recordings
from made_logs import simple_run, write_process, write_worker
from trainpace.core.records import to_jsonable
from trainpace.report import page, show
from trainpace.report.watch import (
    LOOK,
    cells,
    findings,
    recording_sections,
    timeline_sections,
    timeline_svg,
    trained_on,
)
from trainpace.verbs.traced import caveats
from trainpace.watch import PARTS, timeline_of

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def waiting(tmp_path):
    """Ten steps of 10 ms with 4 ms of waiting for the only worker, which is always busy."""
    simple_run(tmp_path)
    write_worker(tmp_path, 0, [(t, t + 10) for t in range(0, 200, 10)])
    return timeline_of(tmp_path, range(5, 15))


def printed(timeline, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    show(timeline_sections(timeline))
    return capsys.readouterr().out.splitlines()


def test_every_part_has_unique_letter_and_color():
    assert {*PARTS, "fetch"} == set(LOOK)
    letters, colours, words = zip(*LOOK.values(), strict=True)
    assert len(set(letters)) == len(set(colours)) == len(set(words)) == len(LOOK)


def test_cells_show_their_largest_part(waiting):
    training, worker = waiting.lanes
    assert "".join(letter for letter, _ in cells(training, 100.0, 100)) == "....-FFFBB" * 10
    assert "".join(letter for letter, _ in cells(training, 100.0, 10)) == "." * 10
    assert "".join(letter for letter, _ in cells(worker, 100.0, 20)) == "##==" * 5


def test_idle_time_cells_are_blank(tmp_path):
    simple_run(tmp_path)
    write_worker(tmp_path, 0, [(0, 2), (53, 59), (190, 199)])
    worker = timeline_of(tmp_path, range(5, 7)).lanes[1]
    assert "".join(letter for letter, _ in cells(worker, 20.0, 20)) == "   ######           "


@pytest.mark.parametrize("width", [80, 140])
def test_timeline_in_log_uses_letters_within_width(waiting, capsys, monkeypatch, width):
    lines = printed(waiting, capsys, monkeypatch, width)
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)
    rows = {line.split(" ")[0]: line for line in lines}
    assert rows["training"].count(".") == pytest.approx(0.4 * (width - 11), abs=11)
    assert len(rows["worker"].rstrip()) == width - 2
    assert lines[0] == "timeline of steps 5 to 14: 100 ms, 0.05 s after the first began"
    assert "|5" in lines[1]
    assert "|14" in lines[1]
    assert any(line.strip().startswith("0 ") and line.endswith(" ms") for line in lines)
    assert any("waiting for data" in line and "F forward" in line for line in lines)
    assert (
        "Training waits for data 40% of the time (4 ms per step); its worker process prepares batches 100% of"
        in " ".join(" ".join(lines).split())
    )


def test_narrow_steps_have_no_numbers(tmp_path, capsys, monkeypatch):
    simple_run(tmp_path, steps=120, first=1000)
    lines = printed(timeline_of(tmp_path, range(1000, 1100)), capsys, monkeypatch, 80)
    assert set(lines[1].strip()) == {"|"} | set(lines[1].strip().split("|")[-1])


def test_loading_in_main_process_is_not_called_waiting(tmp_path):
    simple_run(tmp_path)
    timeline = timeline_of(tmp_path)
    assert findings(timeline) == [
        "Training spends 40% of the time (4 ms per step) loading data in the main process, without workers."
    ]
    assert "waiting for data" not in page("t", timeline_sections(timeline), {})


def test_waiting_for_loader_start_is_reported(tmp_path):
    write_process(
        tmp_path,
        [[("loader_start", "first batch", 0, 6, 0), ("data", "next batch", 6, 8, 0)]],
        [0, 10],
    )
    write_worker(tmp_path, 0, [(1, 6)])
    assert findings(timeline_of(tmp_path)) == [
        "Training waits for data 20% of the time (2 ms per step) and for the loader's start 60%; its worker process prepares batches 50%"
        " of the time."
    ]


def test_svg_numbers_steps_that_have_room(tmp_path):
    bounds = [0, 100, 101, 102, 200]
    write_process(
        tmp_path, [[("forward", "Net", b, b + 1, 0)] for b in bounds[:4]], bounds, first=50
    )
    svg = timeline_svg(timeline_of(tmp_path, range(50, 54)))
    assert re.findall(r'<text class="small" [^>]*>(step \d+|5\d)</text>', svg) == ["step 50", "53"]


def test_each_rank_is_named_in_timeline(tmp_path):
    for rank in (0, 1):
        simple_run(tmp_path, rank=rank, pid=100 + rank)
    timeline = timeline_of(tmp_path)
    assert [line.split(" spends")[0] for line in findings(timeline)[:2]] == ["Rank 0", "Rank 1"]
    assert "rank 1 training" in timeline_svg(timeline)


def test_timeline_svg_is_standalone_and_described(waiting):
    root = ElementTree.fromstring(timeline_svg(waiting))
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    titles = {e.get("id"): e.text for e in root if e.get("id")}
    assert [titles[name] for name in root.get("aria-labelledby").split()] == [
        "Timeline of steps 5 to 14: 100 ms, 0.05 s after the first began",
        "Training waits for data 40% of the time (4 ms per step); its worker process prepares batches 100% of the time.",
    ]
    assert not list(root.iter(f"{SVG}script"))


def test_svg_bar_lengths_match_durations(waiting):
    rows = {}
    for rect in ElementTree.fromstring(timeline_svg(waiting)).findall(f"{SVG}rect"):
        tip = rect.find(f"{SVG}title")
        if tip is not None:
            rows.setdefault(rect.get("y"), []).append(
                (tip.text, float(rect.get("x")), float(rect.get("width")))
            )
    training, worker = rows.values()
    whole = sum(width for _, _, width in training)
    assert whole == pytest.approx(sum(width for _, _, width in worker), abs=0.2)
    waits = [width for tip, _, width in training if tip == "waiting for data (next batch): 4 ms"]
    assert len(waits) == 10
    assert sum(waits) / whole == pytest.approx(0.4, abs=0.001)
    for row in (training, worker):
        assert all(a[1] + a[2] <= b[1] + 0.02 for a, b in itertools.pairwise(row))


def test_timeline_page_escapes_names(waiting):
    text = page("A < B", timeline_sections(waiting), {})
    assert "Net<&>" not in text.split('<script type="application/json"')[0]
    assert "Net&lt;&amp;&gt;" in text
    assert "<h1>A &lt; B</h1>" in text


def test_timeline_page_contains_table_and_data(waiting):
    text = page("t", timeline_sections(waiting), to_jsonable(waiting))
    assert re.findall(
        r'<td class="l">0</td><td class="l">10</td><td class="l">(.*?)</td><td>(.*?)</td><td>(.*?)</td>',
        text,
    ) == [
        ("waiting for data", "4", "40%"),
        ("forward", "3", "30%"),
        ("backward", "2", "20%"),
        ("the script&#39;s own code", "1", "10%"),
    ]
    data = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text).group(1)
    )
    assert data["record"] == "Timeline"
    assert len(data["lanes"][0]["bars"]) == 40


def test_timeline_svg_of_many_steps_stays_small(tmp_path):
    spans = [
        [("forward", "Net", 10 * i + j, 10 * i + j + 0.5, 0) for j in range(9)] for i in range(300)
    ]
    write_process(tmp_path, spans, range(0, 3001, 10))
    timeline = timeline_of(tmp_path, range(300))
    assert len(timeline.lanes[0].bars) > 5000
    assert timeline_svg(timeline).count("<rect") < 2000


def test_training_device_comes_from_recording():
    """Includes a device without memory statistics, such as Apple's."""
    on_cpu, on_mps = recordings.rank(forward=5.0), recordings.rank(forward=5.0, accelerator="mps")
    assert (trained_on(on_cpu), trained_on(on_mps)) == ("on the CPU (1 thread)", "on mps")
    assert ["CPU" in " ".join(caveats(recordings.recording(one))) for one in (on_cpu, on_mps)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("reason", ["", "RuntimeError: no item() on meta tensors"])
def test_tracing_failure_reason_is_shown(reason, capsys):
    show(
        recording_sections(
            recordings.recording(recordings.rank(forward=10, no_workload=reason)), "here"
        )
    )
    said = "Trainpace cannot trace this training's model: RuntimeError: no item() on meta tensors. So there is no forecast of other GPUs"
    assert (said in " ".join(capsys.readouterr().out.split())) == bool(reason)

"""The report on held-out forecasts, computed on synthetic runs."""

import json
import math

import numpy as np
import pytest
from accuracy import FOLDS, folds_in_words, read_folds
from accuracy_chart import draw
from accuracy_pairs import order_of_executions
from accuracy_tables import SIZES, Judged, by_card, by_collection, by_software, errors_of

from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.software import parse_software
from trainpace.forecast import Case, MeasuredRun
from trainpace.workload import PLAIN


def judged(
    card,
    measured_ms,
    forecast_ms,
    batch=8,
    spec="timm:resnet50",
    half_width=0.1,
    gpus=1,
    nodes=1,
    software="torch2.4",
    **said,
):
    execution = Execution(micro_batch=batch, nproc_per_node=gpus // nodes, nnodes=nodes, **said)
    cluster = Cluster(device=find_device(card), devices_per_node=gpus // nodes, nodes=nodes)
    case = Case(
        MeasuredRun(index=0, file="made"),
        spec,
        "fp32",
        PLAIN,
        execution,
        cluster,
        measured_ms,
        parse_software(software),
    )
    return Judged(case, forecast_ms, forecast_ms * (1 - half_width), forecast_ms * (1 + half_width))


def cells(table):
    """Return {first cell or cells: other cells} of the lines below the header."""
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    return {tuple(row[:-10]): row[-10:] for row in split}


def test_errors_of_computes_mean_median_and_coverage():
    e = errors_of(
        [judged("T4", 100, 105), judged("T4", 100, 80), judged("T4", 100, 103, half_width=math.nan)]
    )
    assert (e.n, e.median, e.bias) == (3, pytest.approx(5), pytest.approx(3))
    assert e.mean == pytest.approx(28 / 3)
    assert e.inside == pytest.approx(50)  # of the two runs with an interval
    assert e.half_width == pytest.approx(10)


def test_by_card_has_one_row_per_model_kind():
    gpt = "transformers:gpt2.json"
    known = [
        judged("T4", 100, 110),
        judged("H100 SXM", 100, 90, spec=gpt),
        judged("T4", 100, 150, gpus=2),
    ]
    rows = {"device": known, "family": [judged("T4", 100, 104), judged("T4", 100, 102)]}
    table = cells(by_card(rows, SIZES[0]))
    assert list(table) == [
        ("H100 SXM", "language, training"),  # the newest generation first
        ("T4", "images, training"),
        ("*all*", "images, training"),
        ("*all*", "language, training"),
    ]
    assert table["T4", "images, training"] == [
        "1",
        "10.0",
        "10.0",
        "+10.0",
        "100",
        "2",
        "3.0",
        "3.0",
        "+3.0",
        "100",
    ]
    assert table["H100 SXM", "language, training"] == ["1", "10.0", "10.0", "-10.0", "0"] + 5 * [""]
    assert list(cells(by_card(rows, SIZES[1]))) == [
        ("T4", "images, training"),
        ("*all*", "images, training"),
    ]
    assert by_card(rows, SIZES[2]) == []


def test_by_software_counts_software_and_precision():
    rows = [
        judged("A100", 100, 110, software="torch1.9"),
        judged("A100", 100, 110, software="torch1.9", precision="amp_fp16"),
        judged("A100", 100, 120, precision="bf16", compile=True),
        judged("A100", 100, 130, software="keras", precision="tf32"),
    ]
    table = cells(by_software({"device": rows, "family": []}))
    assert {name: row[0] for (name,), row in table.items()} == {
        "torch before 2.0": "2",
        "torch.compile": "1",
        "TensorFlow, Keras": "1",
        "32 bits": "1",
        "16 bits, mixed": "1",
        "16 bits throughout": "1",
        "TF32": "1",
    }


def test_by_collection_lists_single_node_runs_separately():
    rows = [
        judged("A100", 100, 110),
        judged("A100", 100, 120, gpus=4),
        judged("A100", 100, 130, gpus=16, nodes=2),
    ]
    lines = by_collection({"device": rows, "family": []})[2:]
    counted = {(cells := line.split("|"))[1].strip(): cells[3].strip() for line in lines}
    assert counted == {"made": "3", "all, 2 to 16 GPUs in one node": "1"}


def test_pairs_are_ranked_by_steps_and_by_samples():
    # a step at batch 16 takes longer but trains more samples per second; the forecast ranks the throughput wrongly
    rows = [judged("A100", 100, 90, batch=8), judged("A100", 150, 190, batch=16)]
    assert order_of_executions(rows, a_sample=False) == (1, 1)
    assert order_of_executions(rows, a_sample=True) == (1, 0)


@pytest.mark.parametrize(
    "other",
    [
        judged("A100", 104, 80, batch=9),  # nearly equal batch
        judged("A100", 200, 80),  # the same execution
        judged("T4", 200, 80, batch=16),
        judged("A100", 200, 80, batch=16, gpus=2),
        judged("A100", 200, 80, batch=16, spec="timm:vgg16"),
        judged("A100", 200, 80, batch=16, software="torch1.9"),
    ],
)
def test_incomparable_executions_are_not_ranked(other):
    assert order_of_executions([judged("A100", 100, 100), other], a_sample=False).pairs == 0


def test_interrupted_run_reports_missing_folds(tmp_path):
    row = [7, "1", 12.5, [0.5, 0.5], True, 0.1]
    (tmp_path / "family-1.json").write_text(json.dumps([row]))
    (tmp_path / "kernels.pickle").write_bytes(b"")  # an unrelated file
    found = read_folds(tmp_path)
    assert [tuple(row) for row in found["family"]] == [tuple(row)]
    assert found["device"] == []
    words = folds_in_words(found)
    assert "1 of 5 (missing: 0; 2; 3; 4)" in words
    assert all(fold in words for fold in FOLDS["device"])


def test_accuracy_chart_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    rows = [
        judged("H100 SXM", t, 1.1 * t, spec="transformers:gpt2.json", gpus=2) for t in (10, 1000)
    ]
    draw([*rows, *(judged("T4", t, t) for t in (5, 50))], tmp_path / "chart.png", "device")
    picture = imread(tmp_path / "chart.png")
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 10

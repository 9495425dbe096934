"""Charts saved as files for papers."""

import sys

import pytest

from answers import asked, forecasts, jumps, measured
from nouns import workload
from trainpace.core.errors import TrainpaceError
from trainpace.measure.sweep import analyse
from trainpace.report.charts import chart_figure, check_suffix, save_figures
from trainpace.report.forecast import forecast_pictures
from trainpace.report.steps import measured_sweep

BEGINS = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


@pytest.fixture(scope="module")
def pictures():
    one = asked(workload(), batches=range(1, 41))
    return [
        picture
        for picture in forecast_pictures(forecasts([one], jumps(one)))
        if picture is not None
    ]


@pytest.mark.parametrize("suffix", BEGINS)
def test_every_chart_is_saved_as_a_file(pictures, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    files = save_figures(pictures, str(tmp_path / f"f{suffix}"))
    assert len(files) == len(set(files)) == len(pictures) > 2
    assert files[0].name == f"f{suffix}"
    assert files[1].name == f"f-where-a-step-s-time-goes{suffix}"
    for file in files:
        assert file.read_bytes().startswith(BEGINS[suffix])
        assert len(file.read_bytes()) > 5000
    assert {f.name for f in tmp_path.iterdir()} == {f.name for f in files}


def test_saved_figures_are_deterministic(pictures, tmp_path):
    pytest.importorskip("matplotlib")
    (a,), (b,) = (save_figures(pictures[:1], str(tmp_path / f"{name}.svg")) for name in "ab")
    assert a.read_bytes() == b.read_bytes()


def test_figure_labels_jump_and_best_throughput():
    pytest.importorskip("matplotlib")
    outcomes = measured()
    (axes,) = chart_figure(measured_sweep(analyse(outcomes), {})).axes
    texts = [text.get_text() for text in axes.texts]
    assert any(text.startswith("16 to 17: +") for text in texts)
    assert "best throughput" in texts
    assert axes.get_ylabel() == "step time (ms)"


def test_unwritable_figures_give_errors(tmp_path, pictures, monkeypatch):
    with pytest.raises(TrainpaceError, match=r"f\.txt"):
        check_suffix("f.txt")
    with pytest.raises(TrainpaceError, match="othing to draw"):
        save_figures([], str(tmp_path / "f.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(TrainpaceError, match=r"matplotlib.*pip install 'trainpace\[figures\]'"):
        save_figures(pictures[:1], str(tmp_path / "f.png"))
    assert list(tmp_path.iterdir()) == []

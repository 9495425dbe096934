"""Pure functions of examples/calculator.py and its published sweeps. tests/test_docs.py runs the whole example."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from trainpace.core.outcome import Jump
from trainpace.forecast import case_of, read_runs

EXAMPLES = Path(__file__).parents[1] / "examples"
spec = spec_from_file_location("calculator", EXAMPLES / "calculator.py")
calculator = module_from_spec(spec)
spec.loader.exec_module(calculator)


def test_sweep_shows_only_measured_sizes():
    assert calculator.shown_sizes(tuple(range(1, 71))) == (1, 16, 32, 64)
    assert calculator.shown_sizes((2, 3, 4)) == (2, 4)
    assert calculator.shown_sizes((8,)) == (8,)


def test_sweep_cells_show_measured_size_and_jumps():
    sizes = tuple(range(1, 71))
    jump = Jump(
        before=16,
        batch=17,
        before_ms=200.0,
        after_ms=240.0,
        excess_ms=30.0,
        causes=(),
        next_good=32,
    )
    last = Jump(before=64, batch=65, before_ms=800.0, after_ms=900.0, excess_ms=80.0, causes=())
    step_ms = {2: 50.0, 16: 200.0, 33: 410.0, 64: 800.0}
    cells = calculator.sweep_cells(sizes, step_ms, "linear", (jump, last), 64)
    assert cells == [
        "50 (2)",
        "200",
        "410 (33)",
        "800",
        "linear",
        "16, 64",
        "15, 10",
        "32, none",
        "64",
    ]
    assert calculator.sweep_cells(sizes, {}, "-", (), None) == ["-"] * 9


@pytest.mark.parametrize("with_jumps", [True, False])
def test_sweep_cells_match_columns(with_jumps):
    jump = Jump(before=1, batch=2, before_ms=1.0, after_ms=2.0, excess_ms=1.0, causes=())
    for sizes in ((1, 2), tuple(range(1, 71))):
        cells = calculator.sweep_cells(sizes, {1: 1.0, 2: 2.0}, "linear", (jump,) * with_jumps, 2)
        assert len(calculator.sweep_columns(sizes)) == 2 + len(cells)  # the model and where it ran


def test_published_sweeps_cover_same_runs_on_both_gpus():
    first, second = (
        [case_of(run, EXAMPLES) for run in read_runs(EXAMPLES / f"profet_{card}.csv")]
        for card in ("t4", "k80")
    )
    assert {case.cluster.device.name for case in first} == {"T4"}
    assert {case.cluster.device.name for case in second} == {"K80"}
    assert [(case.spec, case.execution) for case in first] == [
        (case.spec, case.execution) for case in second
    ]
    assert all(
        slow.measured_ms > fast.measured_ms > 0 for fast, slow in zip(first, second, strict=True)
    )
    assert all(
        "profet@" in line for line in (EXAMPLES / "profet_t4.csv").read_text().splitlines()[1:]
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--sizes", "0"], "'0' is not a batch size"),
        (["--models", "vgg99"], "unknown model"),
        (["--second", "no.csv"], "no.csv"),
    ],
)
def test_invalid_arguments_fail_before_measuring(wrong, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["calculator.py", "--journal", str(tmp_path / "runs.db"), *wrong]
    )
    monkeypatch.setattr(calculator, "measured_here", lambda options: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as left:
        calculator.main()
    assert left.value.code == 2
    assert said in capsys.readouterr().err

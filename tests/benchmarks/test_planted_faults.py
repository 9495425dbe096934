"""Faults planted in the accelerator code count as caught only by tests that pass without the fault."""

import json

import accelerator_faults
import pytest


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Create a package with one function, one plantable fault and one test."""
    (tmp_path / "src" / "trainpace").mkdir(parents=True)
    (tmp_path / "src" / "trainpace" / "__init__.py").write_text("")
    (tmp_path / "src" / "trainpace" / "clock.py").write_text("def ms(s):\n    return 1000 * s\n")
    fault = {"what": "wrong unit", "file": "clock.py", "before": "1000 * s", "after": "s"}
    (tmp_path / "faults.toml").write_text(
        "[[fault]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in fault.items())
    )
    monkeypatch.setattr(accelerator_faults, "ROOT", tmp_path)
    monkeypatch.setattr(accelerator_faults, "FAULTS", tmp_path / "faults.toml")
    monkeypatch.setattr(accelerator_faults, "RESULT", tmp_path / "result.md")
    monkeypatch.setattr(accelerator_faults, "TESTS", ("tests/measure",))
    monkeypatch.setattr("sys.argv", ["accelerator_faults.py"])

    def tested(*lines):
        folder = tmp_path / "tests" / "measure"
        folder.mkdir(parents=True)
        text = [
            "from trainpace.clock import ms",
            "def test_unit():",
            *(f"    {line}" for line in lines),
        ]
        (folder / "test_clock.py").write_text("\n".join(text))
        return tmp_path / "result.md"

    return tested


def test_planted_fault_is_caught_by_passing_test(project, capsys):
    result = project("assert ms(2) == 2000")
    accelerator_faults.main()
    assert "| wrong unit | `clock.py` | `test_unit` |" in result.read_text()
    assert "catch 1 of 1" in capsys.readouterr().out


def test_test_failing_without_fault_stops_benchmark(project):
    result = project("assert ms(2) == 1")
    with pytest.raises(SystemExit, match="test_unit fails without any fault"):
        accelerator_faults.main()
    assert not result.exists()

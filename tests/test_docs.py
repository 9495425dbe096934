"""Every command in README and docs runs, and every path and command that they name exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainpace.cli.program import VERBS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import generate  # noqa: E402
import pages  # noqa: E402

PAGES = [
    ROOT / "README.md",
    ROOT / "docs/CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "results"),
]
STEPS = {page: pages.steps(page.read_text()) for page in PAGES}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


MAKEFILE = (ROOT / "Makefile").read_text()


def test_docs_contain_at_least_60_commands():
    assert sum(step.kind == "command" for steps in STEPS.values() for step in steps) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, steps in STEPS.items() if steps], ids=named)
def test_page_commands_print_shown_output(page, tmp_path):
    found = pages.differences(page.read_text(), tmp_path)
    assert not found, "\n\n".join(
        f"$ {difference.step.text}\n{difference.problem}" for difference in found
    )


def test_shown_output_is_compared_with_real_output():
    assert pages.agrees("a step of 12.5 ms\n 1 ◀  x\n 2  x\n", " 1  x\n 2 ◀  x\na step of 1.2 s\n")
    assert pages.agrees("one line that\nbreaks\n", "one line\nthat breaks\n")
    assert pages.agrees("begins 1\n ────\n...\nends 2\n", "begins 3\nbetween\nends 4\n")
    assert not pages.agrees("a step of 12.5 ms\n", "a batch of 12.5 ms\n")
    assert not pages.agrees("begins 1\nends 2\n", "begins 3\nbetween\nends 4\n")
    assert not pages.agrees("begins 1\n...\nnever\n", "begins 3\nbetween\nends 4\n")
    assert not pages.agrees("fits on A100\n", "fits on H100\n")


def test_refresh_keeps_the_shown_selection():
    shown = "title of 1\n\nrow a 1\n...\nlast 2\n"
    real = "title of 3\n\nheading\n\nrow a 4\nrow b 5\n\nlast words 6\nNext: go\n"
    assert pages._same_choice(shown, real) == "title of 3\n...\nrow a 4\n...\nlast words 6\n...\n"
    assert pages._same_choice("one\n", real) == real
    assert pages._same_choice("a 1\n\nb 2\n...\n", "a 3\n\nb 4\n\nc\n") == "a 3\n\nb 4\n...\n"


def test_wrong_page_output_is_reported(tmp_path):
    page = "```console\n$ echo one\none\n$ echo two\nthree\n$ false\n$ echo after\n```\n"
    found = pages.differences(page, tmp_path)
    assert [difference.step.text for difference in found] == ["echo two", "false"]
    assert "-three" in found[0].problem
    assert "exit code 1" in found[1].problem


def test_page_commands_can_use_files_of_page(tmp_path):
    page = (
        "```python\n# hello.py\nprint('hello')\n```\n\n```console\n$ python hello.py\nhello\n```\n"
    )
    assert pages.differences(page, tmp_path) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_generated_parts_are_up_to_date(page):
    text = page.read_text()
    assert text == generate.generated(text), f"{named(page)} is stale: python -m tools generate"


def test_every_command_has_a_page_with_example():
    assert {path.stem for path in (ROOT / "docs/verbs").glob("*.md")} - {"index"} == set(VERBS)
    for verb in VERBS:
        commands = [step for step in STEPS[generate.page_of_verb(verb)] if step.kind == "command"]
        if verb != "serve":  # This command runs until it is stopped.
            assert any(
                f"trainpace {verb} " in f"{step.text} " and step.shown for step in commands
            ), verb
        assert f"<!-- generated: verb {verb} -->" in generate.page_of_verb(verb).read_text()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_named_make_targets_and_files_exist(page):
    text = page.read_text()
    for target in re.findall(r"(?:`|^)make ([a-z][a-z-]+)\b", text, re.MULTILINE):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    for path in re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+\w)`", text):
        assert (ROOT / path).exists(), path


def test_every_command_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert [verb for verb in VERBS if f"trainpace {verb}" not in readme] == []


def test_version_matches_pyproject():
    import tomllib

    import trainpace

    assert (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        == trainpace.__version__
    )


@pytest.mark.slow
def test_first_look_example_runs(tmp_path):
    """A shortened version of `make run`."""
    command = [
        sys.executable,
        "examples/first_look.py",
        "--batches",
        "4",
        "--seconds",
        "0.5",
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  this CPU  ") == 2
    page = (tmp_path / "first_look.html").read_text()
    assert page.index('class="verdict"') < page.index("<table>")
    assert not re.findall(r"(?:src|href)=|https?://", page)  # opens offline
    assert (tmp_path / "cnn_batch_4.json").exists()


@pytest.mark.long
def test_calculator_example_runs(tmp_path):
    """A shortened version of `python examples/calculator.py`."""
    of_two = ["--models", "resnet18", "mobilenet_v1", "--sizes", "1:3", "--seconds", "0.1s"]
    command = [
        sys.executable,
        "examples/calculator.py",
        *of_two,
        "--journal",
        str(tmp_path / "kept" / "runs.db"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^(?=\d\. )", done.stdout, flags=re.MULTILINE)[1:]
    assert [part[0] for part in parts] == list("12345")
    assert parts[0].count("Batch 1 failed") == 2  # a batch normalisation of 1 x 1 maps
    assert [parts[1].count(f"\n{model} ") for model in ("resnet18", "mobilenet_v1")] == [4, 4]
    # Each model has two probes at each of two sizes, and one at the size that fails.
    assert "16 runs, those of 2 sweeps measured here" in parts[2]
    predicted = " ".join(parts[3].split())  # however its lines are broken
    assert re.search(r"by the journal, whose interval holds \d of the 6 measured steps", predicted)
    assert "measured on other cards: T4" in predicted
    assert "Cheapest: " in parts[4]
    pages = {path.name for path in (tmp_path / "kept").glob("*.html")}
    assert pages == {
        f"{model}_{kind}.html"
        for model in ("resnet18", "mobilenet_v1")
        for kind in ("measured", "forecast")
    }

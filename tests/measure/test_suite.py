import subprocess
import sys

import pytest

from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.measure.suites import BATCHES, CLASSIC, SuiteItem, suite
from trainpace.workload import specs


def test_classic_suite_holds_all_torch_zoo_models():
    assert set(CLASSIC) == {name for name in specs.MODELS if not name.endswith("_keras")}
    assert [item.spec for item in suite("classic")] == list(CLASSIC)


def test_small_suite_is_subset_of_classic():
    assert {item.spec for item in suite("small")} < set(CLASSIC)


def test_suite_from_toml_file(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(
        '[[task]]\nmodel = "resnet18"\nbatch = [8, 2, 8]\nprecision = "amp_bf16"\noptimizer = "adamw"\n'
        '[[task]]\nmodel = "transformers:gpt2.json"\nsequence_length = 40\n'
        '[[task]]\nmodel = "mine.py:task"\nbatch = 4\n'
    )
    assert suite(str(file)) == (
        SuiteItem(spec="resnet18", batches=(2, 8), precision="amp_bf16", optimizer="adamw"),
        SuiteItem(spec="transformers:gpt2.json", batches=BATCHES, sequence_length=40),
        SuiteItem(spec="mine.py:task", batches=(4,)),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "task = 3",
        "[[tasks]]",
        "[[task]\n",
        "[[task]]\nbatch = 3",
        '[[task]]\nmodel = ""',
        '[[task]]\nmodel = "a"\n[[task]]\nmodel = "b"\nbatches = 3',
        '[[task]]\nmodel = "a"\nbatch = "8"',
        '[[task]]\nmodel = "a"\nbatch = [0]',
        '[[task]]\nmodel = "a"\nbatch = [true]',
        '[[task]]\nmodel = "a"\nbatch = []',
        '[[task]]\nmodel = "a"\nprecision = "fp23"',
        '[[task]]\nmodel = "a"\noptimizer = "adamw2"',
        '[[task]]\nmodel = "a"\nsequence_length = 0',
    ],
)
def test_invalid_suite_file_gives_one_line_error(tmp_path, text):
    file = tmp_path / "my.toml"
    file.write_text(text)
    with pytest.raises(TrainpaceError) as caught:
        suite(str(file))
    assert "\n" not in caught.value.message


def test_unknown_suite_name_is_an_error():
    with pytest.raises(UnknownName):
        suite("clasic")


def test_missing_or_binary_suite_file_is_an_error(tmp_path):
    with pytest.raises(UnreadableInput, match="no such file"):
        suite(str(tmp_path / "none.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnreadableInput, match="not a text file in UTF-8"):
        suite(str(tmp_path / "binary.toml"))


def test_suites_do_not_import_torch():
    code = "import sys; from trainpace.measure.suites import suite; suite('small'); print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "False"
    )

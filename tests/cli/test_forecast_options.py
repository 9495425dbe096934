"""Tests of the options of `trainpace forecast` on a saved workload."""

import json
import subprocess
import sys

import pytest
from msgspec.structs import replace

from nouns import TOKENS, stacked, workload
from trainpace.core.records import save
from trainpace.verbs import forecast as forecast_verb
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.request import Silent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("forecast") / "model.json"
    save(replace(workload(), sample="3 x 224 x 224 image"), path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "config.json"
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 500,
    }
    names = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    path.write_text(
        json.dumps({**names, **sizes, "max_position_embeddings": 4096, "rope_theta": 1e4})
    )
    return f"transformers:{path}"


def forecast(*arguments):
    command = [sys.executable, "-m", "trainpace", "forecast", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mode", "inference"), "traced with --mode train"),
        (("--optimizer", "adamw"), "traced with --optimizer sgd_momentum"),
        (("--image-size", "128"), "traced with --image-size 224"),
        (("--sequence-length", "77"), "traced with --sequence-length none"),
        (("--save-workload", "again.json"), "already a saved workload"),
        (("--shard-size", "2"), "--zero"),
        (("--keep-gathered",), "--zero 3"),
        (("--async-tp",), "needs --tp"),
        (("--sequence-parallel",), "needs --tp"),
        (("--partition-activations", "--tp", "2"), "--checkpointing"),
        (("--price", "3"), "needs --epochs"),
        (("--startup", "1h"), "--startup needs --epochs"),
        (("--mtbf", "9h"), "--mtbf needs"),
        (("--nodes", "2"), "1 Gbit/s Ethernet is 0.125"),
        (("--num-gpus", "0"), "'--num-gpus'"),
        (("--nodes", "2M"), "'--nodes'"),
        (("--num-gpus", "2000", "--nodes", "1000", "--network", "1"), "1,000,000 GPUs"),
        (("--network", "inf"), "'--network'"),
        (("--network", "2e6"), "up to 1,000,000"),
        (("--samples", "9", "--epochs", "1e308"), "'--epochs'"),
        (("--network-latency", "1ms"), "needs --nodes"),
        (("--workers", "3"), "needs --loader-rate"),
    ],
)
def test_option_conflicting_with_a_saved_workload_is_rejected(model, arguments, said):
    done = forecast(model, "--gpu", "T4", *arguments)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_options_matching_the_trace_are_accepted(model):
    said = ("--mode", "train", "--optimizer", "sgd_momentum", "--image-size", "224")
    plain, again = (forecast(model, "--gpu", "T4", "--json", *more) for more in ((), said))
    assert again.returncode == 0, again.stderr
    assert json.loads(plain.stdout) == json.loads(again.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--tp", "2", "--num-gpus", "2"), "repeated blocks"), (("--precision", "fp8"), "no FP8")],
)
def test_impossible_forecast_states_the_reason_on_stderr(model, arguments, said):
    done = forecast(model, "--gpu", "T4", "--json", *arguments)
    assert done.returncode == 1
    assert said in done.stderr


def test_python_file_without_a_function_is_rejected(tmp_path):
    (tmp_path / "m.py").write_text("")
    done = forecast(tmp_path / "m.py", "--gpu", "T4")
    assert done.returncode == 2
    assert "m.py:FUNCTION" in done.stderr


def test_startup_evaluation_and_failures_add_to_training_time(model):
    def hours(*more):
        done = forecast(model, "--gpu", "T4", "--samples", "100k", "--epochs", "3", "--json", *more)
        return json.loads(done.stdout)["rows"][0]["training_time_s"] / 3600

    assert hours("--startup", "60s") == hours()
    assert hours("--startup", "2h") == pytest.approx(hours() + 2 - 1 / 60, rel=1e-3)
    assert hours("--evaluation-samples", "100k") > hours()
    assert hours("--mtbf", "10h") > hours()


def test_host_copy_latency_and_loader_rate_add_time(model, tmp_path):
    """The expected times follow from the size of a batch.

    Copying 32 images of 600,000 bytes at 12 GB/s takes 1.6 ms. Two copies take 6 us each to start.
    Two workers load 2 samples per second.
    """
    images = tmp_path / "images.json"
    save(replace(workload(), sample_bytes=600_000.0), images)

    def row(*more):
        done = forecast(images, "--gpu", "T4", "--batch", "32", "--json", *more)
        return json.loads(done.stdout)["rows"][0]

    copied = row("--host-copy", "12", "--accumulate", "2")
    assert row()["breakdown_ms"]["host_to_device_ms"] == 0
    assert copied["breakdown_ms"]["host_to_device_ms"] == pytest.approx(
        2 * (32 * 600_000 / 12e9 * 1e3 + 0.012)
    )
    nodes = ("--nodes", "4", "--network", "1")
    assert row(*nodes, "--network-latency", "1ms")["step_time_ms"] > row(*nodes)["step_time_ms"]
    job = (
        "--samples",
        "100k",
        "--epochs",
        "1",
        "--startup",
        "0s",
        "--loader-rate",
        "1",
        "--workers",
        "2",
    )
    assert row(*job)["training_time_s"] == pytest.approx(1e5 / 2, rel=1e-2)
    assert row(*job, *nodes)["training_time_s"] == pytest.approx(1e5 / 8, rel=1e-2)


def test_each_sequence_length_has_its_own_row(llama, tmp_path):
    asked = (
        llama,
        "--gpu",
        "H100",
        "--batch",
        "1,2",
        "--precision",
        "bf16",
        "--sequence-length",
        "64:256:32",
    )
    rows = json.loads(forecast(*asked, "--json").stdout)["rows"]
    assert [(row["sequence_length"], row["batch"]) for row in rows] == [
        (n, b) for n in range(64, 257, 32) for b in (1, 2)
    ]
    row = rows[-1]
    assert row["tokens_per_second"] == pytest.approx(256 * row["samples_per_second"])
    page = tmp_path / "page.html"
    shown = " ".join(
        forecast(*asked, "--html", page).stdout.split()
    )  # the model's path may break a line
    assert "7 lengths from 64 to 256 tokens" in shown
    assert "The longest sequence that fits has 256 tokens: H100 SXM at batch 2" in shown
    assert "tokens/s" in shown
    assert "Throughput against the sequence length" in page.read_text()


def test_saved_workload_rejects_other_sequence_lengths(model):
    done = forecast(model, "--gpu", "T4", "--sequence-length", "64,128")
    assert done.returncode == 2
    assert "sequence length" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("32\n32\n64\n128\n", marks=pytest.mark.slow),
        "tokens,count\n32,2\n64,1\n128,1\n",
    ],
)
def test_packed_rows_are_compared_with_padded_batches(llama, tmp_path, text):
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(text)
    asked = (
        "--gpu",
        "H100",
        "--batch",
        "2",
        "--precision",
        "bf16",
        "--sequence-length",
        "256",
        "--packed",
        "--lengths",
        lengths,
    )
    answer = json.loads(forecast(llama, *asked, "--json").stdout)
    (padded,) = answer["padded"]
    assert padded["documents"] == 8  # one row holds all four
    assert padded["length"] == 128
    assert (padded["packed_document_tokens"], padded["padded_document_tokens"]) == (512, 512)
    assert padded["padding"] == pytest.approx(0.5)
    assert padded["packed_padding"] == 0.0
    assert answer["rows"][0]["software"].endswith("FlashAttention 2")
    assert "lengths.csv" in answer["rows"][0]["notes"][0]
    shown = forecast(llama, *asked).stdout
    assert (
        "of the time that a document's token takes in padded batches on H100 SXM at batch 2"
        in " ".join(shown.split())
    )
    assert "Padding is 50%" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--packed", "--mean-length", "60"), "--packed needs --sequence-length"),
        (("--packed", "--sequence-length", "256"), "--lengths or --mean-length"),
        (("--mean-length", "60"), "--mean-length needs --packed"),
        (
            ("--packed", "--sequence-length", "256", "--mean-length", "60", "--attention", "eager"),
            "no kernel for packed",
        ),
        (
            ("--packed", "--sequence-length", "256", "--mean-length", "60", "--precision", "fp32"),
            "16-bit",
        ),
        (
            ("--packed", "--sequence-length", "256", "--lengths", "{wrong}"),
            "row 2: 'many' is not a count of tokens",
        ),
        (
            ("--packed", "--sequence-length", "256", "--lengths", "{named}"),
            "no column of token counts: a, b",
        ),
        (
            ("--packed", "--sequence-length", "256", "--lengths", "{short}"),
            "row 3: a value is missing",
        ),
    ],
)
def test_incomplete_or_invalid_packing_options_are_rejected(llama, tmp_path, arguments, said):
    (tmp_path / "wrong").write_text("12\nmany\n")
    (tmp_path / "named").write_text("a,b\n1,2\n")
    (tmp_path / "short").write_text("length,count\n100,5\n200\n")
    files = {name: tmp_path / name for name in ("wrong", "named", "short")}
    done = forecast(
        llama, "--gpu", "H100", "--precision", "bf16", *(text.format(**files) for text in arguments)
    )
    assert done.returncode == 2, done.stdout
    assert said in done.stderr


def packable(tmp_path):
    """Save a transformer with a fixed sequence length and return its forecast options."""
    path = tmp_path / "w.json"
    save(replace(stacked(), sequence_length=TOKENS), path)
    return path, (
        "--gpu",
        "H100",
        "--precision",
        "bf16",
        "--sequence-length",
        TOKENS,
        "--packed",
        "--mean-length",
        "60",
    )


def test_fixed_length_model_has_no_padded_comparison(tmp_path):
    path, asked = packable(tmp_path)
    answer = json.loads(forecast(path, *asked, "--batch", "1,2", "--json").stdout)
    assert [row["batch"] for row in answer["rows"]] == [1, 2]
    assert answer["padded"] == []
    (note,) = answer["journal"]
    assert note.endswith(f"w.json has samples of one length, {TOKENS} tokens.")
    assert "padded batches" in note


def test_packed_cannot_be_combined_with_transfer_from(tmp_path):
    path, asked = packable(tmp_path)
    measured = tmp_path / "measured.json"
    measured.write_text("[]")
    done = forecast(path, *asked, "--transfer-from", measured)
    assert done.returncode == 2
    assert "--packed cannot be combined" in done.stderr


@pytest.mark.parametrize(
    ("option", "wrong", "nearest"),
    [
        ("--precision", "bf61", "bf16"),
        ("--attention", "flsh2", "flash2"),
        ("--optimizer", "adamww", "adamw"),
        ("--cross-entropy", "chunkd", "chunked"),
        ("--checkpointing", "ful", "full"),
    ],
)
def test_mistyped_option_value_gets_the_nearest_known_name(option, wrong, nearest):
    done = forecast("resnet50", "--gpu", "T4", option, wrong)
    assert done.returncode == 2
    assert f"Nearest: {nearest}" in done.stderr
    assert wrong in done.stderr
    assert done.stderr.count(",") > 1  # lists the known names


def test_forecast_without_batch_takes_the_largest_that_surely_fits():
    def rows(*more):
        request = ForecastRequest(model="vgg16", gpu=("GTX 1060 3GB", "A100"), **dict(more))
        return forecast_verb.run(request, Silent())

    answer = rows()
    small, large = answer
    assert 1 <= small.execution.micro_batch < large.execution.micro_batch == 32
    assert small.fits
    assert small.fit_probability >= 0.9
    assert any("--batch" in note for note in answer.notes)
    assert [f.execution.micro_batch for f in rows(("batch", (16,)))] == [16, 16]

"""Tests of the verbs as Python functions."""

import inspect
import json
import subprocess
import sys
from collections import UserDict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace
from torch import nn

import trainpace
from nouns import measurement
from trainpace import api
from trainpace.cli.program import VERBS, _cli
from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.execution import Execution
from trainpace.core.outcome import Jump
from trainpace.core.records import to_json
from trainpace.measure import analyse
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.measure import MeasuredSweep
from trainpace.verbs.request import fields_of, request_of

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import api_stub

SLURM_ARRAYS = {"launcher", "at_once", "cpus", "limit", "partition", "account", "sbatch", "out"}

# options for display and output files, and options that only the command has
SHOWN = {
    "forecast": {"json", "save_workload", "html", "figure"},
    "match": {"json", "save_workload", "top", "html", "figure"},
    "plan": {"json", "output", "write", "new", "yes", "html", "figure"},
    "measure": {"json", "output", "html", "figure", "suite", *SLURM_ARRAYS},
    "schedule": {"json"},
    "watch": {
        "json",
        "from",
        "steps",
        "timeline",
        "html",
        "svg",
        "trace",
        "baseline",
        "tolerance",
        "journal",
    },
    "diagnose": {"json", "html", "figure"},
    "doctor": {"html", "json", "trace"},
    "calibrate": {"json", "hosts", "network", "detect_only"},
    "verify": {"json"},
    "validate": {"json"},
    "run": {"json", "dry_run", "markdown", "html", "figure"},
    "offers": {"json"},
}


def command_of(verb):
    return _cli.get_command(click.Context(_cli), verb)


def request_type(verb):
    homes = ("checks", "data", "machine", "match", verb)
    name = f"{verb.title()}Request"
    return next(
        getattr(module, name)
        for home in homes
        if find_spec(f"trainpace.verbs.{home}")
        and hasattr(module := import_module(f"trainpace.verbs.{home}"), name)
    )


@pytest.mark.parametrize("verb", SHOWN)
def test_command_options_match_request_fields_plus_display_options(verb):
    options = {p.opts[-1].removeprefix("--").replace("-", "_") for p in command_of(verb).params}
    fields = {f.option.replace("-", "_") for f in fields_of(request_type(verb)).values()}
    assert fields <= options
    assert options - fields <= SHOWN[verb] | {"details", "share"}


def test_stub_file_is_up_to_date():
    assert api_stub.STUB.read_text() == api_stub.stub(), "stale: python -m tools generate"


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        *((verb, name) for verb in SHOWN for name in sorted(SHOWN[verb])),
        ("trace", "gpu"),
        ("measure", "loss"),
    ],
)
def test_functions_reject_options_that_only_the_command_has(verb, name):
    required = {
        "forecast",
        "match",
        "plan",
        "measure",
        "watch",
        "diagnose",
        "verify",
        "validate",
        "run",
        "trace",
    }
    with pytest.raises(UnknownName, match=f"unknown option '{name}'"):
        getattr(trainpace, verb)(*(["no-such-model"] if verb in required else []), **{name: True})


def test_every_verb_is_a_documented_function():
    not_yet = {"serve"}
    for verb in set(VERBS) - not_yet:
        assert verb in dir(trainpace)
        assert callable(getattr(trainpace, verb))
        assert inspect.getdoc(getattr(api, verb))


def test_package_named_like_a_verb_is_callable():
    import trainpace.forecast.kernels as kernels
    from trainpace.forecast import Forecaster

    assert kernels.__name__ == "trainpace.forecast.kernels"
    assert sys.modules["trainpace.forecast"] is trainpace.forecast
    assert trainpace.forecast.Forecaster is Forecaster
    assert len(trainpace.forecast("resnet18", gpu="T4", no_journal=True)) == 1


def test_lazily_loaded_package_can_be_monkeypatched(monkeypatch):
    monkeypatch.setattr("trainpace.job.total_steps", lambda *_: 7)
    assert trainpace.job.total_steps() == 7
    monkeypatch.undo()
    assert (
        trainpace.schedule(samples=100, epochs=1, global_batch=10, step_time=1).time.total_s == 10
    )


def test_importing_trainpace_imports_no_dependencies():
    code = "import sys; before = set(sys.modules); import trainpace; dir(trainpace); print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {n for n in loaded if n.startswith("trainpace")} <= {
        "trainpace",
        "trainpace.core",
        "trainpace.verbs",
    }
    assert not loaded & {"torch", "numpy", "msgspec", "click", "rich"}


def test_forecast_function_matches_the_command_line():
    words = [
        "resnet18",
        "--gpu",
        "T4",
        "--gpu",
        "A100",
        "--batch",
        "8,16",
        "--precision",
        "amp_fp16",
        "--no-journal",
    ]
    shown = CliRunner().invoke(command_of("forecast"), [*words, "--json"], standalone_mode=False)
    rows = json.loads(shown.stdout)["rows"]
    found = trainpace.forecast(
        "resnet18", gpu=["T4", "A100"], batch=[8, 16], precision="amp_fp16", no_journal=True
    )
    assert found.to_dicts() == rows
    assert [row.device for row in found] == ["T4", "T4", "A100 SXM 40GB", "A100 SXM 40GB"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch": range(1, 5)}, "--batch=1,2,3,4"),
        ({"batch": 8}, "--batch=8"),
        ({"batch": "1:4"}, "--batch=1:4"),
        ({"timeout": 300}, "--timeout=300s"),
        ({"timeout": "5min"}, "--timeout=5min"),
        ({"timeout": 1e-05}, "--timeout=0.00001s"),
        ({"checkpointing": True}, "--checkpointing"),
        ({"checkpointing": False}, ""),
        ({"compile": True, "network": None}, "--compile"),
        ({"gpu": ("T4", "A100")}, "--gpu=T4 --gpu=A100"),
        ({"calibrated": Path(__file__)}, f"--calibrated={__file__}"),
    ],
)
def test_function_arguments_parse_like_command_line_options(given, words):
    parsed = (
        command_of("forecast")
        .make_context("forecast", [*words.split(), "--json", "--", "M"])
        .params
    )
    expected = ForecastRequest(**{name: parsed[name] for name in fields_of(ForecastRequest)})
    assert request_of(ForecastRequest, {"model": "M", **given}) == expected


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda: trainpace.forecast("resnet18", gpu="T44"), "Nearest: T4"),
        (lambda: trainpace.forecast("resnet18", gpus="T4"), "Nearest: gpu"),
        (lambda: trainpace.forecast("resnet18", gpu="T4", batch=0), "not a batch size"),
        (lambda: trainpace.forecast("resnet18", gpu="T4", precision="fp7"), "fp32"),
        (lambda: trainpace.forecast("resnet81", gpu="T4"), "Nearest: resnet18"),
        (lambda: trainpace.forecast("resnet18", gpu="T4", example=1), "live nn.Module"),
        (lambda: trainpace.forecast("resnet18", gpu="T4", compile="no"), "not True or False"),
        (lambda: trainpace.forecast(nn.Linear(2, 2), gpu="T4"), "example"),
        (lambda: trainpace.measure(nn.Linear(2, 2)), "another process"),
        (lambda: trainpace.schedule(samples=10, epochs=1, global_batch=0), "0"),
        (lambda: trainpace.match("resnet18", samples=10), "`epochs` or `max_steps`"),
        (lambda: trainpace.watch([]), "command"),
        (
            lambda: trainpace.plan("resnet18", gpu="T4", checkpointing=True, compile=True),
            "`checkpointing`",
        ),
        (lambda: trainpace.measure("resnet18", noise_scale=True), "FILE.py:FUNCTION"),
        (
            lambda: trainpace.trace(
                Head(), example={"pixels": batch()[0]}, loss=nn.CrossEntropyLoss()
            ),
            "the example has no labels",
        ),
    ],
)
def test_misuse_raises_value_error_with_a_suggestion(misuse, says, capsys):
    with pytest.raises(TrainpaceError) as error:
        misuse()
    assert says in str(error.value)
    assert isinstance(error.value, ValueError)
    assert capsys.readouterr().out == ""


def test_unknown_package_attribute_raises_attribute_error():
    with pytest.raises(AttributeError):
        _ = trainpace.nonsense
    assert issubclass(UnknownName, trainpace.TrainpaceError)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, pixels, labels=None):
        out = self.body(pixels)
        return (
            {"loss": nn.functional.cross_entropy(out, labels), "logits": out}
            if labels is not None
            else out
        )


def batch(n=2):
    return torch.randn(n, 3, 8, 8), torch.randint(0, 10, (n,))


def test_tracing_a_live_model_matches_tracing_its_file(tmp_path):
    model = Head()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adam = torch.optim.Adam(model.parameters())
    live = trainpace.trace(
        model, example=batch(), loss=nn.CrossEntropyLoss(), task_optimizer=adam, forms=("fp32",)
    )
    file = tmp_path / "task.py"
    file.write_text(
        "import torch\nfrom torch import nn\n" + inspect.getsource(Head) + "\n"
        "class D:\n    def __len__(self): return 4\n    def __getitem__(self, i): return torch.randn(3, 8, 8), 1\n"
        "def task():\n    m = Head()\n    return m, nn.CrossEntropyLoss(), torch.optim.Adam(m.parameters()), D()\n"
    )
    traced = trainpace.trace(f"{file}:task", forms=("fp32",))
    assert live.parameters == traced.parameters == sum(p.numel() for p in model.parameters())
    assert live.optimizer == traced.optimizer == "adam"
    run = {"gpu": "T4", "batch": [4, 32], "no_journal": True}
    steps = [[row.step.total_ms for row in trainpace.forecast(w, **run)] for w in (live, traced)]
    assert steps[0] == pytest.approx(steps[1])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_forecast_accepts_a_model_that_returns_its_loss():
    pixels, labels = batch()
    found = trainpace.forecast(
        Head(), gpu="T4", example={"pixels": pixels, "labels": labels}, no_journal=True
    )
    assert found[0].step.total_ms > 0
    plain = trainpace.forecast(
        Head(), gpu="T4", example=(pixels,), mode="inference", no_journal=True
    )
    assert plain[0].step.total_ms < found[0].step.total_ms


def test_example_may_be_any_mapping():
    pixels, labels = batch()
    given = {"pixels": pixels, "labels": labels}
    one, other = (
        trainpace.trace(Head(), example=example, forms=("fp32",))
        for example in (UserDict(given), given)
    )
    assert to_json(one) == to_json(other)


def test_forecast_match_and_plan_accept_a_workload():
    workload = trainpace.trace("resnet18")
    assert trainpace.match(workload, samples=50_000, epochs=10, provider="aws").matches
    plan = trainpace.plan(workload, gpu="A100", batch=64, samples=50_000, epochs=10)
    assert plan.model == workload.model
    adam = trainpace.forecast(workload, gpu="T4", optimizer="adam").rows[0]
    assert adam.memory.optimizer_states_gib == pytest.approx(
        8 * workload.parameters / 2**30, rel=1e-3
    )
    with pytest.raises(
        TrainpaceError, match="this workload of resnet18 was traced with `image_size` 224"
    ):
        trainpace.forecast(workload, gpu="T4", image_size=256)


def test_measured_steps_convert_to_dicts(tmp_path):
    found = trainpace.measure(
        "resnet18",
        batch=[2, 4],
        repeats=1,
        seconds=0.2,
        journal=str(tmp_path / "journal.db"),
        no_forecast=True,
    )
    assert [row["batch"] for row in found.to_dicts()] == [2, 4]
    one = found[0]
    assert [row["step_time_ms"] for row in one.to_dicts() if not row["warm_up"]] == list(
        one.step_times_ms
    )
    with trainpace.journal(str(tmp_path / "journal.db")) as journal:
        assert journal.count() == 2


def test_measured_sweep_reports_jumps_like_a_forecast():
    step_ms = {batch: 10 + batch + 5 * (batch > 16) for batch in range(1, 41)}
    outcomes = [
        replace(measurement(), execution=Execution(micro_batch=b), median_ms=ms)
        for b, ms in step_ms.items()
    ]
    cause = Jump(
        before=16,
        batch=17,
        before_ms=1.0,
        after_ms=2.0,
        excess_ms=1.0,
        causes=("padding",),
        mechanism="padded batch",
    )
    swept = MeasuredSweep(tuple(outcomes), (), analyse(outcomes), {}, (cause,))
    (jump,) = swept.jumps
    assert (jump.before, jump.batch, jump.causes, jump.mechanism) == (
        16,
        17,
        ("padding",),
        "padded batch",
    )
    assert [jump.before_ms, jump.after_ms, jump.excess_ms] == pytest.approx([26, 32, 5], rel=0.01)
    assert jump.next_good == 24  # 24 / 39 ms matches the rate of 16 / 26 ms, 23 / 38 ms does not
    assert not replace(swept, causes=()).jumps[0].causes


MEASURES = """
import sys, trainpace
if __name__ == "__main__":
    trainpace.measure("resnet18", batch=2, repeats=1, seconds=0.1, journal="journal.db", no_forecast=True)
"""


@pytest.mark.parametrize("as_script", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_journal_stores_the_command_of_a_measuring_script(tmp_path, as_script):
    (tmp_path / "train.py").write_text(MEASURES)
    program = ["train.py", "--lr", "0.1"] if as_script else ["-c", MEASURES, "--lr", "0.1"]
    subprocess.run(
        [sys.executable, *program], cwd=tmp_path, check=True, capture_output=True, timeout=100
    )
    with trainpace.journal(str(tmp_path / "journal.db")) as journal:
        commands = {run.command for run in (*journal.every(), *journal.sweeps())}
    assert commands == ({f"{Path(sys.executable).name} train.py --lr 0.1"} if as_script else {""})


def test_validate_compares_measured_runs_with_forecasts(tmp_path):
    file = tmp_path / "runs.csv"
    file.write_text(
        "model_spec,gpu,precision,batch_per_gpu,step_time_ms,file\n"
        "resnet18,T4,fp32,8,5.0,a\nresnet18,T4,fp32,16,5.0,b\nresnet18,T4,fp32,32,5.0,c\n"
    )
    found = trainpace.validate(file, file=["a", "b"], traces=tmp_path / "traces")
    assert [(row["batch"], row["file"]) for row in found.to_dicts()] == [(8, "a"), (16, "b")]
    assert found.overall.n == len(found) == 2
    assert [one.name for one in found.groups["file"]] == ["a", "b"]
    with pytest.raises(TrainpaceError, match=r"no-such-file\.csv"):
        trainpace.validate("no-such-file.csv")


def test_to_pandas_without_pandas_names_the_pip_command(monkeypatch):
    found = trainpace.forecast("resnet18", gpu="T4", batch=[1, 2], no_journal=True)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(TrainpaceError, match="pip install 'trainpace"):
        found.to_pandas()


def test_to_pandas_returns_a_data_frame():
    pytest.importorskip("pandas")
    table = trainpace.forecast("resnet18", gpu="T4", batch=[1, 2], no_journal=True).to_pandas()
    assert list(table["batch"]) == [1, 2]

"""Import of runs: the contents of each format, skipped runs with reasons, and no duplicates."""

import json
import sqlite3

import pytest

from nouns import measurement
from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.execution import Execution
from trainpace.core.outcome import FailedProbe
from trainpace.core.records import to_jsonable
from trainpace.journal import Given, Journal, format_of, import_file

RUNS = """file,model_spec,model,framework,gpu_canonical,gpu,num_gpus,precision,memory_format,compile,batch_per_gpu,optimizer,mode,step_time_ms,samples_per_sec,peak_mem_gib,notes,img_size
a,timm:resnet50,ResNet-50,pytorch,T4,Tesla T4,1,amp_fp16,nhwc,compile,32,sgd momentum,train,200.5,,7.5,,224
a,timm:resnet50,ResNet-50,pytorch,T4,Tesla T4,1,amp_fp16,nhwc,compile,32,sgd momentum,train,200.5,,7.5,,224
a,,Some Net,pytorch,,Strange Chip 9,4,fp32,,,16,,,,320,,on host at /home/alice/x.log,
a,timm:vgg16,,pytorch,T4,,1,,,,8,,,5,,,,
a,timm:vgg16,,pytorch,T4,,1,fp32,,,8,,,,,,,
a,timm:vgg16,,pytorch,T4,,1,fp32,,,512,,,,,,OOM at this size,
"""
TIMM = """model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count
resnet50,500.0,512.25,256,224,25.56
broken,,,,,
vit,100.0,,64,384,86.0
"""


def bring(path, tmp_path, **given):
    format_ = given.pop("format_", "auto")
    with Journal.open(str(tmp_path / "journal.db")) as journal:
        done = import_file(journal, path, format_, Given(**given))
        return done, journal.find(limit=None)


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_csv_of_published_runs_is_imported(tmp_path):
    done, found = bring(written(tmp_path, "runs.csv", RUNS), tmp_path)
    assert (done.format, done.new, sum(done.skipped.values())) == ("runs", 4, 2)
    assert set(done.skipped) == {
        "the run states no known precision: pass --precision.",
        "the run states no step time or throughput.",
    }
    resnet = [e for e in found if e.model == "timm:resnet50"]
    assert len(resnet) == 2  # measured twice is not the same as imported twice
    e = resnet[0]
    assert e.execution == Execution(
        micro_batch=32,
        precision="amp_fp16",
        optimizer="sgd_momentum",
        channels_last=True,
        compile=True,
    )
    assert (e.step_time_ms, e.peak_memory_gib, e.image_size, e.device) == (200.5, 7.5, 224, "T4")
    (other,) = [e for e in found if e.model == "Some Net"]
    assert (other.step_time_ms, other.num_devices, other.device) == (200.0, 4, "Strange Chip 9")
    assert other.execution.optimizer == "unknown"
    assert "alice" not in repr(other)
    (failed,) = [e for e in found if e.outcome != "ok"]
    assert (failed.outcome, failed.step_time_ms) == ("out_of_memory", None)
    again, _ = bring(written(tmp_path, "copy.csv", RUNS), tmp_path)
    assert (again.new, again.already_there) == (0, 4)


def test_csv_json_and_parquet_import_same_runs(tmp_path):
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    bring(written(tmp_path, "runs.csv", RUNS), tmp_path)
    rows = [{k: v or None for k, v in row.items()} for row in csv.DictReader(RUNS.splitlines())]
    done, _ = bring(written(tmp_path, "runs.json", rows), tmp_path)
    assert (done.format, done.new, done.already_there) == ("runs", 0, 4)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "runs.parquet")
    done, _ = bring(tmp_path / "runs.parquet", tmp_path)
    assert (done.format, done.new, done.already_there) == ("runs", 0, 4)


def test_invalid_number_rejects_whole_file(tmp_path):
    path = written(tmp_path, "runs.csv", RUNS + "a,x,,pytorch,T4,,1,fp32,,,many,,,5,,,,\n")
    with Journal.open(str(tmp_path / "journal.db")) as journal:
        with pytest.raises(UnreadableInput, match=r"row 6.*many"):
            import_file(journal, path)
        assert journal.count() == 0


def test_own_measurements_are_imported(tmp_path):
    probe = FailedProbe(
        model="one layer",
        device="cpu",
        execution=Execution(micro_batch=99),
        failure="timeout",
        reason="10 min",
        environment={},
    )
    path = written(
        tmp_path, "cnn.json", [to_jsonable(measurement()), to_jsonable(probe), {"record": "Plan"}]
    )
    done, found = bring(path, tmp_path)
    assert (done.format, done.new, done.skipped) == (
        "trainpace",
        2,
        {"a record of the kind 'Plan' is not a run": 1},
    )
    by = {e.outcome: e for e in found}
    assert by["ok"].step == measurement().step
    assert by["timeout"].reason == "10 min"
    assert by["ok"].source == "cnn.json"
    assert bring(path, tmp_path)[0].already_there == 2


def test_timm_benchmark_is_imported(tmp_path):
    done, found = bring(
        written(tmp_path, "benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv", TIMM), tmp_path
    )
    assert (done.format, done.new, done.skipped) == ("timm", 2, {"the model has no time": 1})
    e = next(e for e in found if e.model == "timm:resnet50")
    assert (e.step_time_ms, e.device, e.image_size, e.mode) == (512.25, "RTX 3090", 224, "train")
    assert e.execution == Execution(
        micro_batch=256, precision="amp_fp16", optimizer="sgd_momentum", channels_last=True
    )
    assert e.environment == {"framework": "timm benchmark.py", "torch": "1.12", "cuda": "11.3"}
    assert next(e for e in found if e.model == "timm:vit").step_time_ms == 640.0
    infer = TIMM.replace("train_", "infer_")
    done, found = bring(
        written(tmp_path, "benchmark-infer-bf16-nchw-pt240-cu124-rtx4090-dynamo.csv", infer),
        tmp_path,
    )
    e = found[0]
    assert (e.mode, e.execution.compile, e.execution.optimizer, e.execution.precision) == (
        "inference",
        True,
        "none",
        "bf16",
    )
    done, _ = bring(written(tmp_path, "mine.csv", TIMM), tmp_path)
    assert done.new == 0
    assert "the run states no known precision: pass --precision." in done.skipped
    done, found = bring(tmp_path / "mine.csv", tmp_path, precision="fp32", device="T4")
    assert done.new == 2


HF = {
    "epoch": 3.0,
    "train_loss": 0.5,
    "train_runtime": 100.0,
    "train_samples_per_second": 64.0,
    "train_steps_per_second": 2.0,
}


def test_hugging_face_results_are_imported(tmp_path):
    path = written(tmp_path, "all_results.json", HF)
    done, _ = bring(path, tmp_path)
    assert (done.format, done.new) == ("hf", 0)
    assert "precision" in next(iter(done.skipped))
    written(
        tmp_path,
        "config.json",
        {"_name_or_path": "/home/alice/checkpoints/bert", "architectures": ["BertModel"]},
    )
    done, found = bring(path, tmp_path, precision="amp_bf16", device="A100-SXM4-80GB")
    assert done.new == 1
    assert (found[0].step_time_ms, found[0].execution.micro_batch, found[0].model) == (
        500.0,
        32,
        "bert",
    )
    assert found[0].execution.optimizer == "unknown"
    history = [
        {"loss": 2.0, "step": 1},
        {"loss": float("nan"), "step": 2},
        {**HF, "train_steps_per_second": 0.021, "train_samples_per_second": 0.672},
    ]
    state = {"global_step": 2, "train_batch_size": 8, "log_history": history}
    done, found = bring(written(tmp_path, "trainer_state.json", state), tmp_path, precision="fp32")
    e = next(e for e in found if e.source == "trainer_state.json")
    assert e.step_time_ms == 50_000.0  # 100 s over 2 steps, since 0.021 is rounded
    assert (e.execution.micro_batch, e.execution.accumulation, e.losses) == (8, 4, (2.0, None))
    done, _ = bring(
        written(tmp_path, "unfinished.json", {**state, "log_history": []}),
        tmp_path,
        precision="fp32",
    )
    assert "did not end" in next(iter(done.skipped))


PARAMS = {
    "model_name": "facebook/opt-125m",
    "per_device_train_batch_size": "16",
    "gradient_accumulation_steps": "2",
    "bf16": "True",
    "fp16": "False",
    "optim": "adamw_torch",
    "seed": "42",
    "max_seq_length": "512",
    "output_dir": "/home/alice/out",
}


def mlruns(folder, runs):
    for i, (params, metrics, stage) in enumerate(runs):
        run = folder / "0" / f"{i:032x}"
        for kind, values in (
            ("params", params),
            ("metrics", metrics),
            ("tags", {"mlflow.user": "alice"}),
        ):
            for key, value in values.items():
                file = run / kind / key
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(value)
        (run / "meta.yaml").write_text(
            f"run_id: {run.name}\nlifecycle_stage: {stage}\nstart_time: 1700000000000\nuser_id: alice\nartifact_uri: file:///home/alice/x\n"
        )
    (folder / "0" / "meta.yaml").write_text(
        "name: Default\nexperiment_id: '0'\nlifecycle_stage: active\n"
    )
    return folder


STORE = [
    (
        PARAMS,
        {
            "train/train_steps_per_second": "1700000000000 4.0 10\n1700000001000 nan 11\n1700000002000 4.0 12\n"
        },
        "active",
    ),
    (
        {"model": "resnet50", "batch_size": "64", "precision": "16-mixed"},
        {"samples_per_second": "1 640 0\n"},
        "active",
    ),
    ({"model": "resnet50", "precision": "32"}, {"step_time_ms": "1 5 0\n"}, "active"),
    ({"model": "resnet50", "batch_size": "8", "precision": "32"}, {"loss": "1 5 0\n"}, "active"),
    ({"model": "resnet50", "batch_size": "8"}, {"step_time_ms": "1 5 0\n"}, "active"),
    (
        {"model": "resnet50", "batch_size": "8", "precision": "32"},
        {"step_time_ms": "1 5 0\n"},
        "deleted",
    ),
]


def database(path):
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE experiments (experiment_id INTEGER); CREATE TABLE runs (run_uuid TEXT, start_time BIGINT, lifecycle_stage TEXT,"
        " user_id TEXT); CREATE TABLE params (key TEXT, value TEXT, run_uuid TEXT); CREATE TABLE metrics (key TEXT, value DOUBLE,"
        " timestamp BIGINT, run_uuid TEXT, step BIGINT, is_nan BOOLEAN);"
    )
    for i, (params, metrics, stage) in enumerate(STORE):
        id_ = f"{i:032x}"
        connection.execute("INSERT INTO runs VALUES (?, 1700000000000, ?, 'alice')", (id_, stage))
        connection.executemany(
            "INSERT INTO params VALUES (?, ?, ?)", [(k, v, id_) for k, v in params.items()]
        )
        lines = [(k, line.split()) for k, text in metrics.items() for line in text.splitlines()]
        connection.executemany(
            "INSERT INTO metrics VALUES (?, ?, 1, ?, 0, 0)",
            [(k, 0.0 if w[1] == "nan" else float(w[1]), id_) for k, w in lines],
        )
    connection.commit()
    connection.close()
    return path


@pytest.mark.parametrize("kind", ["mlruns", "mlflow.db"])
def test_mlflow_runs_are_imported(tmp_path, kind):
    path = mlruns(tmp_path / kind, STORE) if kind == "mlruns" else database(tmp_path / kind)
    done, found = bring(path, tmp_path)
    assert (done.format, done.new, sum(done.skipped.values())) == ("mlflow", 2, 3)
    e = next(e for e in found if e.model == "facebook/opt-125m")
    expected = Execution(micro_batch=16, accumulation=2, precision="amp_bf16", optimizer="adamw")
    assert (e.step_time_ms, e.execution, e.seed, e.sequence_length) == (250.0, expected, 42, 512)
    assert e.created_at.startswith("2023-11-14T22:13:20")
    other = next(e for e in found if e.model == "resnet50")
    assert (other.step_time_ms, other.execution.precision) == (100.0, "amp_fp16")
    assert "alice" not in repr(found)
    assert bring(path, tmp_path)[0].already_there == 2


def test_both_mlflow_stores_import_same_runs(tmp_path):
    bring(mlruns(tmp_path / "mlruns", STORE), tmp_path)
    assert bring(database(tmp_path / "mlflow.db"), tmp_path)[0].new == 0


def test_yaml_import_does_not_execute_code(tmp_path):
    folder = mlruns(tmp_path / "mlruns", STORE[:1])
    marker = tmp_path / "ran"
    next((folder / "0").glob("0*/meta.yaml")).write_text(
        f"run_id: !!python/object/apply:os.system ['touch {marker}']\n"
    )
    with pytest.raises(TrainpaceError):
        bring(folder, tmp_path)
    assert not marker.exists()


def test_symlinks_out_of_mlruns_are_ignored(tmp_path):
    folder = mlruns(tmp_path / "mlruns", [({**STORE[1][0]}, STORE[1][1], "active")])
    secret = written(tmp_path, "secret", "999")
    (folder / "0" / f"{0:032x}" / "params" / "seed").symlink_to(secret)
    assert bring(folder, tmp_path)[1][0].seed is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.csv", ""),
        ("x.csv", "a,b\n1,2\n"),
        ("x.json", "[1, 2]"),
        ("x.json", "{"),
        ("x.json", "nonsense"),
        ("x.json", '{"a": 1}'),
        ("x.json", '[{"record": "Entry", "schema_version": 1}]'),
        ("x.json", '[{"record": "Entry", "schema_version": 99}]'),
        ("x.json", "[" * 100_000),
        ("x.parquet", "PAR1 and so on"),
        ("x.bin", "\0\1\2"),
        ("x.json", '[\n{"record":"Entry"},\n'),
        ("x.json", '{"record": "Measurement", "schema_version": 1, "model": 5}'),
        ("x.json", '{"train_runtime": {}, "train_steps_per_second": "fast"}' * 2),
    ],
)
def test_invalid_import_files_give_one_line_errors(tmp_path, name, content):
    path = written(tmp_path, name, content)
    with Journal.open(str(tmp_path / "journal.db")) as journal:
        for format_ in ("auto", "trainpace", "runs", "timm", "hf", "mlflow"):
            try:
                done = import_file(journal, path, format_)
            except TrainpaceError as error:
                assert "\n" not in str(error)
                assert len(str(error)) < 600
            else:
                assert done.new == 0
                assert format_ != "auto"
        assert journal.count() == 0


def test_unsupported_import_paths_are_rejected(tmp_path):
    for wrong in (tmp_path, tmp_path / "none.csv"):
        with pytest.raises(TrainpaceError):
            format_of(wrong)
    with Journal.open(str(tmp_path / "journal.db")):
        pass
    with pytest.raises(UnreadableInput, match="journal merge"):
        format_of(tmp_path / "journal.db")


def test_import_error_names_file_not_journal(tmp_path):
    with pytest.raises(UnreadableInput) as error:
        bring(
            written(tmp_path, "runs.csv", RUNS + "a,x,,pytorch,T4,,1,fp32,,,many,,,5,,,,\n"),
            tmp_path,
        )
    assert "journal.db" not in str(error.value)

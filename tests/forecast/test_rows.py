"""The scoring command on a small file: rows, errors, reasons and summary."""

import json
import math
import os
import subprocess
import sys

import pytest

from nouns import workload
from trainpace.core.records import save
from trainpace.forecast import Row, by, family_of, summarise

CSV = """file,model_spec,gpu_canonical,precision,batch_per_gpu,step_time_ms,optimizer,mode,img_size,peak_mem_gib,memory_format
a,resnet18,T4,fp32,32,200,sgd momentum,train,224,,nchw
a,resnet18,V100,fp32,32,70,sgd momentum,train,224,3.0,nchw
b,resnet18,A100,amp_fp16,64,40,none,forward_backward,224,,nhwc
b,resnet18,A100,tf32,64,10,,inference,128,,nchw
b,resnet18,T4,fp8,64,10,,train,224,,nchw
b,no_such_model,A100,tf32,64,10,,train,224,,nchw
b,,A100,tf32,64,10,,train,224,,nchw
"""


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "trainpace", "validate", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")},
        timeout=120,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("validate")
    (path / "runs.csv").write_text(CSV)
    return path


def test_rows_and_summary_report_errors_and_reasons(folder):
    done = run(folder, "runs.csv", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    rows = answer["rows"]
    assert [row["index"] for row in rows] == list(range(7))
    for row in rows[:4]:
        assert row["error_pct"] == pytest.approx(
            100 * (row["forecast_ms"] / row["measured_ms"] - 1)
        )
        assert row["low_ms"] < row["forecast_ms"] < row["high_ms"]
        assert row["in_interval"] == (row["low_ms"] <= row["measured_ms"] <= row["high_ms"])
    assert "FP8" in rows[4]["unsupported"]
    assert "no_such_model" in rows[5]["unsupported"]
    assert "no model definition" in rows[6]["unsupported"]
    assert rows[1]["memory_error_pct"] is not None
    overall = answer["summary"]["overall"]
    assert (overall["n"], overall["unsupported"]) == (4, 3)
    assert overall["mape"] == pytest.approx(sum(abs(row["error_pct"]) for row in rows[:4]) / 4)
    assert {s["name"] for s in answer["summary"]["by_file"]} == {"a", "b"}


def test_saved_workloads_are_accepted_and_changed_files_retraced(folder):
    save(workload(), folder / "saved.json")
    code = "import torch\ndef task():\n    m = torch.nn.Linear(4, {width})\n    return m, torch.nn.CrossEntropyLoss(), torch.optim.SGD(m.parameters(), lr=0.1), [(torch.randn(4), 1)] * 8\n"
    (folder / "own.csv").write_text(
        "model_spec,gpu,precision,batch_per_gpu,step_time_ms\nsaved.json,T4,fp32,8,1\nmine.py:task,T4,fp32,64,1\n"
    )
    seen = []
    for width in (2, 4096):
        (folder / "mine.py").write_text(code.format(width=width))
        rows = json.loads(run(folder, "own.csv", "--run-code", "--json").stdout)["rows"]
        assert [row["unsupported"] for row in rows] == ["", ""]
        seen.append(rows[1]["forecast_memory_gib"])
    assert seen[1] > 10 * seen[0]


def test_table_does_not_run_code_without_run_code(folder):
    (folder / "evil.py").write_text("open('ran', 'w').close()\n")
    (folder / "evil.csv").write_text(
        "model_spec,gpu,precision,batch_per_gpu,step_time_ms\nevil.py:task,T4,fp32,64,1\n./evil.py:task,T4,fp32,64,1\n"
    )
    done = run(folder, "evil.csv", "--json")
    assert all("--run-code" in row["unsupported"] for row in json.loads(done.stdout)["rows"])
    assert not (folder / "ran").exists()


def test_implausible_sizes_have_no_forecast(folder):
    (folder / "huge.csv").write_text(
        "model_spec,gpu,precision,batch_per_gpu,step_time_ms,num_gpus\n"
        "resnet18,T4,fp32,64,1,1e18\nresnet18,T4,fp32,1e300,1,1\nresnet18,T4,fp32,64,1e-320,1\n"
    )
    rows = json.loads(run(folder, "huge.csv", "--json").stdout)["rows"]
    assert all(row["unsupported"] and row["forecast_ms"] is None for row in rows)


def test_traces_are_cached_and_worst_rows_are_shown(folder):
    done = run(folder, "runs.csv", "--file", "a")
    assert done.returncode == 0, done.stderr
    assert "tracing" not in done.stderr
    assert "resnet18" in done.stdout
    assert "interval" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("runs.csv", "--file", "zz"), "zz"),
        (("none.csv",), "does not exist"),
        (("empty.csv",), "has no rows"),
    ],
)
def test_bad_input_exits_2_with_message(folder, arguments, word):
    (folder / "empty.csv").write_text("model_spec\n")
    done = run(folder, *arguments)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def row(error, **other):
    return Row(
        index=0,
        file="f",
        model="timm:resnet50",
        gpu="g",
        num_gpus=1,
        precision="fp32",
        batch=1,
        error_pct=error,
        **other,
    )


def test_summary_statistics_are_correct():
    rows = [row(e, in_interval=abs(e) < 15) for e in (-10.0, 10.0, 20.0, -40.0)]
    s = summarise("x", rows)
    assert (s.n, s.mape, s.median, s.bias, s.coverage) == (4, 20.0, 15.0, 0.0, 50.0)
    assert math.isclose(s.p90, 34.0)
    assert summarise("none", [row(None, unsupported="why")]).mape is None
    assert [g.name for g in by(rows, lambda r: r.file)] == ["f"]


def test_family_of_recognizes_model_spec():
    names = {
        "timm:tf_efficientnet_b0_ns": "efficientnet",
        "torchvision:vgg16_bn": "vgg",
        "transformers:models/gpt2-large.json": "gpt",
        "timm:vit_base_patch16_224": "vit",
    }
    assert {spec: family_of(spec) for spec in names} == names

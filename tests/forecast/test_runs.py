"""Measured runs are read from CSV and Parquet. Invalid files give a one-line error."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainpace.core.errors import TrainpaceError
from trainpace.forecast import read_runs

CSV = """model_spec,gpu_canonical,precision,batch_per_gpu,step_time_ms,seq_len,unknown
resnet18,T4,fp32,32,200.5,,x
resnet18,V100,amp_fp16,64,,nan,y
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "runs.csv"
    path.write_text(text)
    return path


def test_csv_and_parquet_give_the_same_runs(tmp_path):
    from_csv = read_runs(write(tmp_path, CSV))
    assert [run.step_time_ms for run in from_csv] == [200.5, None]
    assert from_csv[0].seq_len is None
    table = pa.table(
        {
            "model_spec": ["resnet18", "resnet18"],
            "gpu_canonical": ["T4", "V100"],
            "precision": ["fp32", "amp_fp16"],
            "batch_per_gpu": [32, 64],
            "step_time_ms": [200.5, float("nan")],
            "seq_len": [None, None],
            "unknown": ["x", "y"],
        }
    )
    pq.write_table(table, tmp_path / "runs.parquet")
    assert read_runs(tmp_path / "runs.parquet") == from_csv


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n1,2\n",
        "model_spec,batch_per_gpu\nresnet18,many\n",
        "model_spec,batch_per_gpu\nresnet18,-4\n",
        "model_spec,step_time_ms\nresnet18,inf\n",
        "",
        "model_spec,attention\nresnet18,flash9\n",
    ],
)
def test_read_runs_rejects_invalid_files_with_one_line(tmp_path, text):
    with pytest.raises(TrainpaceError) as error:
        read_runs(write(tmp_path, text))
    assert len(str(error.value).splitlines()) == 1


def test_read_runs_rejects_damaged_parquet(tmp_path):
    path = tmp_path / "runs.parquet"
    path.write_bytes(b"PAR1" + bytes(range(200)))
    with pytest.raises(TrainpaceError, match="not a readable Parquet"):
        read_runs(path)


def test_read_runs_rejects_binary_csv(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_bytes(b"\xff\xfe\x00model_spec\n")
    with pytest.raises(TrainpaceError, match="neither Parquet nor CSV"):
        read_runs(path)

"""Tests of the host CPU option: command line, Python and cluster file."""

import json

import pytest

import trainpace
from nouns import workload
from trainpace.cli.program import main
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import save


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.json"
    save(workload(), path)
    return str(path)


def said(capsys, *words, batch=1, code=0):
    """Return what `trainpace forecast` prints on both streams."""
    with pytest.raises(SystemExit) as ended:
        main(["forecast", *words, "--gpu", "A100", "--batch", str(batch), "--no-journal"])
    assert (ended.value.code or 0) == code
    out, err = capsys.readouterr()
    return out + err


def test_faster_host_shortens_the_step(model, capsys):
    times = {}
    for host in ("EPYC 7551", "Core i9-13900K"):
        (row,) = json.loads(said(capsys, model, "--json", "--host", host))["rows"]
        assert (row["host"], row["host_assumed"]) == (host, False)
        times[host] = row["step_time_ms"]
    assert times["Core i9-13900K"] < times["EPYC 7551"]


def test_assumed_host_is_stated_only_for_launch_bound_models(model, capsys):
    assert "Host CPU not given" in said(capsys, "mobilenet_v2")
    assert "Host CPU not given" not in said(capsys, "mobilenet_v2", "--host", "EPYC 7742")
    assert "Host CPU not given" not in said(
        capsys, model, batch=512
    )  # matmuls take the whole step at this batch size


def test_unknown_host_and_host_without_gpu_are_rejected(model, capsys):
    assert "unknown host CPU 'EPYC 9999'" in said(capsys, model, "--host", "EPYC 9999", code=2)
    with pytest.raises(TrainpaceError, match="needs a `gpu`"):
        trainpace.forecast(model, gpu="cpu", host="EPYC 7742", no_journal=True)


def test_cluster_file_may_set_the_host(model, tmp_path):
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('gpu = "A100"\nhost = "EPYC 7742"\n')
    assert trainpace.plan(model, cluster=str(fleet), batch=1, max_steps=100).now.job_s > 0
    with pytest.raises(TrainpaceError, match="host is EPYC 7742 in"):
        trainpace.plan(model, cluster=str(fleet), host="13900K", batch=1, max_steps=100)

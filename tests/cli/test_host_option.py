"""--host: the CPU that launches kernels, on the command line, in Python and in a fleet's file."""

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
    """What `trainpace forecast` prints on both streams."""
    with pytest.raises(SystemExit) as ended:
        main(["forecast", *words, "--gpu", "A100", "--batch", str(batch), "--no-journal"])
    assert (ended.value.code or 0) == code
    out, err = capsys.readouterr()
    return out + err


def test_a_faster_host_launches_faster(model, capsys):
    times = {}
    for host in ("EPYC 7551", "Core i9-13900K"):
        (row,) = json.loads(said(capsys, model, "--json", "--host", host))["rows"]
        assert (row["host"], row["host_assumed"]) == (host, False)
        times[host] = row["step_time_ms"]
    assert times["Core i9-13900K"] < times["EPYC 7551"]


def test_an_unnamed_host_is_said_where_it_matters(model, capsys):
    assert "Host CPU not given" in said(capsys, "mobilenet_v2")
    assert "Host CPU not given" not in said(capsys, "mobilenet_v2", "--host", "EPYC 7742")
    assert "Host CPU not given" not in said(
        capsys, model, batch=512
    )  # its products take all of the step


def test_an_unknown_host_and_one_beside_a_cpu_are_misuse(model, capsys):
    assert "unknown host CPU 'EPYC 9999'" in said(capsys, model, "--host", "EPYC 9999", code=2)
    with pytest.raises(TrainpaceError, match="needs a `gpu`"):
        trainpace.forecast(model, gpu="cpu", host="EPYC 7742", no_journal=True)


def test_a_fleets_file_may_name_it(model, tmp_path):
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('gpu = "A100"\nhost = "EPYC 7742"\n')
    assert trainpace.plan(model, cluster=str(fleet), batch=1, max_steps=100).now.job_s > 0
    with pytest.raises(TrainpaceError, match="host is EPYC 7742 in"):
        trainpace.plan(model, cluster=str(fleet), host="13900K", batch=1, max_steps=100)

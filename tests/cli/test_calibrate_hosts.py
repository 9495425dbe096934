"""Tests of errors in `trainpace calibrate --hosts`."""

import pytest
from click.testing import CliRunner

from trainpace.cli.command import command_of
from trainpace.cli.measuring import calibrate
from trainpace.core.errors import TrainpaceError
from trainpace.measure.collectives import measure_host_links


def test_calibrating_hosts_without_a_profile_hints_at_calibrate(tmp_path):
    result = CliRunner().invoke(
        command_of(calibrate), ["--hosts", "--output", str(tmp_path / "none.json")]
    )
    assert isinstance(result.exception, TrainpaceError)
    assert "trainpace calibrate" in (result.exception.hint or "")


@pytest.mark.parametrize("rate", ["0", "-1", "fast"])
def test_network_bandwidth_must_be_positive(rate):
    assert CliRunner().invoke(command_of(calibrate), ["--hosts", "--network", rate]).exit_code == 2


def test_measuring_host_links_outside_torchrun_hints_at_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TrainpaceError, match="two hosts") as caught:
        measure_host_links()
    assert "torchrun" in (caught.value.hint or "")

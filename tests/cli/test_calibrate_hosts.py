"""`trainpace calibrate --hosts`: what a user can get wrong."""

import pytest
from click.testing import CliRunner

from trainpace.cli.command import command_of
from trainpace.cli.measuring import calibrate
from trainpace.core.errors import TrainpaceError
from trainpace.measure.collectives import measure_host_links


def test_without_a_profile_it_says_what_comes_first(tmp_path):
    result = CliRunner().invoke(
        command_of(calibrate), ["--hosts", "--output", str(tmp_path / "none.json")]
    )
    assert isinstance(result.exception, TrainpaceError)
    assert "trainpace calibrate" in (result.exception.hint or "")


@pytest.mark.parametrize("rate", ["0", "-1", "fast"])
def test_a_bandwidth_is_a_number_above_zero(rate):
    assert CliRunner().invoke(command_of(calibrate), ["--hosts", "--network", rate]).exit_code == 2


def test_outside_torchrun_it_says_how_to_start(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TrainpaceError, match="two hosts") as caught:
        measure_host_links()
    assert "torchrun" in (caught.value.hint or "")

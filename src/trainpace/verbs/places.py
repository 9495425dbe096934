"""Where a user's own things are."""

import os
from pathlib import Path

from trainpace.verbs.request import Misuse


def default_hardware_file() -> Path:
    """Where a user's own devices are looked for without --hardware."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "trainpace" / "hardware.toml"


def default_profile_file() -> Path:
    """Where `trainpace calibrate` leaves this machine's profile, and `--gpu cpu` looks for it."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "trainpace" / "machine.json"


def default_recordings_folder() -> Path:
    """Where `trainpace watch` and `diagnose` record."""
    return default_profile_file().parent / "recordings"


def default_offers_file() -> Path:
    """Where `trainpace offers --refresh` leaves the offers, which then take the packaged snapshot's place."""
    return default_profile_file().parent / "offers.csv"


def default_workloads_folder() -> Path:
    """Where `trainpace serve` looks for saved workloads."""
    return default_profile_file().parent / "workloads"


def check_writable(file: str) -> None:
    """Raise Misuse where the folder of a file that is to be written does not exist."""
    if not Path(file).resolve().parent.is_dir():
        raise Misuse(f"the folder of {file} does not exist.")

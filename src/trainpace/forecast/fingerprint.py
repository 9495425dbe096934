"""Which constants a forecast was made with."""

import hashlib
from pathlib import Path

CONSTANTS = Path(__file__).parents[1] / "forecast"


def fingerprint_of_constants() -> str:
    """12 hex digits of the fitted constants, intervals and kernel models that are installed."""
    digest = hashlib.sha256()
    for file in sorted(CONSTANTS.rglob("*.json")):
        digest.update(file.relative_to(CONSTANTS).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]

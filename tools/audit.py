"""Look up pinned packages in the public database of known vulnerabilities: `python -m tools audit`.

It also writes a bill of materials of each lock.

Exit code 1: a pinned package has a known vulnerability. 2: the database could not be asked, so that
nothing is known.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOCKS = sorted(Path("locks").glob("*.lock"))
BILLS = Path("out/sbom")
PIN = re.compile(r"^[\w.-]+==[^\s;]+", re.MULTILINE)
ENOUGH_S = 600


def write_bills() -> None:
    """One bill of materials a lock, with the hashes that the lock has."""
    BILLS.mkdir(parents=True, exist_ok=True)
    for lock in LOCKS:
        bill = BILLS / f"{lock.stem}.json"
        command = [
            sys.executable,
            "-m",
            "cyclonedx_py",
            "requirements",
            str(lock),
            "--output-file",
            str(bill),
        ]
        subprocess.run(command, check=True)


def findings(pins: list[str]) -> list[dict[str, Any]] | None:
    """What pip-audit found about each pin, asked once for all of them; None where the database gave no answer."""
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--format", "json"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as asked:
        # pip-audit refuses one package in two versions, as two locks may have it
        asked.write("\n".join(pins))
        asked.flush()
        command += ["--progress-spinner", "off", "--requirement", asked.name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=ENOUGH_S
            )
        except subprocess.TimeoutExpired:
            print(
                f"the database of vulnerabilities gave no answer within {ENOUGH_S} s",
                file=sys.stderr,
            )
            return None
    if not done.stdout.strip():
        print(
            f"the database of vulnerabilities gave no answer: {done.stderr.strip()[-300:]}",
            file=sys.stderr,
        )
        return None
    found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    return found


def rounds(pins_by_lock: dict[Path, list[str]]) -> list[list[str]]:
    """All pins, each once, divided so that no round has a package in two versions."""
    divided: list[dict[str, str]] = []
    for pin in sorted({pin for pins in pins_by_lock.values() for pin in pins}):
        name = pin.partition("==")[0]
        place = next((one for one in divided if name not in one), None)
        if place is None:
            divided.append(place := {})
        place[name] = pin
    return [list(one.values()) for one in divided]


def main() -> int:
    write_bills()
    print(f"bills of materials, one a lock: {BILLS}/")
    pins_by_lock = {lock: PIN.findall(lock.read_text()) for lock in LOCKS}
    known = unknown = vulnerable = 0
    reason = "nothing"
    for pins in rounds(pins_by_lock):
        answer = findings(pins)
        if answer is None:
            return 2
        for package in answer:
            known, unknown = known + ("vulns" in package), unknown + ("vulns" not in package)
            reason = package.get("skip_reason", reason)
            for found in package.get("vulns", ()):
                vulnerable += 1
                pin = f"{package['name']}=={package['version']}"
                locks = ", ".join(
                    lock.name for lock, theirs in pins_by_lock.items() if pin in theirs
                )
                fixed = ", ".join(found["fix_versions"]) or "no version yet"
                print(f"{pin} ({locks}) has {found['id']}, mended in {fixed}")
    print(f"{known} pinned versions were looked up, {vulnerable} vulnerabilities are known")
    if not known:
        print(
            f"the database of vulnerabilities cannot be reached, so that nothing is known; pip-audit says: {reason}",
            file=sys.stderr,
        )
    elif unknown:
        print(f"{unknown} could not be looked up; pip-audit says of the last: {reason}")
    return 1 if vulnerable else 2 if not known else 0


if __name__ == "__main__":
    sys.exit(main())

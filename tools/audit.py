"""`make audit`: the pinned packages beside the public database of known vulnerabilities, and a bill of materials (CycloneDX).

Exit code 1: a pinned package has a known vulnerability. 2: the database could not be asked, so that nothing is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LOCKS = sorted(Path().glob("requirements*.lock"))
BILL = Path("out/sbom.json")


def packages_of(lock: Path) -> list[dict[str, Any]]:
    """pip-audit's findings about each package that a lock file pins."""
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--requirement",
        str(lock),
        "--no-deps",
        "--disable-pip",
        "--format",
        "json",
    ]
    done = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        print(f"pip-audit gave no answer for {lock}: {done.stderr.strip()[-300:]}", file=sys.stderr)
        sys.exit(2)
    return json.loads(done.stdout)["dependencies"]


def main() -> int:
    known = unknown = 0
    vulnerable = []
    for lock in LOCKS:
        for package in packages_of(lock):
            known, unknown = known + ("vulns" in package), unknown + ("vulns" not in package)
            vulnerable += [(lock, package, found) for found in package.get("vulns", ())]
    BILL.parent.mkdir(exist_ok=True)
    write_bill = [sys.executable, "-m", "cyclonedx_py", "requirements", "requirements.lock", "--output-file", str(BILL)]
    subprocess.run(write_bill, check=True)
    for lock, package, found in vulnerable:
        fixed = ", ".join(found["fix_versions"]) or "no version yet"
        print(f"{lock}: {package['name']} {package['version']} has {found['id']}, mended in {fixed}")
    print(
        f"{known} pinned packages were looked up, {len(vulnerable)} vulnerabilities are known; bill of materials: {BILL}"
    )
    if unknown:
        print(
            f"{unknown} could not be looked up: the database of vulnerabilities does not answer, or does not know them"
        )
    return 1 if vulnerable else 2 if not known else 0


if __name__ == "__main__":
    sys.exit(main())

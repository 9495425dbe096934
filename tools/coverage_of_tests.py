"""Measure the branches of src that the tests reach: `python -m tools coverage [TESTS]`.

It makes the tests 1.8 times as long in processor time. A .pth file in .venv, there only for the
run, lets every Python process that a test starts measure itself, whatever its PYTHONPATH.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOOK = (
    f"{ROOT / '.tools'}\nimport os; 'COVERAGE_PROCESS_CONFIG' in os.environ"
    " and __import__('coverage').process_startup()\n"
)


def coverage(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "coverage", *arguments], check=False).returncode


def main() -> None:
    (ROOT / "out/coverage").mkdir(parents=True, exist_ok=True)
    hook = Path(sysconfig.get_path("purelib")) / "trainpace-coverage.pth"
    hook.write_text(HOOK)
    try:
        coverage("erase")
        code = coverage("run", "-m", "pytest", *(sys.argv[1:] or ["tests"]))
    finally:
        hook.unlink()
    coverage("combine", "--quiet")
    coverage("report")
    sys.exit(code)


if __name__ == "__main__":
    main()

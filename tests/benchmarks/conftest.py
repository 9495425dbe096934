"""Import the scripts of benchmarks/ that tests use, then remove its path: benchmarks/diagnose.py would hide tests/diagnose."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [str(ROOT), str(ROOT / "benchmarks")]

sys.path += FOLDERS
try:
    import accelerator_faults  # noqa: F401
    import accuracy  # noqa: F401  (and with it the modules beside it)
    import accuracy_chart  # noqa: F401
    import architecture_list  # noqa: F401
    import architectures  # noqa: F401
    import chart_gallery  # noqa: F401
    import random_models  # noqa: F401
finally:
    for folder in FOLDERS:
        sys.path.remove(folder)

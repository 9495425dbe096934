"""Trace the built-in models into the package:

``python -m tools zoo-workloads``, after a change of the zoo, of the tracer or of torch.
"""

from __future__ import annotations

import gzip
from typing import get_args

from trainpace.core.records import to_json
from trainpace.workload import Form, specs, workloads
from trainpace.workload.trace import trace


def main() -> None:
    workloads.FOLDER.mkdir(exist_ok=True)
    for file in workloads.FOLDER.glob("*.json.gz"):
        file.unlink()
    for name in specs.MODELS:
        for label, variant in workloads.VARIANTS.items():
            text = to_json(trace(name, get_args(Form), variant))
            workloads.packaged_file(name, label).write_bytes(
                gzip.compress(text.encode(), 9, mtime=0)
            )
        print(name, flush=True)
    size = sum(file.stat().st_size for file in workloads.FOLDER.glob("*.json.gz"))
    print(f"{size / 1e3:.0f} kB in {workloads.FOLDER}")


if __name__ == "__main__":
    main()

"""Config writers: read -> write -> read for seeded plans, and the files loaded by the libraries that they are for.

python benchmarks/config_writers.py [--plans 200]       (needs .engines; a few minutes)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "planted"))
from config_loading import LIBRARIES, differing, loaded, mismatches  # noqa: E402
from config_plans import FILES, Round, rounds  # noqa: E402

from trainpace.configs.files import BY_HAND  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "config_writers.md"
    )
    o = parser.parse_args()
    rows = []
    for kind in FILES:
        done = list(rounds(kind, o.plans))
        wrong = [one for one in done if one.wrong()]
        by_hand = sum(BY_HAND in one.written.left.values() for one in done)
        same = "none at hand"
        if kind in LIBRARIES:
            with tempfile.TemporaryDirectory() as folder:
                reports = loaded(kind, done, Path(folder))
            other = [
                (one, d)
                for one, report in zip(done, reports, strict=True)
                if (d := differing(one, report))
            ]
            for one, d in other[:5]:
                print(f"{kind}: {one.file}: {d}")
            same = f"{o.plans - len(other)} of {o.plans}"
        for one in wrong[:5]:
            print(f"{kind}: {one.file}: {one.wrong()}")
        kept = sum(_kept(one) for one in done)
        library = LIBRARIES.get(kind, "the reader alone")
        n = o.plans
        cells = (
            kind,
            len(FILES[kind]),
            f"{n - len(wrong)} of {n}",
            by_hand,
            f"{kept} of {n}",
            same,
            library,
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
        print(rows[-1])
    with tempfile.TemporaryDirectory() as name:
        differ = [found for found, _ in mismatches(o.plans, Path(name)) if found]
    print(*differ[:3], sep="\n")
    agree = f"{o.plans - len(differ)} of {o.plans}"
    both = f"\nWritten into TrainingArguments and the DeepSpeed file beside them: in {agree} plans the Trainer's own comparison\n"
    both += "of the two (`trainer_config_process`) finds no difference.\n"
    o.output.write_text(HEAD.format(plans=o.plans) + "\n".join(rows) + "\n" + both)


def _kept(one: Round) -> bool:
    """Whether every comment of the file is still there."""

    def comments(text: str) -> list[str]:
        return sorted(line[line.index("# ") :] for line in text.splitlines() if "# " in line)

    return comments(one.written.before) == comments(one.written.text)


HEAD = """# Config writers

Made by `python -m benchmarks run` (`benchmarks/config_writers.py`). For every format {plans} seeded plans: a file is brought to one
execution, read, changed to another one and read again. *Same*: it reads back as the execution that was wanted; what the format
cannot say (each with its reason) stays as it was. *By hand*: a setting that the format can say was given up. *Library*: the
library loads the written file and reports what the reader reads: batch sizes, processes, ZeRO stage, offload, number format.

| format | texts | same | by hand | comments kept | library says the same | library |
|---|---|---|---|---|---|---|
"""


if __name__ == "__main__":
    main()

"""Hostile files of one type, guided by coverage: mutants that reach new code are kept and mutated
further (atheris, libFuzzer).

`tools/fuzz.py` starts it where atheris is installed. Findings are kept as there, and do not end the
run; a line of JSON on the standard output says at the end what was tried.

    PYTHONPATH=.fuzz python tools/fuzz_guided.py deepspeed.json --seconds 60 --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

sys.path.insert(0, str(Path(__file__).parent))
from fuzz import Attempts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("type")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with atheris.instrument_imports(include=["trainpace"]):
        import trainpace.cli.program  # noqa: F401  # before the types of files import it
    with tempfile.TemporaryDirectory() as place:
        attempts = Attempts(asked.type, asked.seed, Path(place))
        kind, before = attempts.kind, os.dup(1)

        def one(data: bytes) -> None:
            attempts.attempt(data)
            if attempts.cases >= asked.cases or attempts.seconds >= asked.seconds:
                os.write(before, json.dumps(attempts.tried()._asdict()).encode() + b"\n")
                os._exit(0)

        def mutated(data: bytes, _most: int, seed: int) -> bytes:
            from hostile.mutations import mutant  # type: ignore[import-not-found]

            return bytes(mutant(data or kind.example, kind.form, random.Random(seed)))

        corpus = Path(place, "corpus")
        corpus.mkdir()
        (corpus / "example").write_bytes(kind.example)
        # libFuzzer's own limits are wide: the types of files have their own, and a run ends by its
        # time
        flags: list[Any] = [
            "-timeout=60",
            "-rss_limit_mb=0",
            "-max_len=1000000",
            f"-seed={asked.seed or 1}",
            "-verbosity=0",
        ]
        atheris.Setup([sys.argv[0], *flags, str(corpus)], one, custom_mutator=mutated)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

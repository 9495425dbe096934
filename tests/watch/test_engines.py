"""Scripts of every engine, unchanged under the recorder: each rank is seen, and trains as it does without."""

import json
import sys
from pathlib import Path

import pytest

from trainpace.watch import COMMAND_FILE, environment, read_recording

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "planted"))
from cases import CASES  # noqa: E402

from launch import environment as engines  # noqa: E402
from launch import run  # noqa: E402

NEEDS_ENGINES = pytest.mark.skipif(not (ROOT / ".engines").is_dir(), reason="make .engines/installed")
EXPECTED = {
    "lightning_checkpoint": ("data", "forward", "backward", "optimizer", "checkpoint"),
    "hf_evaluate": ("data", "forward", "backward", "optimizer", "evaluation"),
    "accelerate_compressed": ("data", "forward", "backward", "optimizer"),
    "fsdp2_gather": ("data", "forward", "backward", "optimizer", "communication"),
    "deepspeed_zero2": ("data", "forward", "backward", "optimizer", "communication"),
    "ddp_accumulation": ("data", "forward", "backward", "optimizer"),
}


def losses(case, kept: Path, env: dict[str, str] | None = None) -> list[str]:
    """Every rank's losses after one run; none where it failed, as gloo does now and then without any recorder."""
    outcome = run(case, env={**(env or {}), "LOSSES": str(kept)})
    found = [path.read_text() for path in sorted(kept.parent.glob(f"{kept.name}*"))]
    if not found:
        print(outcome.output[-4000:])
    return found


@NEEDS_ENGINES
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_an_engines_script_is_recorded_and_trains_the_same(name, tmp_path):
    case = next(c for c in CASES if c.name == name)
    bare = losses(case, tmp_path / "bare") or losses(case, tmp_path / "bare")
    for trails in (tmp_path / "trails", tmp_path / "once more"):
        trails.mkdir()
        (trails / COMMAND_FILE).write_text(json.dumps({"command": [name], "seconds": 1.0, "exit_code": 0}))
        if watched := losses(case, tmp_path / "watched", environment(trails, engines())):
            break
    ranks = read_recording(trails).ranks
    assert bare
    assert watched == bare
    assert [r.rank for r in ranks] == list(range(case.ranks))
    for rank in ranks:
        assert rank.steps > 20
        assert rank.micro_steps == case.micro_steps
        assert sum(rank.parts_ms.values()) == pytest.approx(rank.step_ms)
        assert all(rank.parts_ms[part] > 0 for part in EXPECTED[name])

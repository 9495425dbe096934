"""A plan written into all files of a training is complete and free of contradictions."""

import random
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from configs.test_properties import mutate
from configs.test_readers import EXAMPLES
from trainpace.configs import Changes, rewrite, settings_of
from trainpace.configs.files import write_changes
from trainpace.configs.settings import AUTOCAST_OF
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "planted"))
from config_plans import FILES, MAY_BE_SILENT, SETS, execution, texts_of, together, varied


def same(name, a, b):
    return a == b or (name == "precision" and AUTOCAST_OF.get(a, a) == AUTOCAST_OF.get(b, b))


@pytest.mark.parametrize("kind", SETS)
def test_rewritten_files_together_state_the_plan(kind):
    rng = random.Random(kind)
    compared = 0
    for _ in range(12):
        first = execution(rng)
        started = rewrite(SETS[kind], Changes(before=Execution(), after=first))
        before, clash = together(texts_of(started), first)
        assert not clash or "pp" in started.left, clash
        if before is None:
            continue
        wanted = varied(before, rng)
        done = rewrite(texts_of(started), Changes(before=before, after=wanted))
        wrote = {name for f in done.files for name in f.wrote}
        silent = replace(
            before, **{name: getattr(Execution(), name) for name in wrote & MAY_BE_SILENT}
        )
        found, clash = together(texts_of(done), silent)
        # no file states the pipeline stages, so the data-parallel size for the check is unknown
        assert not clash or done.left.keys() & {"pp", "tp", "cp"}, clash
        if found is not None:
            read, expected, was = settings_of(found), settings_of(wanted), settings_of(before)
            for name in expected.keys() - {"gpus_per_node", "world_size", "global_batch"}:
                assert same(name, read[name], was[name] if name in done.left else expected[name]), (
                    name,
                    done.left,
                )
            compared += 1
    assert compared >= 6


def test_setting_that_one_file_cannot_express_is_not_written():
    texts = {
        "args.yaml": "per_device_train_batch_size: 4\nbf16: true\nfp16: false\n",
        "acc.yaml": "compute_environment: LOCAL_MACHINE\nnum_processes: 8\nmixed_precision: bf16\n",
    }
    before = Execution(micro_batch=4, nproc_per_node=8, precision="amp_bf16")
    done = rewrite(
        texts, Changes(before=before, after=replace(before, precision="fp8", micro_batch=8))
    )
    assert done.left.keys() == {"precision"}
    assert texts_of(done) == {
        **texts,
        "args.yaml": texts["args.yaml"].replace("size: 4", "size: 8"),
    }


def test_batch_sizes_are_written_only_with_their_process_count():
    # the global batch stays the same, so halving the accumulation without doubling the processes would be wrong
    texts = {
        "args.yaml": "per_device_train_batch_size: 4\ngradient_accumulation_steps: 8\n",
        "trainer.yaml": "trainer:\n  devices: [0, 1]\n",
    }
    before = Execution(micro_batch=4, accumulation=8, nproc_per_node=2)
    done = rewrite(
        texts, Changes(before=before, after=replace(before, accumulation=4, nproc_per_node=4))
    )
    assert texts_of(done) == texts
    assert "by hand" in done.left["nproc_per_node"]
    assert done.left["accumulation"].endswith("nproc_per_node")
    alone = rewrite(
        {"args.yaml": texts["args.yaml"]},
        Changes(before=before, after=replace(before, accumulation=4, nproc_per_node=4)),
    )
    assert "the batch sizes are for 1 x 4 processes" in alone.left["nproc_per_node"]


def damaged(seed):
    rng = random.Random(seed)
    everything = [*EXAMPLES.items(), *(pair for files in FILES.values() for pair in files.items())]
    file, text = rng.choice(everything)
    for _ in range(rng.randrange(1, 4)):
        text = mutate(text, rng) or "x"
    changes = Changes(before=Execution(), after=execution(rng), workers=3)
    try:
        written = write_changes(text, file, changes)
    except TrainpaceError as error:
        assert file in str(error)
        return 0
    assert (
        changes.names - {"global_batch", "world_size", "gpus_per_node"}
        <= set(written.wrote) | written.left.keys()
    )
    return 1


@pytest.mark.parametrize("tens", range(10))
def test_damaged_files_never_raise_unexpected_errors(tens):
    assert sum(damaged(seed) for seed in range(10 * tens, 10 * tens + 10)) >= 1


@pytest.mark.slow
def test_many_damaged_files_never_raise_unexpected_errors():
    assert sum(damaged(seed) for seed in range(1000, 2500)) > 300

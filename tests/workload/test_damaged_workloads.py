"""A damaged workload file is read correctly or rejected with a one-line error."""

import copy
import json
import random

import pytest

from nouns import blocks, forecast, workload
from trainpace.core import records
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.workload import Workload

DATA = json.loads(records.to_json(workload()))
DATA["forms"]["half"]["blocks"] = {
    name: value
    for name, value in json.loads(records.to_json(blocks())).items()
    if name not in ("record", "schema_version")
}
WRONG = [None, -1, 1e308, "x", [], {}, 0, True, -5e20, [[1]], 1.5, 10**30]


def paths(tree, path=()):
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield (*path, key)
            yield from paths(tree[key], (*path, key))


PATHS = list(paths(DATA))


@pytest.mark.parametrize("seed", range(20))
def test_damaged_workload_is_read_or_rejected_in_one_line(seed):
    rng = random.Random(seed)
    for _ in range(20):
        data = copy.deepcopy(DATA)
        *parents, last = rng.choice(PATHS)
        place = data
        for key in parents:
            place = place[key]
        if rng.random() < 0.2:
            del place[last]
        else:
            place[last] = rng.choice(WRONG)
        try:
            damaged = records.from_json(json.dumps(data), Workload, "w.json")
            for precision in ("fp32", "amp_fp16", "bf16"):
                forecast(
                    damaged,
                    Execution(micro_batch=8, precision=precision),
                    Cluster(device=find_device("A100")),
                )
        except TrainpaceError as error:
            assert len(str(error).splitlines()) == 1


BLOCKS = [
    ("operator_counts", [1, 0]),
    ("operator_counts", [2, 0, 0]),
    ("operator_counts", [-1, 0, 0]),
    ("operator_counts", [0.5, 0, 0]),
    ("roles", ["column", ""]),
    ("roles", ["diagonal", "", ""]),
    ("count", 0),
    ("heads", 7),
    ("parameters", -1),
    ("parameters", 1),
    ("saved_bytes", [1e30, 0]),
    ("saved_bytes", [0]),
    ("working_bytes", [-5, 1]),
    ("tied_parameters", 1e300),
]


@pytest.mark.parametrize(("field", "value"), BLOCKS)
def test_damaged_blocks_are_rejected(field, value):
    data = copy.deepcopy(DATA)
    records.from_json(json.dumps(data), Workload)
    data["forms"]["half"]["blocks"][field] = value
    with pytest.raises(TrainpaceError) as caught:
        records.from_json(json.dumps(data), Workload)
    assert len(str(caught.value).splitlines()) == 1


def test_workload_files_without_blocks_still_load():
    data = copy.deepcopy(DATA)
    del data["forms"]["half"]["blocks"]
    assert records.from_json(json.dumps(data), Workload).forms["half"].blocks is None

"""``python -m trainpace.verify.rank REQUEST.json``: the trainings of one rank of several, started by a launcher."""

import json
import os
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from trainpace.errors import TrainpaceError
from trainpace.process import explain
from trainpace.records import write_whole
from trainpace.verify.question import Question, Variant
from trainpace.verify.training import train


def _main(request_file: Path) -> int:
    request = json.loads(request_file.read_text())
    question = msgspec.convert(request["question"], Question)
    folder, rank = Path(request["folder"]), int(os.environ["RANK"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // question.ranks))
    dist.init_process_group("gloo")
    for variant in msgspec.convert(request["variants"], list[Variant]):
        try:
            train(question, variant, folder, rank)
            dist.barrier()
        except Exception as error:  # the others wait for this rank in vain, so that the job ends here
            sentence = str(error) if isinstance(error, TrainpaceError) else explain(error)
            write_whole(folder / f"{variant.key}.failed-{rank}", sentence)
            return 1
    if rank == 0:
        write_whole(request["result"], "{}")
    dist.barrier()  # no rank goes while another still talks to it
    return 0


if __name__ == "__main__":
    _code = _main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_code)  # torch may abort in its own exit

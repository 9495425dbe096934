"""``collective_rank.py ANSWER.json REQUEST``: one rank that times collectives between hosts.

REQUEST is JSON with `collectives`, `sizes_bytes` and `repeats`. Rank 0 writes the times to ANSWER.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from trainpace.core.records import to_jsonable, write_whole
from trainpace.measure.collectives import join, time_collectives

if __name__ == "__main__":
    _request = json.loads(sys.argv[2])
    join()
    _timed = time_collectives(**_request)
    if dist.get_rank() == 0:
        write_whole(Path(sys.argv[1]), json.dumps([to_jsonable(t) for t in _timed]))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch may abort in its own exit

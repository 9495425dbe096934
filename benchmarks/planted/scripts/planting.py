"""What every planted script shares: known waits and busy loops, and a record of the truth when one is asked for.

LOSSES=PATH keeps the losses in full; STEP_TIMES=PATH keeps when each optimizer step ended and what was really planted in
this process, in milliseconds (worker processes keep nothing). With several ranks each writes PATH.RANK. EACH_STEP=PATH has what
was planted in each step, a line a step, also of a script that is ended before its end.
"""

import json
import os
import time

_ends: list[float] = []
_planted: list[tuple[float, float]] = []


def wait(ms: float) -> None:
    """Stands for storage and network: the process sleeps, and wakes on time rather than when the kernel cares to."""
    start = time.perf_counter()
    time.sleep(max(ms - 0.2, 0) / 1e3)
    _spin(start, ms)


def busy(ms: float) -> None:
    """Stands for work of the CPU, known to the hundredth of a millisecond."""
    _spin(time.perf_counter(), ms)


def _spin(start: float, ms: float) -> None:
    while (now := time.perf_counter()) < start + ms / 1e3:
        pass
    _planted.append((start, 1e3 * (now - start)))


def report(losses: list) -> None:
    """Says how the training went, and keeps what was asked for: before the ranks part, since gloo may abort on leaving."""
    values = [float(loss) for loss in losses]
    print(f"{len(values)} losses, first {values[0]!r}, last {values[-1]!r}", flush=True)
    for variable, kept in (
        ("LOSSES", values),
        ("STEP_TIMES", {"ends": _ends, "planted": _planted}),
    ):
        if path := os.environ.get(variable):
            with open(
                f"{path}.{os.environ['RANK']}" if "RANK" in os.environ else path, "w"
            ) as file:
                json.dump(kept, file)


if os.environ.get("STEP_TIMES"):
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: _ends.append(time.perf_counter()))

if path := os.environ.get("EACH_STEP"):
    from torch.optim.optimizer import register_optimizer_step_post_hook

    _each = open(f"{path}.{os.environ.get('RANK', os.environ.get('SLURM_PROCID', '0'))}", "w")  # noqa: SIM115
    _told = 0

    def _tell(*_: object) -> None:
        global _told
        _each.write(f"{sum(ms for _, ms in _planted[_told:])}\n")
        _each.flush()
        _told = len(_planted)

    register_optimizer_step_post_hook(_tell)

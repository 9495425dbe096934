"""Several ranks of one training: common decisions, the wait for gradients, and link traffic."""

import contextlib
import datetime
import json
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

from trainpace.watch.inside.event_log import COMMUNICATION, Step
from trainpace.watch.inside.recorder import Recorder, get_ident

GRADIENTS = "gradients"
"""Name of the last part of a backward pass, in which only the reduction of gradients is left."""
IN_A_GROUP, STARTED = " in a group", " started"
"""Suffixes of a collective's name: only some ranks take part, or the script waits for it later."""
LINKS_AT, LINKS_AGAIN_EVERY = (3, 10, 20, 40, 80), 1000
"""Steps after which the traffic of the connections is logged, and the later interval."""
_TCP_INFO_BYTES, _ACKED, _BUSY = 192, 120, 168
"""Size of struct tcp_info and offsets of two fields (linux/tcp.h, Linux 4.10 and later).

The first field counts the bytes that the peer acknowledged. The second field holds the microseconds
with data in flight. After it come the microseconds in which the peer's window was full. All are
64-bit numbers.
"""


def process_group() -> Any:
    """Return torch.distributed if it is initialised, else None."""
    distributed: Any = sys.modules.get("torch.distributed")
    ready = distributed and distributed.is_available() and distributed.is_initialized()
    return distributed if ready else None


def is_distributed() -> bool:
    """Return True if several ranks train together."""
    distributed = process_group()
    return distributed is not None and int(distributed.get_world_size()) > 1


def agreed(about: str, answer: Any, patience_s: float) -> Any:
    """Return rank 0's answer on every rank.

    All ranks must act on the same answer. In different branches they would wait for each other.

    Args:
        about: Name of the decision, unique in the run.
        answer: This rank's own answer, used for a single rank or if rank 0's does not arrive.
        patience_s: Seconds to wait for rank 0.
    """
    if not is_distributed():
        return answer
    with contextlib.suppress(Exception):
        distributed = process_group()
        store, key = distributed.distributed_c10d._get_default_store(), f"trainpace-trials-{about}"
        if distributed.get_rank() == 0:
            store.set(key, json.dumps(answer))
        else:
            store.wait([key], datetime.timedelta(seconds=patience_s))
            return json.loads(store.get(key))
    return answer


def note_rank(recorder: Recorder) -> None:
    """Log this process's rank, the world size and the backend."""
    if (distributed := process_group()) is not None:
        recorder.log.note(
            rank=distributed.get_rank(),
            world_size=distributed.get_world_size(),
            backend=str(distributed.get_backend()),
        )


def collective_name(name: str, args: Any, kwargs: Any) -> str:
    """Return the name of a collective, with a suffix if not all ranks leave it together."""
    whole, group = sys.modules["torch.distributed"].group.WORLD, kwargs.get("group")
    groups = [group] if group is not None else []
    groups += [value for value in args if type(value).__name__ == "ProcessGroup"]
    if any(one is not whole for one in groups):
        name += IN_A_GROUP
    started = kwargs.get("async_op") or (args and args[-1] is True)
    return name + STARTED if started else name


class Gradients:
    """Charges the end of a backward pass to communication, on the training thread.

    The charge begins when this rank's own gradients are computed, which is when the rank arrives.
    It ends when the gradients of all ranks are reduced. This is visible only if the host itself
    waits, as with Gloo.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.depth: int | None = None
        self.inside = False

    def reduce(self, backward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a backward function, and charge its wait for the gradients' reduction."""
        recorder = self.recorder
        if self.inside or recorder.synchronizes is None or not recorder.synchronizes():
            return backward(*args, **kwargs)
        handle, self.inside = None, True
        with contextlib.suppress(Exception):
            handle = self._ask(args[0] if args else next(iter(kwargs.values())))
        try:
            return backward(*args, **kwargs)
        finally:
            self.inside = False
            if self.depth is not None:
                recorder.leave(self.depth, GRADIENTS)
                self.depth = None
            if handle is not None:
                handle.remove()

    def _ask(self, losses: Any) -> Any:
        """Ask autograd to call `_arrive` after the last gradient.

        The callback is queued with the loss's own gradient, which is the first. Autograd runs
        callbacks in order. DistributedDataParallel queues its callback later, so it waits for the
        reduction after `_arrive`.
        """
        losses = losses if isinstance(losses, list | tuple) else (losses,)
        loss = next(tensor for tensor in losses if tensor.grad_fn is not None)
        engine = sys.modules["torch.autograd"].Variable._execution_engine
        return loss.register_hook(lambda _: engine.queue_callback(self._arrive))

    def _arrive(self) -> None:
        # If a device's thread ends the backward pass, the host does not wait for the reduction.
        if self.inside and self.depth is None and get_ident() == self.recorder.thread:
            self.depth = self.recorder.enter(COMMUNICATION)


def elements(args: Any, kwargs: Any) -> int:
    """Return the size of the largest input tensor.

    For a language model, this is the number of tokens.
    """
    return max((_elements(value, 2) for value in (*args, *kwargs.values())), default=0)


def _elements(value: Any, deeper: int) -> int:
    # A subclass of Tensor may belong to a traced graph. A method call would extend the graph.
    if type(value) is sys.modules["torch"].Tensor:
        return int(value.numel())
    if deeper and isinstance(value, list | tuple | dict):
        inside = value.values() if isinstance(value, dict) else value
        return max((_elements(one, deeper - 1) for one in inside), default=0)
    return 0


def note_links(recorder: Recorder, step: Step) -> None:
    """Log the size of the step's inputs, and in some steps the traffic of the connections."""
    size, recorder.input_elements = recorder.input_elements, 0
    is_due = step.number in LINKS_AT or step.number % LINKS_AGAIN_EVERY == 0 < step.number
    if not (size or is_due):
        return
    among_others = is_distributed()
    if recorder.spans_on and size and (among_others or recorder.losses is not None):
        recorder.log.note(input_elements=size)
    if is_due and among_others:
        recorder.log.note(links=list(links()), link_steps=step.number)


def links() -> Iterator[tuple[str, str, int, int]]:
    """Yield the traffic of each TCP connection to another host. Only Linux reports it.

    Yields:
        (own address, peer's address, acknowledged bytes, microseconds with data in flight).
    """
    # With a default timeout, Python would set it on the connection, which shares it with the copy.
    if socket.getdefaulttimeout() is not None:
        return
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, struct.error):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    yield from _traffic_of(int(name))


def _traffic_of(handle: int) -> Iterator[tuple[str, str, int, int]]:
    with socket.socket(fileno=os.dup(handle)) as copy:
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
        if not is_tcp or copy.type != socket.SOCK_STREAM:
            return
        # An IPv4 address may be written as IPv6.
        own, peer = (
            at[0].removeprefix("::ffff:") for at in (copy.getsockname(), copy.getpeername())
        )
        if own == peer or own == "::1" or own.startswith("127."):
            return
        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (acked,) = struct.unpack_from("=Q", info, _ACKED)
        busy, window_full = struct.unpack_from("=QQ", info, _BUSY)
        yield own, peer, acked, max(0, busy - window_full)

"""Several ranks in one training: agreement among them, waits for gradients, and the speed of their links."""

import contextlib
import datetime
import functools
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


def process_group() -> Any:
    """torch.distributed once it is initialised, None before or without it."""
    distributed: Any = sys.modules.get("torch.distributed")
    return (
        distributed
        if distributed and distributed.is_available() and distributed.is_initialized()
        else None
    )


def is_distributed() -> bool:
    distributed = process_group()
    return distributed is not None and int(distributed.get_world_size()) > 1


def agreed(about: str, answer: Any, patience_s: float) -> Any:
    """The first rank's answer for all: ranks that took different branches would wait for each other until a timeout."""
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


GRADIENTS = "gradients"
"""The name of the stretch of a backward pass in which only the exchange of gradients is left."""
IN_A_GROUP, STARTED = " in a group", " started"
"""Behind the name of a collective that not all ranks take part in, and of one that is waited for later."""
LINKS_AT, LINKS_AGAIN_EVERY = (3, 10, 20, 40, 80), 1000
_TCP_INFO_BYTES, _ACKED, _BUSY = 192, 120, 168
"""struct tcp_info of linux/tcp.h: bytes that the peer acknowledged; then microseconds with something on its way, and of them
those for which the peer's window was full, as 64-bit numbers. Linux 4.10 and later have all of it."""


def collective_name(name: str, args: Any, kwargs: Any) -> str:
    """A collective's name, with what tells whether all ranks leave it together."""
    group = kwargs.get("group")
    whole = sys.modules["torch.distributed"].group.WORLD
    if (group is not None and group is not whole) or any(
        type(a).__name__ == "ProcessGroup" and a is not whole for a in args
    ):
        name += IN_A_GROUP
    started = kwargs.get("async_op") or (args and args[-1] is True)
    return name + STARTED if started else name


class Gradients:
    """Charges the end of a backward pass to communication: from when this rank's own gradients are computed, which is where
    it arrives, to when all ranks' are exchanged. Only where the host itself waits, as for Gloo. For the training thread alone.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.depth: int | None = None
        self.inside = False

    def within(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = self.recorder
            if self.inside or recorder.synchronizes is None or not recorder.synchronizes():
                return backward(*args, **kwargs)
            handle, self.inside = None, True
            with contextlib.suppress(Exception):
                handle = self._asks(args[0] if args else next(iter(kwargs.values())))
            try:
                return backward(*args, **kwargs)
            finally:
                self.inside = False
                if self.depth is not None:
                    recorder.leave(self.depth, GRADIENTS)
                    self.depth = None
                if handle is not None:
                    handle.remove()

        return call

    def _asks(self, of: Any) -> Any:
        """Have the loss's own gradient, the first to be computed, ask autograd to say when the last one is. Autograd calls what
        was asked for in order, so that DistributedDataParallel, which asks later, waits for the exchange after that.
        """
        loss = next(
            t for t in (of if isinstance(of, list | tuple) else (of,)) if t.grad_fn is not None
        )
        engine = sys.modules["torch.autograd"].Variable._execution_engine
        return loss.register_hook(lambda _: engine.queue_callback(self._arrives))

    def _arrives(self) -> None:
        # a device's thread may end a backward pass; the host then does not wait for the exchange either
        if self.inside and self.depth is None and get_ident() == self.recorder.thread:
            self.depth = self.recorder.enter(COMMUNICATION)


def elements(args: Any, kwargs: Any) -> int:
    """Numbers in the largest tensor that a model is called with: for a language model, its tokens."""
    return max((_elements(value, 2) for value in (*args, *kwargs.values())), default=0)


def _elements(value: Any, deeper: int) -> int:
    # a tensor of another kind may stand for one in a graph that is being traced, to which a question adds something
    if type(value) is sys.modules["torch"].Tensor:
        return int(value.numel())
    if deeper and isinstance(value, list | tuple | dict):
        inside = value.values() if isinstance(value, dict) else value
        return max((_elements(one, deeper - 1) for one in inside), default=0)
    return 0


def note(recorder: Recorder, step: Step) -> None:
    """After a step: what its inputs held, of one of several ranks or in a trial, and now and then what this rank's connections
    have carried so far."""
    held, recorder.input_elements = recorder.input_elements, 0
    asks = step.number in LINKS_AT or (step.number and step.number % LINKS_AGAIN_EVERY == 0)
    if not (held or asks):
        return
    among_others = is_distributed()
    if recorder.spans_on and held and (among_others or recorder.losses is not None):
        recorder.log.note({"input_elements": held})
    if asks and among_others:
        recorder.log.note({"links": list(links()), "link_steps": step.number})


def links() -> Iterator[tuple[str, str, int, int]]:
    """(own address, the peer's, bytes that it acknowledged, microseconds in which some were on their way) of each of this
    process's TCP connections to other hosts. Only Linux says that."""
    if (
        socket.getdefaulttimeout() is not None
    ):  # Python would give it to the connection, which the copy shares
        return
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, struct.error):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if (
                        copy.family not in (socket.AF_INET, socket.AF_INET6)
                        or copy.type != socket.SOCK_STREAM
                    ):
                        continue
                    own, peer = (_address(at[0]) for at in (copy.getsockname(), copy.getpeername()))
                    if own == peer or own == "::1" or own.startswith("127."):
                        continue
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    (acked,) = struct.unpack_from("=Q", info, _ACKED)
                    busy, window_full = struct.unpack_from("=QQ", info, _BUSY)
                    yield own, peer, acked, max(0, busy - window_full)


def _address(text: str) -> str:
    """An address of IPv4 that came as one of IPv6 is the same."""
    return text.removeprefix("::ffff:")

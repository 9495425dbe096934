"""Connections that ask nothing, or do not take what they asked for, are closed, so that they keep nobody out."""

from __future__ import annotations

import asyncio
from collections import Counter
from operator import attrgetter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 256
"""Open at once; beyond, the answer is 503."""
CROWDED = 224
"""From so many on, a new one takes the place of one that asks nothing."""
AT_ONCE = 32
"""Connections that are taken before those that are there get their turn again: asyncio's meaning of a backlog. As
many more wait in Linux's queue; whoever comes then is let in a second later, when TCP tries again."""
ASK_S = 15.0
"""For the head of a request, from the moment when the connection is free."""
ANSWER_S = 60.0
"""For the answer, until its reader has taken it."""


class Connection(H11Protocol):
    """uvicorn's, which waits for ever for the first request and for a reader of its answer."""

    _limit: asyncio.TimerHandle | None = None
    free_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= CROWDED:
            make_room(self.connections)
        super().connection_made(transport)
        self._wait_for_request()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.is_free:
            self._allow(ANSWER_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_free:  # a pipelined request may have begun
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    @property
    def is_free(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def _wait_for_request(self) -> None:
        self.free_since_s = self.loop.time()
        self._allow(ANSWER_S if self.transport.get_write_buffer_size() else ASK_S)

    def _allow(self, seconds: float) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self.loop.call_later(seconds, self.transport.abort)


def make_room(connections: set[Any]) -> None:
    """Close a free connection, and count it no longer: one that has never asked before one that has, then of the address that
    holds most of them, then the one that has been free the longest."""
    free = [c for c in connections if c.is_free]
    if free:
        never = [c for c in free if c.cycle is None] or free
        if (
            len({c.address for c in never}) > 1
        ):  # a crowd from one address asks this hundreds of times a second
            held = Counter(c.address for c in connections)
            most = max(held[c.address] for c in never)
            never = [c for c in never if held[c.address] == most]
        first = min(never, key=attrgetter("free_since_s"))
        connections.discard(first)
        first.transport.abort()

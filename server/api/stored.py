"""Responses that are kept for a while: for `previous_response_id`, and to be looked at again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

Json = dict[str, Any]
CHAIN = "moesaic.chain"  # in the scope of a request: what the names begin with that its connection alone may look up
_encode = msgspec.json.Encoder().encode


class Stored(msgspec.Struct):
    """As JSON. items: of the conversation up to and with this response's output. num_input: those before its output.
    events: all that were sent, of a response that ran in the background and was streamed."""

    response: bytes
    items: bytes
    num_input: int
    events: bytes = b""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + len(self.events)


class ResponseStore:
    """The newest, as far as both bounds allow, and those that still run, which the bounds of requests in flight limit:
    a client can look at what it waits for, and end it."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._running: dict[str, Stored] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: Json, items: list[Json], chain: str = "", running: bool = False) -> None:
        """In place of what is kept under its id, behind `chain`. items: before its output. running: it will be put
        again when it has ended."""
        stored = Stored(_encode(response), _encode([*items, *response["output"]]), len(items))
        if running:
            self._running[response["id"]] = stored
        else:
            self._put(chain + response["id"], stored)

    def put_events(self, name: str, events: bytes) -> None:
        """Beside a response that is kept; they are left out where they are too many."""
        stored = self._kept.get(name)
        if stored is not None and stored.size + len(events) <= self._max_bytes:
            self._put(name, msgspec.structs.replace(stored, events=events))

    def _put(self, name: str, stored: Stored) -> None:
        self.drop(name)
        if not self._max_count or stored.size > self._max_bytes:
            return
        self._kept[name] = stored
        self.num_bytes += stored.size
        while len(self._kept) > self._max_count or self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= oldest.size

    def get(self, name: str) -> Stored | None:
        return self._running.get(name) or self._kept.get(name)

    def drop(self, name: str) -> bool:
        self._running.pop(name, None)
        stored = self._kept.pop(name, None)
        if stored is None:
            return False
        self.num_bytes -= stored.size
        return True

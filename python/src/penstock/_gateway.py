"""Gateways: the side of a front end in a prefill/decode cluster. See _cluster."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import enum
import json
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from ctypes import byref
from typing import NamedTuple

from penstock import _abi, errors
from penstock._checks import _ID_BYTES, _address, _chain, _count, _ms, _numbers, _text
from penstock._cluster import _endpoint, _Path, _Queue, _string
from penstock._keys import Keys
from penstock._store import Namespace

__all__ = ["Event", "EventKind", "Gateway", "Request"]


class EventKind(enum.IntEnum):
    """A step of a request."""

    MATCHED = 1
    """The cached prefix is known: ``hit``, ``epoch``."""
    WAITING = 2
    """The planner does not answer: ``reason``. The request is submitted again until the planner answers; the engines
    continue."""
    ACCEPTED = 3
    """The planner has accepted the request."""
    STARTED = 4
    """Both engines are chosen: ``prefill``, ``decode``, ``attempt``, ``epoch``, ``read_by_prefill``, ``read_by_decode``."""
    PREFILLED = 5
    """The decode engine has the prompt's KV. The event may be left out shortly before DONE."""
    REPLANNED = 6
    """The planner plans the request again: ``reason``. STARTED follows again."""
    DONE = 7
    """The decode engine has completed the output."""
    FAILED = 8
    """The request has failed: ``error``, a RefusedError if the planner refuses the request."""


class Request:
    """A request of a Gateway, until its last event, DONE or FAILED, has been taken."""

    def __init__(self, gateway: Gateway, id: str) -> None:
        self._gateway = gateway
        self._handle = ctypes.c_uint64(0)
        self._inbox: asyncio.Queue[Event] | None = None  # of ``Gateway.serve``
        self._loop: asyncio.AbstractEventLoop | None = None
        self.id = id

    def cancel(self) -> None:
        """Give the request up, and do not wait for its end. The planner aborts it on its engines.

        The last event is FAILED with CanceledError, or DONE if the request had ended before. After that it has no effect.
        """
        core = self._gateway._core
        _abi.check_process(core.pid)
        with contextlib.suppress(errors.ClosedError):
            _abi.call(core.lib.penstock_request_cancel, self._handle.value)

    def __repr__(self) -> str:
        return f"<Request {self.id}>"


class Event(NamedTuple):
    """An event of a request. Fields that the kind does not name are 0, empty or None."""

    kind: EventKind
    request: Request
    hit: int = 0
    """The cached prefix, in tokens."""
    epoch: int = 0
    """MATCHED: the version of its weights. STARTED: of those that the request is computed with; 0: from a planner of an earlier version."""
    prefill: str = ""
    """The name of the prefill engine."""
    decode: str = ""
    """The name of the decode engine."""
    read_by_prefill: int = 0
    """How many tokens of the cached prefix the prefill engine's machine reads."""
    read_by_decode: int = 0
    """How many tokens of the cached prefix the decode engine's machine reads."""
    reason: str = ""
    """WAITING, REPLANNED: why."""
    error: errors.Error | None = None
    """FAILED: why."""
    attempt: str = ""
    """STARTED: the name that both engines have for the attempt, ``Attempt.name``; empty: from a planner of an earlier version."""


class Gateway(_Queue[Event]):
    """Submits requests to the planner, and has a queue of their events.

    ``ns`` has the KV of the model, with chained keys: the gateway finds the cached prefix of each prompt there. ``epoch`` is a
    live epoch that all requests use; by default it is the newest one. At most ``requests_max`` (1024) requests run or have
    events that were not taken. The front end itself sends the prompt's text to an engine and takes the output.
    """

    _NAME = "gateway"
    _RAW = _abi.CEvent

    def __init__(
        self,
        ns: Namespace,
        planner: str,
        *,
        epoch: int = 0,
        requests_max: int = 0,
        token: str | None = None,
        token_file: _Path | None = None,
        ca_file: _Path | None = None,
        cert_file: _Path | None = None,
        key_file: _Path | None = None,
        insecure: bool = False,
    ) -> None:
        super().__init__(ns._core)
        self._ns = ns
        self._planner = planner
        self._requests: dict[int, Request] = {}
        self._readers: dict[asyncio.AbstractEventLoop, _Reader] = {}
        endpoint = _endpoint(planner, token, token_file, ca_file, cert_file, key_file, insecure)
        options = _abi.CGatewayOptions(
            size=ctypes.sizeof(_abi.CGatewayOptions),
            planner=ctypes.pointer(endpoint),
            epoch=_count("epoch", epoch, 64),
            requests_max=_count("requests_max", requests_max, 31),
        )
        self._core.open_handle()
        self._open(ns, options)

    def submit(
        self,
        id: str,
        tokens: Iterable[int] | None = None,
        *,
        prompt: int = 0,
        ids: Keys | Iterable[bytes] | None = None,
        output: int = 0,
        deadline: float | None = None,
        resident: Mapping[str, int] | None = None,
        extra: object = None,
    ) -> Request:
        """Submit a request and return at once. Its events are in the queue.

        ``id`` must differ from the ids of the other requests in progress. The prompt is ``tokens``, or a number of tokens
        ``prompt`` with the ``ids`` of its full blocks (``Namespace.chain``), which may include blocks of the output.
        ``output`` is the expected number of tokens. After ``deadline`` seconds without engines the planner refuses the
        request. ``resident`` has the number of leading tokens that decode engines have in device memory. ``extra``, of
        JSON's types, is ``Attempt.extra`` on both engines.

        Raises BusyError if ``requests_max`` requests have not ended.
        """
        return self._submit(Request(self, id), tokens, prompt, ids, output, deadline, resident, extra)

    def _submit(
        self,
        request: Request,
        tokens: Iterable[int] | None,
        prompt: int,
        ids: Keys | Iterable[bytes] | None,
        output: int,
        deadline: float | None,
        resident: Mapping[str, int] | None,
        extra: object,
    ) -> Request:
        numbers = _numbers("tokens", () if tokens is None else tokens, 32)
        chain = _chain(() if ids is None else ids)
        try:
            json_extra = None if extra is None else json.dumps(extra).encode()
        except (TypeError, ValueError) as e:
            raise errors.InvalidError(f"extra: {e}") from e
        held = [_abi.CResident(_text("engine", name), _count("tokens of an engine", n, 31)) for name, n in (resident or {}).items()]
        c_prompt = _abi.CPrompt(
            size=ctypes.sizeof(_abi.CPrompt),
            id=_text("id", request.id),
            tokens=_address(numbers),
            ids=chain or None,
            extra=json_extra,
            resident=(_abi.CResident * len(held))(*held),
            n_tokens=len(numbers),
            n_ids=len(chain) // _ID_BYTES,
            prompt_tokens=_count("prompt", prompt, 31),
            output_tokens=_count("output", output, 31),
            deadline_ms=_ms("deadline", deadline),
            n_resident=len(held),
        )
        self._open_handle()
        with self._core.lock:  # no other thread takes an event of the request before it is in the table
            _abi.call(self._core.lib.penstock_gateway_submit, self._open_handle(), byref(c_prompt), byref(request._handle))
            self._requests[request._handle.value] = request
        return request

    def _accept(self, raw: _abi.CEvent) -> None:
        kind = EventKind(raw.kind)
        request = self._requests.get(raw.request)
        if request is None:  # an exception of a signal handler ended its submission
            self._at += 1
            return
        event = Event(
            kind,
            request,
            hit=raw.hit_tokens,
            epoch=raw.epoch,
            prefill=_string(raw.prefill),
            decode=_string(raw.decode),
            read_by_prefill=raw.read_by_prefill,
            read_by_decode=raw.read_by_decode,
            reason=_string(raw.error.message) if kind in (EventKind.WAITING, EventKind.REPLANNED) else "",
            error=_abi.error_of(raw.error) if kind == EventKind.FAILED else None,
            attempt=_string(raw.error.message) if kind == EventKind.STARTED else "",
        )
        if request._inbox is not None and request._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits for the event
                request._loop.call_soon_threadsafe(request._inbox.put_nowait, event)
            self._at += 1
        else:
            # No signal handler runs between these two statements.
            self._at += 1
            self._ready.append(event)
        if kind in (EventKind.DONE, EventKind.FAILED):
            self._requests.pop(raw.request, None)

    async def serve(
        self,
        id: str,
        tokens: Iterable[int] | None = None,
        *,
        prompt: int = 0,
        ids: Keys | Iterable[bytes] | None = None,
        output: int = 0,
        deadline: float | None = None,
        resident: Mapping[str, int] | None = None,
        extra: object = None,
    ) -> AsyncIterator[Event]:
        """Submit a request, and yield its events up to DONE. The arguments are those of ``submit``.

        Raises the error of FAILED. If its task is cancelled, or leaves the loop and closes it (``aclose``), the request is
        cancelled.
        """
        loop = asyncio.get_running_loop()
        request = Request(self, id)
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        request._inbox, request._loop = inbox, loop
        reader = self._watch(loop)
        try:
            self._submit(request, tokens, prompt, ids, output, deadline, resident, extra)
            while True:
                event = await reader.next(inbox)
                if event.error is not None:
                    raise event.error
                yield event
                if event.kind == EventKind.DONE:
                    return
        finally:
            reader.leave()
            if request._handle.value:
                request.cancel()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> _Reader:
        reader = self._readers.get(loop)
        if reader is None:
            self._readers[loop] = reader = _Reader(self, loop, self._dup())
        reader.users += 1
        return reader

    def close(self) -> None:
        """Close the gateway and cancel its requests, whose events are lost.

        A second call does nothing. In a forked child, close does nothing.
        """
        super().close()

    def __repr__(self) -> str:
        return f"<Gateway of {self._planner}{', closed' if self.closed else ''}>"


class _Reader:
    """Reads a gateway's events in a loop, while requests of the loop are served. Only the loop's thread uses it."""

    def __init__(self, gateway: Gateway, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self.users = 0
        self._gateway = gateway
        self._loop = loop
        self._fd = fd
        self._closed: asyncio.Future[None] = loop.create_future()  # resolved when the gateway is closed
        loop.add_reader(fd, self._readable)

    def _readable(self) -> None:
        gateway = self._gateway
        try:
            gateway._open_handle()
            with gateway._core.lock:
                gateway._pull()
        except errors.ClosedError:
            self._loop.remove_reader(self._fd)
            if not self._closed.done():
                self._closed.set_result(None)

    async def next(self, inbox: asyncio.Queue[Event]) -> Event:
        """Return the next event. Raises ClosedError when the gateway is closed."""
        get = asyncio.ensure_future(inbox.get())
        try:
            await asyncio.wait((get, self._closed), return_when=asyncio.FIRST_COMPLETED)
            if get.done():
                return get.result()
            raise errors.ClosedError("the gateway was closed while the request was served")
        finally:
            get.cancel()

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._gateway._readers.pop(self._loop, None)

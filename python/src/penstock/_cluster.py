"""Leaders and gateways: the sides of an engine and of a front end in a prefill/decode cluster.

    Gateway.submit ──► planner ──► Leader: START on a prefill and on a decode engine ──► Attempt
      events       ◄──         ◄── Attempt.progress, stopped, passed, done

A Leader has a queue of the planner's actions for a group of engines. A Gateway has a queue of the events of its requests.
Each queue can be read in three ways: ``wait`` blocks, ``async for`` is for asyncio, and ``drain`` with ``fileno`` is
for other event loops. There are no callbacks into the program. No method waits for the planner, except ``close``.

The engine moves the KV with a Traffic, or itself, for example with the calls of Namespace, whose keys are the ids of the
attempt if the namespace has ``ids=True``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import enum
import json
import logging
import os
import select
import time
import warnings
import weakref
from array import array
from collections.abc import AsyncIterator, Iterable
from ctypes import byref
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from penstock import _abi, errors
from penstock._checks import _ID_BYTES, _count, _ms, _text
from penstock._core import _Core
from penstock._keys import Keys
from penstock._memory import Pins
from penstock._store import Namespace

__all__ = ["Action", "ActionKind", "Attempt", "Leader", "Member", "Part", "Role"]

_log = logging.getLogger("penstock")

_T = TypeVar("_T")
_Self = TypeVar("_Self", bound="_Queue[Any]")
_Path = str | os.PathLike[str]

_DRAIN = 64  # the greatest number of elements that one call returns


class Role(enum.IntEnum):
    """The role of a group of engines in inference."""

    PREFILL = 1
    """The engines compute prompts."""
    DECODE = 2
    """The engines generate output."""


class Part(NamedTuple):
    """The blocks from ``start`` to ``stop`` - 1 of a request's cached prefix."""

    start: int
    stop: int


class Member(NamedTuple):
    """An engine of a group. ``name`` is unique in the cluster."""

    name: str
    device_blocks: int = 0
    """Number of blocks of KV in device memory. 0, only for prefill: the planner does not account for it."""
    address: bytes = b""
    """At most 255 bytes for the engines on the other side, which receive them as ``Attempt.peer_address``."""
    token: bytes = b""
    """At most 255 bytes, which the engines on the other side receive as ``Attempt.peer_token``."""
    prompt_blocks: int = 0
    """The longest prompt that the engine takes. 0: no limit."""
    buffer_bytes: int = 0
    """Size of the host buffer through which KV passes. 0: the planner does not account for it."""
    block_bytes: int = 0
    """Buffer bytes of a block in transit."""
    sums_bytes: int = 0
    """Additional buffer bytes for each block of the prompt."""
    request_bytes: int = 0
    """Additional buffer bytes for each request."""
    prefix_cache_blocks: int = 0
    """Decode: device memory keeps up to this number of blocks of ended requests, for later requests with the same prefix."""


class Nic(NamedTuple):
    """The payload bytes that a NIC has sent and received since its engine's start."""

    name: str
    """At most 255 bytes."""
    bytes_out: int
    bytes_in: int


NICS_MAX = 64
"""PENSTOCK_NICS_MAX."""


class ActionKind(enum.IntEnum):
    """The order to an engine."""

    START = 1
    """Begin the attempt."""
    READ = 2
    """Read the action's part too."""
    CUT = 3
    """Stop the attempt's reads. Report each stopped read with ``Attempt.stopped``."""
    RECOMPUTE = 4
    """Compute the action's part instead of reading it (prefill only)."""
    END = 5
    """End the attempt, and call ``Attempt.done``."""


class _Queue(Generic[_T]):
    """A handle of the library with a queue. The core's lock guards it, so that the store is not closed during a drain."""

    _NAME: str  # of the functions: penstock_NAME_drain
    _RAW: type[ctypes.Structure]  # an element of the library's queue

    def __init__(self, core: _Core) -> None:
        self._core = core
        self._handle = 0
        # The elements that the library returned last. Elements from _at on are not in _ready yet. An exception of a signal
        # handler can end _pull at any point, and the next _pull continues from there.
        self._room = (self._RAW * _DRAIN)()
        self._n = ctypes.c_uint32(0)
        self._at = 0
        self._pulling = False
        self._ready: collections.deque[_T] = collections.deque()
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def _open(self, ns: Namespace, options: ctypes.Structure, pins: Pins | None = None) -> None:
        handle = ctypes.c_uint64(0)
        _abi.call(self._function("open"), ns._ns, byref(options), byref(handle))
        self._handle = handle.value
        # It also runs at the interpreter's exit.
        self._finalizer = weakref.finalize(self, _close, self._core, self._function("close"), self._handle, pins)

    def __enter__(self: _Self) -> _Self:
        self._open_handle()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _function(self, name: str) -> Any:
        return getattr(self._core.lib, f"penstock_{self._NAME}_{name}")

    def _open_handle(self) -> int:
        self._core.open_handle()
        if not self._handle:
            raise errors.ClosedError(f"the {self._NAME} is closed")
        return self._handle

    def _pull(self) -> None:
        """Move the elements of the library's queue to ``_ready``. The lock is held."""
        if self._pulling:  # a signal handler of this thread has interrupted it
            return
        self._pulling = True
        try:
            while True:
                while self._at < self._n.value:
                    self._accept(self._room[self._at])
                self._at = self._n.value = 0
                _abi.call(self._function("drain"), self._open_handle(), self._room, _DRAIN, byref(self._n))
                if not self._n.value:
                    return
        finally:
            self._pulling = False

    def _accept(self, raw: Any) -> None:
        """Increment ``_at``, and append the element raw to ``_ready``. The lock is held."""
        raise NotImplementedError

    def fileno(self) -> int:
        """Return a file descriptor that is readable while elements wait for ``drain``.

        It belongs to the library; do not read it. A duplicate of it is readable after ``close`` too.
        """
        fd = ctypes.c_int32(-1)
        _abi.call(self._function("eventfd"), self._open_handle(), byref(fd))
        return fd.value

    def _dup(self) -> int:
        self._open_handle()  # before the lock, which is never free in a forked child
        with self._core.lock:  # the library must not close the descriptor during the call
            return os.dup(self.fileno())

    def drain(self) -> list[_T]:
        """Return the waiting elements in order, without blocking."""
        self._open_handle()
        with self._core.lock:
            self._pull()
            items = list(self._ready)
            self._ready.clear()
        return items

    def wait(self, timeout: float | None = None) -> list[_T]:
        """Wait until there is an element, and return all elements in order. After ``timeout`` seconds it returns an empty
        list.

        Raises ClosedError when another thread closes the queue during the wait.
        """
        until = None if timeout is None else time.monotonic() + timeout
        fd = self._dup()
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            while not (items := self.drain()):
                left = None if until is None else max(0.0, until - time.monotonic()) * 1000
                if not poll.poll(left):
                    return self.drain()
            return items
        finally:
            os.close(fd)

    def _next(self) -> _T | None:
        self._open_handle()
        with self._core.lock:
            if not self._ready:
                self._pull()
            return self._ready.popleft() if self._ready else None

    async def __aiter__(self) -> AsyncIterator[_T]:
        """Yield elements until the queue is closed."""
        loop, fd = asyncio.get_running_loop(), self._dup()
        try:
            while True:
                try:
                    item = self._next()
                except errors.ClosedError:
                    return
                if item is not None:
                    yield item
                    continue
                readable = asyncio.Event()
                loop.add_reader(fd, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(fd)
        finally:
            os.close(fd)

    @property
    def closed(self) -> bool:
        return not self._handle or not self._core.usable()

    def close(self) -> None:
        """Close the queue. A second call does nothing. In a forked child, close does nothing."""
        if os.getpid() != self._core.pid:
            return
        with self._core.lock:
            self._handle = 0
            self._ready.clear()
        if self._finalizer is not None:
            self._finalizer()

    def __del__(self) -> None:
        if getattr(self, "_handle", 0) and self._core.usable():
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be sent to another process: open one there")


def _close(core: _Core, function: Any, handle: int, pins: Pins | None) -> None:
    """Close a handle, unless its store has been closed, and then release the memory that it uses."""
    if core.usable():
        with contextlib.suppress(errors.ClosedError):
            _abi.call(function, handle)
    if pins is not None:
        core.forget(pins)


def _endpoint(
    address: str, token: str | None, token_file: _Path | None, ca_file: _Path | None, cert_file: _Path | None, key_file: _Path | None,
    insecure: bool,
) -> _abi.CPlanner:  # fmt: skip
    return _abi.CPlanner(
        size=ctypes.sizeof(_abi.CPlanner),
        address=_text("planner", address),
        token=_text("token", token),
        token_file=_text("token_file", token_file),
        ca_file=_text("ca_file", ca_file),
        cert_file=_text("cert_file", cert_file),
        key_file=_text("key_file", key_file),
        insecure=bool(insecure),
    )


def _bytes(address: int | None, n: int) -> bytes:
    return ctypes.string_at(address, n) if address and n else b""


def _string(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


class Attempt:
    """One attempt at a request on one engine of a Leader. The engine calls ``done`` once, also after END.

    Reports of an attempt that has ended, or whose leader is closed, have no effect. Any thread may call any method.
    """

    def __init__(self, leader: Leader, handle: int, start: _abi.CStart) -> None:
        self._leader = leader
        self._handle = handle
        self.name = _string(start.name)
        """The same on both engines, and unique."""
        self.id = _string(start.id)
        """The id of the request."""
        self.namespace = _string(start.ns)
        """The name of the namespace that the gateway has."""
        self.engine = _string(start.engine)
        """The name of the member that the attempt is for."""
        self.peer_engine = _string(start.peer_engine)
        """The name of the engine on the other side."""
        self.peer_address = _bytes(start.peer_address, start.peer_address_bytes)
        self.peer_token = _bytes(start.peer_token, start.peer_token_bytes)
        self.epoch: int = start.epoch
        """The weights to compute and store with. A cached prefix of older weights is recomputed."""
        self.prompt_tokens: int = start.prompt_tokens
        self.output_tokens: int = start.output_tokens
        """As many as the gateway expects."""
        self.hit: int = start.hit_blocks
        """The cached prefix, in blocks."""
        self.parts = [Part(getattr(p, "from"), p.to) for p in start.parts[: start.n_parts]]
        """What this engine reads of the cached prefix."""
        self.payload = _bytes(start.payload, start.payload_bytes)
        """The gateway's data for the engines."""
        self.ids = Keys.packed(_bytes(start.ids, _ID_BYTES * start.n_ids), _ID_BYTES)
        """The block ids of the prompt's full blocks, perhaps of more; empty if the payload has none."""
        self.extra: Any = None if start.extra is None else json.loads(start.extra)
        """``extra`` of ``Gateway.submit``."""

    def _report(self, function: str, *arguments: Any) -> None:
        core = self._leader._core
        _abi.check_process(core.pid)
        with contextlib.suppress(errors.ClosedError):
            _abi.call(getattr(core.lib, f"penstock_attempt_{function}"), self._handle, *arguments)

    def progress(self, part: tuple[int, int], upto: int, read: int) -> None:
        """Report that the blocks of a part before ``upto`` were read and verified, and that ``read`` bytes of the part came.

        Call it as often as convenient, and at the end of the part with its ``stop``.
        """
        self._report("progress", _part(part), _count("upto", upto), _count("read", read, 63))

    def stopped(self, part: tuple[int, int], upto: int, *, gone: bool = False) -> None:
        """Report that the read of a part ended before block ``upto``. ``gone``: storage does not have that block."""
        self._report("stopped", _part(part), _count("upto", upto), int(gone))

    def passed(self) -> None:
        """Report that the KV has left the engine's buffer, before the attempt ends."""
        self._report("passed")

    def done(self, failure: BaseException | str | None = None, *, intact: int = 0) -> None:
        """End the attempt. Without ``failure`` the engine has completed its part.

        After a failure the planner plans the request again. The first ``intact`` blocks of the cached prefix are certainly
        intact.
        """
        reason = None
        if failure is not None:
            text = failure if isinstance(failure, str) else f"{type(failure).__name__}: {failure}"
            reason = text.replace("\0", "").encode()
        self._report("done", reason, _count("intact", intact))
        self._leader._attempts.pop(self._handle, None)

    def __repr__(self) -> str:
        return f"<Attempt {self.name} on {self.engine}>"


def _part(part: tuple[int, int]) -> _abi.CPart:
    start, stop = part
    return _abi.CPart(_count("start of a part", start), _count("stop of a part", stop))


class Action(NamedTuple):
    """An action of the planner. START is the first one of its attempt."""

    kind: ActionKind
    attempt: Attempt
    part: Part | None = None
    """READ and RECOMPUTE: the blocks."""


class Leader(_Queue[Action]):
    """The session of a group of engines with the planner, and the queue of their actions.

    ``ns`` is the KV that the engines serve. ``group`` is unique in the cluster, and ``node`` is the machine of the engines. The
    leader reports the engines' load. It reconnects after the session is lost, and attempts continue while the planner
    is restarted. If the planner does not answer, or refuses the token, the leader logs that and retries. ``read_rate``
    is the rate of the machine's storage NIC in tokens per second; by default the leader measures it. ``fetch_every`` is
    in seconds.

    >>> from penstock import Store
    >>> from penstock.testing import node, planner
    >>> with node() as n, planner() as p, Store(n.address) as store:
    ...     ns = store.namespace("demo", block_tokens=16, layers=2, token_bytes=64, ids=True)
    ...     with Leader(ns, p.address, group="g", node="a", role=Role.PREFILL, members=[Member("engine 0")]) as leader:
    ...         leader.drain()
    []
    """

    _NAME = "leader"
    _RAW = _abi.CAction

    def __init__(
        self,
        ns: Namespace,
        planner: str,
        *,
        group: str,
        node: str,
        role: Role,
        members: Iterable[Member] = (),
        read_rate: int = 0,
        fetch_every: float | None = None,
        token: str | None = None,
        token_file: _Path | None = None,
        ca_file: _Path | None = None,
        cert_file: _Path | None = None,
        key_file: _Path | None = None,
        insecure: bool = False,
    ) -> None:
        super().__init__(ns._core)
        self._ns = ns  # a reference, because a store without references is closed
        self._group = group
        self._attempts: dict[int, Attempt] = {}
        c_members = [_member(m) for m in members]
        endpoint = _endpoint(planner, token, token_file, ca_file, cert_file, key_file, insecure)
        options = _abi.CLeaderOptions(
            size=ctypes.sizeof(_abi.CLeaderOptions),
            planner=ctypes.pointer(endpoint),
            group=_text("group", group),
            node=_text("node", node),
            members=(_abi.CMember * len(c_members))(*c_members),
            n_members=len(c_members),
            role=int(role),
            read_rate=_count("read_rate", read_rate, 63),
            fetch_every_ms=_ms("fetch_every", fetch_every),
        )
        self._core.open_handle()
        self._open(ns, options)

    def add(self, member: Member) -> None:
        """Make an engine a member of the group."""
        _abi.call(self._core.lib.penstock_leader_add, self._open_handle(), byref(_member(member)))

    def remove(self, name: str) -> None:
        """Remove an engine from the group, for example because it has failed. Its attempts get END.

        Raises NotFoundError if the group has no engine of that name.
        """
        _abi.call(self._core.lib.penstock_leader_remove, self._open_handle(), _text("name", name))

    def report_nics(self, name: str, nics: Iterable[Nic]) -> None:
        """Give the counters of the NICs over which an engine exchanges KV with engines of the other role, at most 64.

        They are those of ``Traffic.nics``, or of transfers of the engine's own. The leader reports the last ones to the planner
        every second. The planner computes rates between two such reports, so call this method about every second too. Raises
        NotFoundError if the group has no engine of that name.
        """
        raw = [_abi.CNic(n.name.encode()[:255], _count("bytes_out", n.bytes_out, 64), _count("bytes_in", n.bytes_in, 64)) for n in nics]
        _abi.call(
            self._core.lib.penstock_leader_report_nics, self._open_handle(), _text("name", name), (_abi.CNic * len(raw))(*raw), len(raw)
        )

    def _accept(self, raw: _abi.CAction) -> None:
        kind = ActionKind(raw.kind)
        if kind == ActionKind.START:
            try:
                self._attempts[raw.attempt] = self._describe(raw)
            except (ValueError, RecursionError) as e:
                # The attempt fails. Without this, no later action could be taken from the queue.
                _log.warning("an attempt of group %s fails: its data from the gateway cannot be decoded: %s", self._group, e)
                with contextlib.suppress(errors.ClosedError):
                    _abi.call(self._core.lib.penstock_attempt_done, raw.attempt, f"data of the gateway: {e}"[:500].encode(), 0)
        attempt = self._attempts.get(raw.attempt)
        part = Part(getattr(raw.part, "from"), raw.part.to) if kind in (ActionKind.READ, ActionKind.RECOMPUTE) else None
        if attempt is None:  # the engine has ended it
            self._at += 1
            return
        action = Action(kind, attempt, part)
        # No signal handler runs between these two statements.
        self._at += 1
        self._ready.append(action)

    def _describe(self, raw: _abi.CAction) -> Attempt:
        room = array("Q", bytes(raw.start_bytes))
        start = _abi.CStart.from_buffer(room)
        _abi.call(self._core.lib.penstock_attempt_describe, raw.attempt, byref(start), raw.start_bytes, None)
        return Attempt(self, raw.attempt, start)

    def close(self) -> None:
        """Close the session with the planner, which gives the requests to other engines, and end all attempts.

        It takes at most a second. A second call does nothing. In a forked child, close does nothing.
        """
        super().close()

    def __repr__(self) -> str:
        return f"<Leader of {self._group}{', closed' if self.closed else ''}>"


def _member(m: Member) -> _abi.CMember:
    for what, value in (("address", m.address), ("token", m.token)):
        if not isinstance(value, bytes):
            raise TypeError(f"{what} of member {m.name!r}: {value!r} of type {type(value).__name__}; want bytes")
    return _abi.CMember(
        size=ctypes.sizeof(_abi.CMember),
        name=_text("name of a member", m.name),
        address=m.address,
        token=m.token,
        address_bytes=len(m.address),
        token_bytes=len(m.token),
        device_blocks=_count("device_blocks", m.device_blocks, 31),
        prompt_blocks=_count("prompt_blocks", m.prompt_blocks, 31),
        buffer_bytes=_count("buffer_bytes", m.buffer_bytes, 63),
        block_bytes=_count("block_bytes", m.block_bytes, 63),
        sums_bytes=_count("sums_bytes", m.sums_bytes, 63),
        request_bytes=_count("request_bytes", m.request_bytes, 63),
        prefix_cache_blocks=_count("prefix_cache_blocks", m.prefix_cache_blocks, 31),
    )

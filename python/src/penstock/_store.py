"""Stores, namespaces and the calls on them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import queue
import threading
import warnings
import weakref
from array import array
from collections.abc import Awaitable, Iterable, Sequence
from ctypes import byref
from enum import IntEnum
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar, cast

from penstock import _abi, errors
from penstock._keys import Key, Keys
from penstock._memory import Buffer, Pins, Pointers, Tensor, Value, fragments

__all__ = ["Calls", "Cut", "Group", "GroupKind", "Job", "KeyResult", "Lease", "Match", "Memory", "Namespace", "Result", "Store"]

_log = logging.getLogger("penstock")

# How long a wait stays in the library before Python may run signal handlers.
_WAIT_MS = 100
_DRAIN = 64  # completions taken in one call


class KeyResult(IntEnum):
    """What became of one key. OK and EXISTS are success."""

    MISS = 0
    """Not stored. Of a put: not tried."""
    OK = 1
    EXISTS = 2
    """Of a put: it was stored before, and nothing was sent."""
    BUSY = 3
    """The node had no room for it now."""
    LOST = 4
    """Stored, and not delivered: damaged, or a device or transfer failed. The bytes in memory are undefined."""
    REFUSED = 5
    """The node will not store it: it is full, over its quota, its parent is absent, or the epoch is over."""
    DOWN = 6
    """The node that has it does not answer."""


class Cut(IntEnum):
    """Why a prefix is not longer."""

    COMPLETE = 0
    """It is as long as what was asked for."""
    ABSENT = 1
    EPOCH = 2
    """The node is at another epoch."""
    GROUPS = 3
    """Blocks are there, but no length at which window or state groups are complete."""
    LEASE = 4
    """The node grants no more leases."""
    DOWN = 5
    BUSY = 6
    LOST = 7


class GroupKind(IntEnum):
    """Which blocks of a prefix a layer group needs."""

    FULL = 1
    """Every block."""
    WINDOW = 2
    """The blocks of the last ``window_tokens``."""
    STATE = 3
    """The last block: one snapshot, whose size is ``token_bytes`` for each layer."""


class Group(NamedTuple):
    """Layers that are needed together. A value may be cut into fragments between layers."""

    kind: GroupKind
    layers: int
    token_bytes: int
    window_tokens: int = 0


_SUCCESS = bytes(code in (KeyResult.OK, KeyResult.EXISTS) for code in range(256))


class Result:
    """What came of a batch."""

    __slots__ = ("bytes", "codes", "cut", "epoch", "lease", "ok", "prefix")

    def __init__(self, raw: _abi.CResult, codes: bytes, lease: Lease | None) -> None:
        self.codes = codes
        """A byte for each key, or piece: a KeyResult. Empty for a match."""
        self.ok: int = raw.ok
        """How many keys are a success."""
        self.prefix: int = raw.prefix
        """How many keys from the first on are a success, or match."""
        self.cut = Cut(raw.cut)
        """Of get and match: why the prefix is not longer."""
        self.bytes: int = raw.bytes
        """Moved and verified. Of a match: what a get of the prefix would move."""
        self.epoch: int = raw.epoch
        self.lease = lease
        """Of a match that asked for one: the lease, if it was granted."""

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> KeyResult:
        return KeyResult(self.codes[index])

    def done(self) -> list[bool]:
        """Return for each key whether it is a success."""
        return list(map(bool, self.codes.translate(_SUCCESS)))

    def __repr__(self) -> str:
        return f"<Result: ok {self.ok} of {len(self.codes)}, prefix {self.prefix}, {self.bytes} bytes>"


class Match(Result):
    """The longest stored prefix: ``prefix`` keys, ``bytes`` long."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Match: prefix {self.prefix} ({self.cut.name.lower()}), {self.bytes} bytes>"


class _Closable:
    """A handle of the library that is closed once, at the latest with its store."""

    def __init__(self, core: _Core, handle: int) -> None:
        self._core = core
        self._handle = handle

    def _open_handle(self) -> int:
        self._core.open_handle()
        if not self._handle:
            raise errors.ClosedError(f"{type(self).__name__} is closed")
        return self._handle


class Lease(_Closable):
    """Keeps a matched prefix from being evicted, until its time is over or it is released.

    As a context manager it releases itself.
    """

    def renew(self, seconds: float) -> None:
        """Make it end so many seconds from now. Raises NotFoundError if it has ended: the blocks may have gone."""
        _abi.call(self._core.lib.penstock_lease_renew, self._open_handle(), _ms("seconds", seconds))

    def release(self) -> None:
        """End it. A second call does nothing."""
        handle, self._handle = self._handle, 0
        if handle and self._core.usable():
            _abi.call(self._core.lib.penstock_lease_release, handle)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Memory(_Closable):
    """Registered memory. As a context manager it ends its registration."""

    def __init__(self, core: _Core, handle: int, pins: Pins) -> None:
        super().__init__(core, handle)
        self._pins = pins
        core.keep(self._pins)

    def close(self) -> None:
        """End the registration. Raises BusyError while jobs use it. A second call does nothing."""
        if self._handle and self._core.usable():
            _abi.call(self._core.lib.penstock_unregister, self._handle)
        self._handle = 0
        self._core.let_go(self._pins)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Job:
    """A batch that was submitted with ``Namespace.jobs``.

    The memory of its values stays exported until it is complete. ``Store.drain`` or ``wait`` collects it.
    """

    def __init__(self, core: _Core, op: int, pins: Pins, codes: array[int]) -> None:
        self._core = core
        self._op = op
        self._pins = pins
        self._codes = codes
        self._id = ctypes.c_uint64(0)
        self._raw = _abi.CResult()
        self._complete = False
        self._drained = False  # Store.drain is to return it
        self._future: asyncio.Future[None] | None = None
        self._result: Result | None = None

    @property
    def id(self) -> int:
        """The library's number for it, unlike any other in this process."""
        return self._id.value

    @property
    def complete(self) -> bool:
        """Whether its completion was collected."""
        return self._complete

    def cancel(self) -> None:
        """Ask for its end. It completes soon after, with CanceledError or as what it had become before."""
        if not self._complete and self._core.usable():
            self._core.cancel(self)

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until it is complete and return its result, or raise its error.

        Raises TimedOutError after ``timeout`` seconds; then the job goes on.
        """
        self._core.wait(self, None if timeout is None else _ms("timeout", timeout))
        return self.result()

    def result(self) -> Result:
        """Return the result of a complete job, or raise its error. What was done before an error is in ``codes``."""
        if not self._complete:
            raise errors.InvalidError(f"job {self.id} is not complete: wait for it, or drain the store")
        if self._raw.error.code != _abi.OK:
            raise _abi.error_of(self._raw.error)
        if self._result is None:
            lease = Lease(self._core, self._raw.lease) if self._raw.lease else None
            self._result = (Match if self._op == _abi.OP_MATCH else Result)(self._raw, self.codes, lease)
        return self._result

    def empty(self) -> Result:
        """Return the result of a batch without keys, which the library refuses."""
        self._complete = True
        return self.result()

    @property
    def codes(self) -> bytes:
        """A KeyResult for each key, or piece, of a complete job."""
        return self._codes.tobytes()

    def error(self) -> errors.Error | None:
        """Return the error of a complete job, or None."""
        return None if self._raw.error.code == _abi.OK else _abi.error_of(self._raw.error)


class _Core:
    """An open store of the library: what Store, Namespace, Memory, Lease and Job share.

    ``lock`` guards the tables of jobs. It is held while jobs are submitted and drained, which wait for nothing. A thread
    may take it twice, as it does where the handler of a signal uses the store that it interrupted.
    """

    def __init__(self, lib: ctypes.CDLL, logs: queue.SimpleQueue[tuple[int, bytes] | None], callback: Any) -> None:
        self.lib = lib
        self.pid = os.getpid()
        self.handle = ctypes.c_uint64(0)
        self.flags = 0  # of every batch
        self.lock = threading.RLock()
        self.jobs: dict[int, Job] = {}
        # Jobs between the moment when the library may know them and the one when jobs has them: if an exception of a
        # signal handler comes in between, their memory is held all the same.
        self.starting: set[Job] = set()
        self.collected: list[Job] = []
        self.ended = threading.Event()  # close has returned
        self._closer = 0
        self.registered: set[Pins] = set()
        self.loops: dict[asyncio.AbstractEventLoop, int] = {}
        self.loop_fd = -1
        self._logs = logs
        self._callback = callback  # the library calls it until it is closed

    # -- life

    def usable(self) -> bool:
        """Whether the store is open, in the process that opened it."""
        return bool(self.handle.value) and os.getpid() == self.pid

    def open_handle(self) -> int:
        """Return the library's handle. Raises ForkedError or ClosedError."""
        _abi.check_process(self.pid)
        if not self.handle.value:
            raise errors.ClosedError("the store is closed")
        return int(self.handle.value)

    def close(self) -> None:
        """Close the store, in the process that opened it. A second call does nothing."""
        if os.getpid() != self.pid:
            return
        with self.lock:
            handle, self.handle.value = self.handle.value, 0
            if handle:
                self._closer = threading.get_ident()
        if handle:
            try:
                self._close(handle)
            finally:
                self.ended.set()
        elif self._closer != threading.get_ident():  # it is this one where a signal handler interrupted close
            self.ended.wait()

    def _close(self, handle: int) -> None:
        error = _abi.CError()
        self.lib.penstock_close(handle, byref(error))  # from here on the library touches no memory of ours
        self._logs.put(None)
        with self.lock:
            ended = [*self.jobs.values(), *self.starting]
            self.jobs.clear()
            self.starting.clear()
            for job in ended:
                job._raw.error.code = _abi.ERR_CANCELED
                self._finish(job)
            for pins in self.registered:
                pins.release()
            self.registered.clear()
            loops, self.loops = list(self.loops), {}
            fd, self.loop_fd = self.loop_fd, -1
        _detach(loops, fd)

    def keep(self, pins: Pins) -> None:
        """Hold registered memory until let_go, or until the store is closed."""
        self.registered.add(pins)

    def let_go(self, pins: Pins) -> None:
        self.registered.discard(pins)
        pins.release()

    # -- jobs

    def submit(self, ns: int, job: Job, batch: _abi.CBatch, loop: asyncio.AbstractEventLoop | None) -> None:
        """Begin a job; with a loop, job._future is resolved in it."""
        error = _abi.CError()
        self.open_handle()  # before the lock, which a thread of the parent process may have held
        try:
            with self.lock:
                self.open_handle()
                if loop is not None:
                    self._watch(loop)
                    job._future = loop.create_future()
                self.starting.add(job)
                codes = job._codes.buffer_info()[0] if job._codes else None
                code = self.lib.penstock_submit(ns, job._op, byref(batch), codes, byref(job._id), byref(error))
                if code != _abi.OK:
                    error.code = code
                    job._id.value = 0
                    self.starting.discard(job)
                    raise _abi.error_of(error)
                self.jobs[job._id.value] = job
                self.starting.discard(job)
        except BaseException:
            if job._id.value:
                self._abandon(job)
            else:
                self.starting.discard(job)
                job._pins.release()
                self._unwatch(job)
            raise

    def _finish(self, job: Job) -> None:
        """Mark a job as complete and wake who waits for it. The lock is held."""
        if job._raw.error.code == _abi.ERR_CANCELED and not self.handle.value:
            job._raw.error.code = _abi.ERR_CLOSED
            job._raw.error.message = b"the store was closed while the job was under way"
        job._complete = True
        job._pins.release()
        future = job._future
        if future is not None:
            try:
                future.get_loop().call_soon_threadsafe(self._resolve, future)
            except RuntimeError:  # the loop is closed, and nobody waits
                job._future = None

    def _resolve(self, future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)

    def drain(self) -> None:
        """Take every completion from the library and hand it to who waits for it."""
        room = (_abi.CResult * _DRAIN)()
        n = ctypes.c_uint32(_DRAIN)
        self.open_handle()
        with self.lock:
            while n.value == _DRAIN:
                _abi.call(self.lib.penstock_drain, self.open_handle(), room, _DRAIN, byref(n))
                for raw in room[: n.value]:
                    job = self.jobs.pop(raw.job, None) or next((j for j in self.starting if j._id.value == raw.job), None)
                    if job is not None:
                        ctypes.memmove(byref(job._raw), byref(raw), ctypes.sizeof(raw))
                        self._finish(job)
                        if job._drained:
                            self.collected.append(job)

    def take_collected(self) -> list[Job]:
        with self.lock:
            jobs, self.collected = self.collected, []
        return jobs

    def cancel(self, job: Job) -> None:
        error = _abi.CError()
        code = self.lib.penstock_cancel(self.handle.value, job._id.value, byref(error))
        if code not in (_abi.OK, _abi.ERR_NOT_FOUND, _abi.ERR_CLOSED):
            raise _abi.error_of(error)

    def wait(self, job: Job, timeout_ms: int | None = None) -> None:
        """Wait until a job is complete. The library's wait is cut into short ones, between which Python runs the
        handlers of signals."""
        error = _abi.CError()
        left = timeout_ms
        while not job._complete:
            _abi.check_process(self.pid)
            handle = self.handle.value
            if not handle:
                self.ended.wait()  # only then the memory is the caller's again
                continue
            ms = _WAIT_MS if left is None else min(left, _WAIT_MS)
            code = self.lib.penstock_wait(handle, job._id.value, ms, byref(job._raw), byref(error))
            if code == _abi.OK:
                self._collect(job)
            elif code == _abi.ERR_TIMEOUT:
                if left is not None:
                    left -= ms
                    if left <= 0:
                        raise errors.TimedOutError(f"job {job.id} is not complete after {timeout_ms} ms")
            else:
                # Another thread has drained it, and finishes it under the lock, or closes the store.
                with self.lock:
                    if not job._complete and self.handle.value:
                        error.code = code
                        raise _abi.error_of(error)
        with self.lock:
            if job in self.collected:
                self.collected.remove(job)

    def _collect(self, job: Job) -> None:
        with self.lock:
            if self.jobs.pop(job._id.value, None) is not None:
                self._finish(job)

    def _abandon(self, job: Job) -> None:
        """End a job for whose result nobody waits any more, so that its memory is the caller's again. If this is
        interrupted too, the tables hold the memory until the store is closed."""
        with self.lock:
            if job in self.starting:
                self.starting.discard(job)
                self.jobs[job._id.value] = job
        if job._raw.job == job._id.value:  # the completion had come
            self._collect(job)
            return
        try:
            self.cancel(job)
            self.wait(job)
        except errors.Error:
            _log.debug("job %d could not be cancelled", job.id, exc_info=True)

    def run(self, ns: int, job: Job, batch: _abi.CBatch) -> Result:
        """Submit a job and wait for it. If the wait is interrupted (KeyboardInterrupt), the job is cancelled first."""
        if not batch.n_keys:
            return job.empty()
        self.submit(ns, job, batch, None)
        try:
            self.wait(job)
        except BaseException:
            if not job._complete:
                self._abandon(job)
            raise
        return job.result()

    # -- asyncio

    async def run_async(self, ns: int, job: Job, batch: _abi.CBatch) -> Result:
        """The same without blocking the event loop. A task that is cancelled goes on when the job has ended."""
        if not batch.n_keys:
            return job.empty()
        self.submit(ns, job, batch, asyncio.get_running_loop())
        future = job._future
        assert future is not None
        canceled: asyncio.CancelledError | None = None
        try:
            while not future.done():
                try:
                    await asyncio.shield(future)
                except asyncio.CancelledError as e:
                    canceled = e
                    job.cancel()
        finally:
            self._unwatch(job)
        if canceled is not None:
            raise canceled
        return job.result()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let a loop drain the store while it has jobs. The lock is held."""
        if self.loop_fd < 0:
            fd = ctypes.c_int32(-1)
            _abi.call(self.lib.penstock_eventfd, self.open_handle(), byref(fd))
            # The library closes its own descriptor with the store, and a loop must not watch a closed one.
            self.loop_fd = os.dup(fd.value)
        if loop not in self.loops:
            loop.add_reader(self.loop_fd, self._readable)
            self.loops[loop] = 0
        self.loops[loop] += 1

    def _unwatch(self, job: Job) -> None:
        """The opposite of _watch; in the loop's thread."""
        if job._future is None:
            return
        loop = job._future.get_loop()
        job._future = None
        with self.lock:
            if loop in self.loops:
                self.loops[loop] -= 1
                if not self.loops[loop]:
                    del self.loops[loop]
                    loop.remove_reader(self.loop_fd)

    def _readable(self) -> None:
        with contextlib.suppress(errors.ClosedError):  # close has finished the jobs
            self.drain()


def _detach(loops: list[asyncio.AbstractEventLoop], fd: int) -> None:
    """Take a descriptor out of loops, in the thread of each, and close it."""
    if fd < 0:
        return
    lock = threading.Lock()
    left: set[asyncio.AbstractEventLoop | None] = set(loops)

    def gone(loop: asyncio.AbstractEventLoop | None) -> None:
        if loop is not None and not loop.is_closed():
            loop.remove_reader(fd)
        with lock:
            left.discard(loop)
            if left:
                return
        os.close(fd)

    try:
        running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    for loop in loops:
        if loop is running:
            gone(loop)
            continue
        try:
            loop.call_soon_threadsafe(gone, loop)
        except RuntimeError:  # closed
            gone(loop)
    if not loops:
        gone(None)


# -- checking arguments


def _ms(what: str, seconds: float | None) -> int:
    """Return milliseconds. None is 0, the library's default."""
    if seconds is None:
        return 0
    ms = float(seconds) * 1000
    if not 0 < ms < 2**32:
        raise errors.InvalidError(f"{what} of {seconds} s; want more than 0 and less than {2**32 // 1000}")
    return max(1, round(ms))


def _count(what: str, value: int, bits: int = 32) -> int:
    """ctypes would cut off what does not fit."""
    if not isinstance(value, int):
        raise TypeError(f"{what}: {value!r} of type {type(value).__name__}; want an integer")
    if not 0 <= value < 1 << bits:
        raise errors.InvalidError(f"{what}: {value}; want 0 to {(1 << bits) - 1}")
    return value


def _text(what: str, value: str | os.PathLike[str] | None) -> bytes | None:
    if value is None:
        return None
    text = os.fspath(value)
    if not isinstance(text, str):
        raise TypeError(f"{what}: {value!r} of type {type(value).__name__}; want a string")
    if "\0" in text:
        raise errors.InvalidError(f"{what}: {text!r} has a zero character")
    return text.encode()


# -- calls on a namespace

_M = TypeVar("_M")
_R = TypeVar("_R")
_Pieces = Sequence[tuple[int, int]]


class Calls(Generic[_M, _R]):
    """The calls for a batch of keys. Namespace has them blocking, ``Namespace.aio`` for asyncio, ``Namespace.jobs``
    as jobs.

    Keys are bytes or strings of 1 to 256 bytes. In a chained namespace they are those of one prompt from its first block
    on, and ``first`` is the first of them that a get or put moves; those before it are its ancestors. A value is an
    object with the buffer protocol, a tensor, or a list of those: its fragments. ``pieces`` are (index of the key, layer
    group) for each value, where it is not the first group of one key after the other. ``epoch`` is 0 for that of the
    namespace. ``timeout`` is in seconds; None is the store's.
    """

    _core: _Core
    _ns: int

    def _match(self, job: Job, batch: _abi.CBatch) -> _M:
        raise NotImplementedError

    def _run(self, job: Job, batch: _abi.CBatch) -> _R:
        raise NotImplementedError

    def match(self, keys: Iterable[Key], *, lease: float | None = None, epoch: int = 0, timeout: float | None = None) -> _M:
        """Find the longest prefix of the keys that is stored; in a flat namespace, the run of keys from the first.

        With ``lease``, what matched is kept from being evicted for so many seconds.
        """
        return self._match(*self._prepare(_abi.OP_MATCH, keys, epoch=epoch, timeout=timeout, lease=lease))

    def get(
        self,
        keys: Iterable[Key],
        into: Sequence[Value] | Pointers,
        *,
        first: int = 0,
        pieces: _Pieces | None = None,
        epoch: int = 0,
        timeout: float | None = None,
    ) -> _R:
        """Load values into writable memory. Each is verified against its writer's checksums, or is no success."""
        return self._run(*self._prepare(_abi.OP_GET, keys, into, first, pieces, epoch=epoch, timeout=timeout))

    def put(
        self,
        keys: Iterable[Key],
        values: Sequence[Value] | Pointers,
        *,
        first: int = 0,
        pieces: _Pieces | None = None,
        epoch: int = 0,
        timeout: float | None = None,
    ) -> _R:
        """Store values. What is stored already is not sent. In a chain the first refusal ends the batch."""
        return self._run(*self._prepare(_abi.OP_PUT, keys, values, first, pieces, epoch=epoch, timeout=timeout))

    def exists(self, keys: Iterable[Key], *, epoch: int = 0, timeout: float | None = None) -> _R:
        """Ask which keys are stored, each by itself. It does not touch the order of eviction."""
        return self._run(*self._prepare(_abi.OP_EXISTS, keys, epoch=epoch, timeout=timeout))

    def touch(self, keys: Iterable[Key], *, epoch: int = 0, timeout: float | None = None) -> _R:
        """Report which keys are stored, as exists does, and mark those as used now for the order of eviction."""
        return self._run(*self._prepare(_abi.OP_TOUCH, keys, epoch=epoch, timeout=timeout))

    def delete(self, keys: Iterable[Key], *, epoch: int = 0, timeout: float | None = None) -> _R:
        """Remove keys; in a chained namespace with all behind them, whoever stored those."""
        return self._run(*self._prepare(_abi.OP_DELETE, keys, epoch=epoch, timeout=timeout))

    def _prepare(
        self,
        op: int,
        keys: Iterable[Key],
        values: Sequence[Value] | Pointers | None = None,
        first: int = 0,
        pieces: _Pieces | None = None,
        *,
        epoch: int,
        timeout: float | None,
        lease: float | None = None,
    ) -> tuple[Job, _abi.CBatch]:
        """Return a job and its batch. The batch's arrays live as long as the batch."""
        self._core.open_handle()
        if not isinstance(keys, Keys):
            keys = Keys(keys)
        batch = _abi.CBatch(
            size=ctypes.sizeof(_abi.CBatch),
            epoch=_count("epoch", epoch, 64),
            flags=self._core.flags,
            timeout_ms=_ms("timeout", timeout),
            lease_ms=_ms("lease", lease),
            n_keys=len(keys),
            keys=keys.blob,
            key_offsets=keys.offsets.buffer_info()[0],
            first=_count("first", first),
        )
        arrays = [keys.offsets]

        def address(numbers: array[int]) -> int:
            arrays.append(numbers)
            return numbers.buffer_info()[0]

        batch.arrays = arrays
        pins = Pins()
        n = 0 if op == _abi.OP_MATCH else len(keys)
        if op in (_abi.OP_GET, _abi.OP_PUT):
            try:
                if values is None:
                    raise TypeError("no values: want a sequence with one for each key")
                starts = fragments(values, pins, writable=op == _abi.OP_GET)
                n = len(pins.addresses) if starts is None else len(starts) - 1
                want = len(keys) - first if pieces is None else len(pieces)
                if n != want:
                    raise errors.InvalidError(f"{n} values for {want} {'keys' if pieces is None else 'pieces'} (first is {first})")
                batch.addresses, batch.lengths = address(pins.addresses), address(pins.lengths)
                if starts is not None:
                    batch.piece_fragments = address(starts)
                if pieces is not None:
                    batch.n_pieces = n
                    batch.piece_keys = address(array("I", (_count("key of a piece", key) for key, _ in pieces)))
                    batch.piece_groups = address(array("B", (_count("group of a piece", group, 8) for _, group in pieces)))
            except BaseException:
                pins.release()
                raise
        return Job(self._core, op, pins, array("B", bytes(n))), batch


class _AsyncCalls(Calls["Awaitable[Match]", "Awaitable[Result]"]):
    def __init__(self, core: _Core, ns: int) -> None:
        self._core, self._ns = core, ns

    def _match(self, job: Job, batch: _abi.CBatch) -> Awaitable[Match]:
        return cast("Awaitable[Match]", self._run(job, batch))

    def _run(self, job: Job, batch: _abi.CBatch) -> Awaitable[Result]:
        return self._core.run_async(self._ns, job, batch)


class _JobCalls(Calls[Job, Job]):
    def __init__(self, core: _Core, ns: int) -> None:
        self._core, self._ns = core, ns

    def _match(self, job: Job, batch: _abi.CBatch) -> Job:
        return self._run(job, batch)

    def _run(self, job: Job, batch: _abi.CBatch) -> Job:
        job._drained = True
        self._core.submit(self._ns, job, batch, None)
        return job


class Namespace(Calls[Match, Result]):
    """One model's KV under one geometry. ``Store.namespace`` returns it.

    >>> from penstock.testing import node
    >>> with node() as n, Store(n.address) as store:
    ...     ns = store.namespace("demo", block_tokens=16, layers=2, token_bytes=64)
    ...     print(ns.put(["block 0"], [bytes(ns.value_bytes)]).ok, ns.match(["block 0", "block 1"]).prefix)
    1 1
    """

    def __init__(self, store: Store, ns: int, name: str, block_tokens: int, value_bytes: Sequence[int]) -> None:
        self._store = store  # which is closed when nobody refers to it
        self._core = core = store._core
        self._ns = ns
        self._block_tokens = block_tokens
        self.name = name
        self.piece_bytes = tuple(value_bytes)
        """The size of a value, by layer group."""
        self.aio = _AsyncCalls(core, ns)
        """The calls for asyncio: they return awaitables."""
        self.jobs = _JobCalls(core, ns)
        """The calls as jobs: they return a Job at once."""

    @property
    def value_bytes(self) -> int:
        """The size of a value of the first layer group, the only one of most models."""
        return self.piece_bytes[0]

    def _match(self, job: Job, batch: _abi.CBatch) -> Match:
        return cast(Match, self._run(job, batch))

    def _run(self, job: Job, batch: _abi.CBatch) -> Result:
        return self._core.run(self._ns, job, batch)

    @property
    def epoch(self) -> int:
        """The epoch of the weights that calls are for."""
        return self._epoch(0)

    def refresh(self) -> int:
        """Ask the nodes for the newest epoch and take it. An engine does so when it has loaded weights."""
        return self._epoch(1)

    def _epoch(self, refresh: int) -> int:
        self._core.open_handle()
        epoch = ctypes.c_uint64(0)
        _abi.call(self._core.lib.penstock_epoch, self._ns, refresh, byref(epoch))
        return epoch.value

    def bump(self, to: int = 0) -> int:
        """Begin another epoch, the next one or ``to``: the weights have changed. What is stored is missed from now on."""
        self._core.open_handle()
        epoch = ctypes.c_uint64(0)
        _abi.call(self._core.lib.penstock_bump, self._ns, _count("to", to, 64), byref(epoch))
        return epoch.value

    def chain(self, tokens: Iterable[int], *, parent: bytes | None = None, extra: bytes = b"") -> Keys:
        """Return Penstock's own ids of the whole blocks of tokens; of a namespace with ``ids=True``.

        ``parent`` is the id of the block before; None is the start of the prompt. ``extra`` is what else the blocks depend
        on: LoRA, cache salt, hashes of images.
        """
        self._core.open_handle()
        try:
            numbers = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
        except (OverflowError, TypeError) as e:
            raise errors.InvalidError(f"tokens: {e}; want integers from 0 to 2**32-1") from e
        if parent is not None and len(parent) != _ID_BYTES:
            raise errors.InvalidError(f"parent of {len(parent)} bytes; want {_ID_BYTES}")
        ids = array("B", bytes(_ID_BYTES * (len(numbers) // self._block_tokens)))
        n = ctypes.c_uint32(0)
        _abi.call(
            self._core.lib.penstock_chain, self._ns, parent, extra, len(extra),
            numbers.buffer_info()[0], len(numbers), ids.buffer_info()[0], byref(n),
        )  # fmt: skip
        return Keys.packed(ids.tobytes()[: _ID_BYTES * n.value], _ID_BYTES)

    def key_ids(self, keys: Iterable[Key]) -> list[bytes]:
        """Return the block ids of keys, as nodes, logs and events name them."""
        self._core.open_handle()
        packed = keys if isinstance(keys, Keys) else Keys(keys)
        ids = array("B", bytes(_ID_BYTES * len(packed)))
        if packed:
            offsets = packed.offsets.buffer_info()[0]
            _abi.call(self._core.lib.penstock_key_ids, self._ns, packed.blob, offsets, len(packed), ids.buffer_info()[0])
        return list(Keys.packed(ids.tobytes(), _ID_BYTES))


_ID_BYTES = 16


class Store:
    """A connection to one or several storage nodes.

    ``servers`` are the nodes' ``host:port``, as a list or separated by commas, spelled the same in every client. Times
    are in seconds; None is the library's default. ``any_memory`` False refuses values that do not lie in memory that
    ``register`` knows, which costs less than registering them for each call.

    A node that does not answer is no error: its keys are a miss until it does. Methods may be called from any thread.
    What the library logs goes to the logger ``penstock``, from the level that it has when the store is opened.
    """

    def __init__(
        self,
        servers: str | Iterable[str],
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        cert_file: str | os.PathLike[str] | None = None,
        key_file: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        any_memory: bool = True,
        timeout: float | None = None,
        dial_timeout: float | None = None,
        dead_for: float | None = None,
        jobs_max: int = 0,
        jobs_parallel: int = 0,
        connections: int = 0,
    ) -> None:
        if not isinstance(servers, str):
            servers = ",".join(servers)
        logs: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        # The library's thread does nothing but this: a handler of logging takes locks, and close waits for the thread.
        log = _abi.LogCallback(lambda _arg, level, line: logs.put((level, line)))
        options = _abi.COptions(
            size=ctypes.sizeof(_abi.COptions),
            servers=_text("servers", servers),
            token=_text("token", token),
            token_file=_text("token_file", token_file),
            ca_file=_text("ca_file", ca_file),
            cert_file=_text("cert_file", cert_file),
            key_file=_text("key_file", key_file),
            log=log,
            log_level=(_log.getEffectiveLevel() - logging.INFO) // 10 * 4,
            insecure=bool(insecure),
            dial_timeout_ms=_ms("dial_timeout", dial_timeout),
            dead_for_ms=_ms("dead_for", dead_for),
            timeout_ms=_ms("timeout", timeout),
            jobs_max=_count("jobs_max", jobs_max),
            jobs_parallel=_count("jobs_parallel", jobs_parallel),
            connections=_count("connections", connections),
        )
        core = _Core(_abi.load(), logs, log)
        core.flags = _abi.ANY_MEMORY if any_memory else 0
        self._servers = servers
        self._core = core
        _abi.call(core.lib.penstock_open, byref(options), byref(core.handle))
        threading.Thread(target=_write_logs, args=(logs,), name="penstock-log", daemon=True).start()
        # Also at the end of the interpreter, before which the library must have ended its calls into it.
        self._finalizer = weakref.finalize(self, core.close)

    def namespace(
        self,
        name: str,
        *,
        block_tokens: int,
        layers: int | None = None,
        token_bytes: int | None = None,
        groups: Sequence[Group] | None = None,
        flat: bool = False,
        ids: bool = False,
        tenant: str = "",
        salt: bytes = b"",
        dtype: str = "",
        layout: str = "",
        quota_bytes: int = 0,
    ) -> Namespace:
        """Create a namespace on every node, or check that the one that is there is the same.

        A value has ``layers`` × ``block_tokens`` × ``token_bytes`` bytes. A model with window attention or recurrent
        state gives ``groups`` in place of layers and token_bytes. ``dtype`` and ``layout`` are any words for what else decides the
        bytes: two engines that agree on the definition agree on every byte. Keys are chained (Calls), or ``flat``: each by
        itself. With ``ids`` they are block ids, as ``Namespace.chain`` makes them.

        Raises MismatchError if the node has another namespace of that name.
        """
        self._core.open_handle()
        if groups is None:
            if layers is None or token_bytes is None:
                raise errors.InvalidError(f"namespace {name!r}: give layers and token_bytes, or groups")
            groups = [Group(GroupKind.FULL, layers, token_bytes)]
        elif layers is not None or token_bytes is not None:
            raise errors.InvalidError(f"namespace {name!r}: both groups and layers or token_bytes are given")
        c_groups = (_abi.CGroup * len(groups))(*(_abi.CGroup(*(_count(f"namespace {name!r}: a group", v) for v in g)) for g in groups))
        definition = _abi.CDefinition(
            size=ctypes.sizeof(_abi.CDefinition),
            name=_text("name", name),
            tenant=_text("tenant", tenant),
            salt=ctypes.cast(ctypes.c_char_p(salt), ctypes.c_void_p),
            salt_bytes=len(salt),
            index=_abi.FLAT if flat else _abi.CHAINED,
            dtype=_text("dtype", dtype),
            layout=_text("layout", layout),
            block_tokens=_count("block_tokens", block_tokens),
            n_groups=len(groups),
            groups=c_groups,
            quota_bytes=_count("quota_bytes", quota_bytes, 63),
            keys=_abi.KEYS_IDS if ids else _abi.KEYS_ANY,
        )
        ns = ctypes.c_uint64(0)
        _abi.call(self._core.lib.penstock_ensure, self._core.open_handle(), byref(definition), byref(ns))
        sizes = [g.layers * g.token_bytes * (1 if g.kind == GroupKind.STATE else block_tokens) for g in groups]
        return Namespace(self, ns.value, name, block_tokens, sizes)

    def register(self, memory: Buffer | Tensor) -> Memory:
        """Make writable memory usable for values. It stays exported until ``Memory.close``, or until the store is closed."""
        self._core.open_handle()
        pins = Pins()
        pins.add(memory, writable=True)
        return self._register(pins)

    def register_address(self, address: int, length: int, *, keep: object = None) -> Memory:
        """The same for memory that is known by its address. ``keep`` is referenced for so long."""
        self._core.open_handle()
        pins = Pins()
        pins.hold(Pointers([address], [length], keep=keep))
        return self._register(pins)

    def _register(self, pins: Pins) -> Memory:
        handle = ctypes.c_uint64(0)
        try:
            _abi.call(self._core.lib.penstock_register, self._core.open_handle(), pins.addresses[0], pins.lengths[0], byref(handle))
        except BaseException:
            pins.release()
            raise
        return Memory(self._core, handle.value, pins)

    def fileno(self) -> int:
        """Return a file descriptor that is readable while completions of jobs wait for ``drain``.

        It belongs to the store and must not be read. Calls with ``Namespace.aio`` on the same store drain jobs too.
        """
        fd = ctypes.c_int32(-1)
        _abi.call(self._core.lib.penstock_eventfd, self._core.open_handle(), byref(fd))
        return fd.value

    def drain(self) -> list[Job]:
        """Return the jobs that have completed, each once. It waits for nothing."""
        self._core.drain()
        return self._core.take_collected()

    def stats(self) -> dict[str, Any]:
        """Return counters of the store, and the state of its nodes."""
        size = 4096
        while True:
            room, need = array("B", bytes(size)), ctypes.c_uint64(0)
            error = _abi.CError()
            code = self._core.lib.penstock_stats(self._core.open_handle(), room.buffer_info()[0], size, byref(need), byref(error))
            if code == _abi.OK:
                stats: dict[str, Any] = json.loads(room.tobytes().split(b"\0", 1)[0])
                return stats
            if need.value <= size:
                error.code = code
                raise _abi.error_of(error)
            size = need.value

    @property
    def closed(self) -> bool:
        return not self._core.handle.value

    def close(self) -> None:
        """End all jobs and close the store. When it returns, the library touches no memory of the caller.

        A second call does nothing, and neither does one in a forked child.
        """
        self._core.close()

    def __enter__(self) -> Store:
        self._core.open_handle()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and core.usable():
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)

    def __reduce__(self) -> Any:
        raise TypeError("a Store cannot be sent to another process: open one there")

    def __repr__(self) -> str:
        return f"<Store {self._servers}{', closed' if self.closed else ''}>"


def _write_logs(logs: queue.SimpleQueue[tuple[int, bytes] | None]) -> None:
    while (entry := logs.get()) is not None:
        level, line = entry
        _log.log(logging.INFO + level // 4 * 10, "%s", line.decode(errors="replace"))

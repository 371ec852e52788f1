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

# The time of one wait in the library. Python runs signal handlers between two waits.
_WAIT_MS = 100
_NO_LIMIT = 0xFFFFFFFF  # PENSTOCK_NO_LIMIT
_DRAIN = 64  # the greatest number of completions that one call returns


class KeyResult(IntEnum):
    """The result of one key or piece. OK and EXISTS are successes."""

    MISS = 0
    """The key is not stored. After a put: the value was not sent."""
    OK = 1
    """get: loaded and verified. put: stored. exists, touch: stored. delete: removed."""
    EXISTS = 2
    """put: the value was stored before, and nothing was sent."""
    BUSY = 3
    """The node is overloaded. Try again."""
    LOST = 4
    """get: the value is corrupt, or its device or transfer failed. The bytes in memory are undefined."""
    REFUSED = 5
    """put: refused, because the node is full, the quota is reached, the parent is absent, or the epoch has ended."""
    DOWN = 6
    """The node of this key does not answer."""


class Cut(IntEnum):
    """The reason why a prefix is not longer."""

    COMPLETE = 0
    """The prefix has all requested keys."""
    ABSENT = 1
    """The next block is not stored."""
    EPOCH = 2
    """The node is at another epoch."""
    GROUPS = 3
    """More blocks are stored, but a longer prefix lacks pieces of a window or state group."""
    LEASE = 4
    """The node grants no more leases."""
    DOWN = 5
    """The node does not answer."""
    BUSY = 6
    """The node is overloaded."""
    LOST = 7
    """The next block is corrupt, or its device or transfer failed."""


class GroupKind(IntEnum):
    """The blocks of a layer group that a prefix needs."""

    FULL = 1
    """All blocks."""
    WINDOW = 2
    """The blocks of the last ``window_tokens`` tokens."""
    STATE = 3
    """The last block, which is one snapshot of ``token_bytes`` per layer."""


class Group(NamedTuple):
    """Layers of which a prefix needs the same blocks. Fragments of a value begin and end between layers."""

    kind: GroupKind
    layers: int
    token_bytes: int
    window_tokens: int = 0


_SUCCESS = bytes(code in (KeyResult.OK, KeyResult.EXISTS) for code in range(256))


class Result:
    """The result of a batch."""

    __slots__ = ("bytes", "codes", "cut", "epoch", "lease", "ok", "prefix")

    def __init__(self, raw: _abi.CResult, codes: bytes, lease: Lease | None) -> None:
        self.codes = codes
        """A KeyResult for each key or piece, one byte each. Empty for a match."""
        self.ok: int = raw.ok
        """The number of successful results."""
        self.prefix: int = raw.prefix
        """The number of keys before the first that failed or did not match."""
        self.cut = Cut(raw.cut)
        """get and match: the reason why the prefix is not longer."""
        self.bytes: int = raw.bytes
        """The bytes transferred and verified. After a match: the bytes that a get of the prefix transfers."""
        self.epoch: int = raw.epoch
        """The epoch of the batch."""
        self.lease = lease
        """match with a lease: the lease, or None if the node did not grant one."""

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> KeyResult:
        return KeyResult(self.codes[index])

    def done(self) -> list[bool]:
        """Return for each result whether it is a success."""
        return list(map(bool, self.codes.translate(_SUCCESS)))

    def __repr__(self) -> str:
        return f"<Result: ok {self.ok} of {len(self.codes)}, prefix {self.prefix}, {self.bytes} bytes>"


class Match(Result):
    """The result of a match. The longest stored prefix has ``prefix`` keys and ``bytes`` bytes."""

    __slots__ = ("epochs",)

    def __init__(self, raw: _abi.CResult, codes: bytes, lease: Lease | None, epochs: Sequence[int] = ()) -> None:
        super().__init__(raw, codes, lease)
        self.epochs: tuple[int, ...] = tuple(epochs[: self.prefix])
        """match with ``mix``: the epoch of each matched key; ``epoch`` is the newest of them. Otherwise empty."""

    def __repr__(self) -> str:
        return f"<Match: prefix {self.prefix} ({self.cut.name.lower()}), {self.bytes} bytes>"


class _Closable:
    """A handle of the library. It is closed once, at the latest with its store."""

    def __init__(self, core: _Core, handle: int) -> None:
        self._core = core
        self._handle = handle

    def _open_handle(self) -> int:
        self._core.open_handle()
        if not self._handle:
            raise errors.ClosedError(f"{type(self).__name__} is closed")
        return self._handle


class Lease(_Closable):
    """A lease on a matched prefix: the prefix is not evicted until the lease expires or is released. The lease of
    ``Namespace.pin`` keeps an epoch live instead.

    Leaving the ``with`` block of a lease releases the lease.
    """

    def renew(self, seconds: float) -> None:
        """Make the lease expire ``seconds`` from now.

        Raises NotFoundError if the lease has ended. Its blocks may have been evicted then.
        """
        _abi.call(self._core.lib.penstock_lease_renew, self._open_handle(), _ms("seconds", seconds))

    def release(self) -> None:
        """End the lease. A second call does nothing."""
        handle, self._handle = self._handle, 0
        if handle and self._core.usable():
            _abi.call(self._core.lib.penstock_lease_release, handle)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Memory(_Closable):
    """Registered memory. Leaving its ``with`` block ends the registration."""

    def __init__(self, core: _Core, handle: int, pins: Pins) -> None:
        super().__init__(core, handle)
        self._pins = pins
        core.keep(self._pins)

    def close(self) -> None:
        """End the registration. Raises BusyError while jobs use it. A second call does nothing."""
        if self._handle and self._core.usable():
            _abi.call(self._core.lib.penstock_unregister, self._handle)
        self._handle = 0
        self._core.forget(self._pins)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Job:
    """A batch that was submitted with ``Namespace.jobs``.

    The memory of its values stays exported until the job is complete. ``Store.drain`` or ``wait`` collects the completion.
    """

    def __init__(self, core: _Core, op: int, pins: Pins, codes: array[int]) -> None:
        self._core = core
        self._op = op
        self._pins = pins
        self._codes = codes
        self._epochs = array("Q")  # the library writes the epochs of a mixed match to it
        self._id = ctypes.c_uint64(0)
        self._raw = _abi.CResult()
        self._complete = False
        self._drained = False  # whether Store.drain returns this job
        self._future: asyncio.Future[None] | None = None
        self._result: Result | None = None

    @property
    def id(self) -> int:
        """The library's number of the job, which is unique in this process."""
        return self._id.value

    @property
    def complete(self) -> bool:
        """Whether the job's completion was collected."""
        return self._complete

    def cancel(self) -> None:
        """Cancel the job, and do not wait for its completion.

        The job completes with CanceledError, or with its result if it had ended before.
        """
        if not self._complete and self._core.usable():
            self._core.cancel(self)

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until the job is complete, and return its result or raise its error.

        Raises TimedOutError after ``timeout`` seconds; the job continues.
        """
        self._core.wait(self, None if timeout is None else _ms("timeout", timeout))
        return self.result()

    def result(self) -> Result:
        """Return the result of a complete job, or raise its error. After an error, ``codes`` has what was done."""
        if not self._complete:
            raise errors.InvalidError(f"job {self.id} is not complete: wait for it, or drain the store")
        if self._raw.error.code != _abi.OK:
            raise _abi.error_of(self._raw.error)
        if self._result is None:
            lease = Lease(self._core, self._raw.lease) if self._raw.lease else None
            if self._op == _abi.OP_MATCH:
                self._result = Match(self._raw, self.codes, lease, self._epochs)
            else:
                self._result = Result(self._raw, self.codes, lease)
        return self._result

    def empty(self) -> Result:
        """Return the result of a batch without keys, which is not passed to the library."""
        self._complete = True
        return self.result()

    @property
    def codes(self) -> bytes:
        """A KeyResult for each key or piece of a complete job."""
        return self._codes.tobytes()

    def error(self) -> errors.Error | None:
        """Return the error of a complete job, or None."""
        return None if self._raw.error.code == _abi.OK else _abi.error_of(self._raw.error)


class _Core:
    """An open store of the library, which Store, Namespace, Memory, Lease and Job share.

    ``lock`` guards the tables of jobs. It is held while jobs are submitted and drained; neither waits for a node. The lock
    is reentrant, because a signal handler may use the store while the interrupted code holds the lock.
    """

    def __init__(self, lib: ctypes.CDLL, logs: queue.SimpleQueue[tuple[int, bytes] | None], callback: Any) -> None:
        self.lib = lib
        self.pid = os.getpid()
        self.handle = ctypes.c_uint64(0)
        self.flags = 0  # the flags of every batch
        self.lock = threading.RLock()
        self.jobs: dict[int, Job] = {}
        # Jobs that are being submitted and are not in ``jobs`` yet. If a signal handler raises an exception during the
        # submission, the job's memory stays referenced here, because the library may already use it.
        self.starting: set[Job] = set()
        self.collected: list[Job] = []
        self.ended = threading.Event()  # set after penstock_close has returned
        self._closer = 0
        self.registered: set[Pins] = set()
        self.loops: dict[asyncio.AbstractEventLoop, int] = {}
        self.loop_fd = -1
        self._logs = logs
        self._callback = callback  # the library calls it until penstock_close has returned

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
        elif self._closer != threading.get_ident():  # equal if a signal handler of this thread interrupted close
            self.ended.wait()

    def _close(self, handle: int) -> None:
        error = _abi.CError()
        self.lib.penstock_close(handle, byref(error))  # from here on the library does not access our memory
        self._logs.put(None)
        with self.lock:
            ended = [*self.jobs.values(), *self.starting]
            self.jobs.clear()
            self.starting.clear()
            for job in ended:
                # A new structure, because a call in another thread may still return its completion to the old one.
                job._raw = _abi.CResult()
                job._raw.error.code = _abi.ERR_CANCELED
                self._finish(job)
            for pins in self.registered:
                pins.release()
            self.registered.clear()
            loops, self.loops = list(self.loops), {}
            fd, self.loop_fd = self.loop_fd, -1
        _detach(loops, fd)

    def keep(self, pins: Pins) -> None:
        """Keep a reference to registered memory until forget, or until the store is closed."""
        self.registered.add(pins)

    def forget(self, pins: Pins) -> None:
        self.registered.discard(pins)
        pins.release()

    # -- jobs

    def submit(self, ns: int, job: Job, batch: _abi.CBatch, loop: asyncio.AbstractEventLoop | None) -> None:
        """Submit a job. With a loop, the job's completion resolves job._future in that loop."""
        error = _abi.CError()
        # Raises in a forked child. The lock may be locked there for ever by a thread of the parent.
        self.open_handle()
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
            self._give_up(job)
            raise

    def _finish(self, job: Job) -> None:
        """Mark a job as complete and resolve its future. The lock is held."""
        if job._raw.error.code == _abi.ERR_CANCELED and not self.handle.value:
            job._raw.error.code = _abi.ERR_CLOSED
            job._raw.error.message = b"the store was closed while the job was running"
        job._complete = True
        job._pins.release()
        future = job._future
        if future is not None:
            try:
                future.get_loop().call_soon_threadsafe(self._resolve, future)
            except RuntimeError:  # the loop is closed, so no task waits for the future
                job._future = None

    def _resolve(self, future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)

    def drain(self) -> None:
        """Take all completions from the library and finish their jobs."""
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
        """Wait until a job is complete, in waits of _WAIT_MS, so that Python can run signal handlers between them."""
        error = _abi.CError()
        left = timeout_ms
        while not job._complete:
            _abi.check_process(self.pid)
            handle = self.handle.value
            if not handle:
                self.ended.wait()  # until then the library may access the job's memory
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
                # Another thread has drained the job and finishes it under the lock, or it closes the store.
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
        """Cancel a job after an exception and wait for its completion, so that its memory is no longer used.

        If the wait is interrupted too, the tables keep the memory until the store is closed.
        """
        with self.lock:
            if job in self.starting:
                self.starting.discard(job)
                self.jobs[job._id.value] = job
        if job._raw.job == job._id.value:  # penstock_wait had returned the completion
            self._collect(job)
            return
        try:
            self.cancel(job)
            self.wait(job)
        except errors.Error:
            _log.debug("job %d could not be cancelled", job.id, exc_info=True)

    def run(self, ns: int, job: Job, batch: _abi.CBatch) -> Result:
        """Perform a job and wait for it. An exception during the wait (KeyboardInterrupt) cancels the job first."""
        if not batch.n_keys:
            return job.empty()
        error = _abi.CError()
        self.open_handle()  # before the lock, as in submit
        try:
            with self.lock:
                self.open_handle()
                self.starting.add(job)
            # The job stays in ``starting`` during the call, so that close and a drain of another thread find it.
            codes = job._codes.buffer_info()[0] if job._codes else None
            # Python runs signal handlers in the main thread only.
            ms = _WAIT_MS if threading.current_thread() is threading.main_thread() else _NO_LIMIT
            code = self.lib.penstock_submit_wait(ns, job._op, byref(batch), codes, ms, byref(job._id), byref(job._raw), byref(error))
            if not job._id.value:
                error.code = code
                raise _abi.error_of(error)
            with self.lock:
                if not job._complete:
                    if code == _abi.OK:
                        self._finish(job)
                    else:
                        self.jobs[job._id.value] = job
                self.starting.discard(job)
            if not job._complete:
                self.wait(job)
        except BaseException:
            if not job._complete:
                self._give_up(job)
            raise
        return job.result()

    def _give_up(self, job: Job) -> None:
        """End a job after its submission or its wait raised an exception."""
        if job._id.value:
            self._abandon(job)
            return
        with self.lock:
            self.starting.discard(job)
        job._pins.release()
        self._unwatch(job)

    # -- asyncio

    async def run_async(self, ns: int, job: Job, batch: _abi.CBatch) -> Result:
        """Like run, without blocking the event loop. A cancelled task raises CancelledError after its job has ended."""
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
        """Add the store's descriptor to a loop, which then drains the store. The lock is held."""
        if self.loop_fd < 0:
            fd = ctypes.c_int32(-1)
            _abi.call(self.lib.penstock_eventfd, self.open_handle(), byref(fd))
            # A loop must not watch a closed descriptor, and the library closes its descriptor with the store.
            self.loop_fd = os.dup(fd.value)
        if loop not in self.loops:
            loop.add_reader(self.loop_fd, self._readable)
            self.loops[loop] = 0
        self.loops[loop] += 1

    def _unwatch(self, job: Job) -> None:
        """Undo _watch. It runs in the loop's thread."""
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
        with contextlib.suppress(errors.ClosedError):  # close finishes the jobs itself
            self.drain()


def _detach(loops: list[asyncio.AbstractEventLoop], fd: int) -> None:
    """Remove a descriptor from loops, in the thread of each loop, and close the descriptor."""
    if fd < 0:
        return
    lock = threading.Lock()
    left: set[asyncio.AbstractEventLoop | None] = set(loops)

    def remove(loop: asyncio.AbstractEventLoop | None) -> None:
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
            remove(loop)
            continue
        try:
            loop.call_soon_threadsafe(remove, loop)
        except RuntimeError:  # the loop is closed
            remove(loop)
    if not loops:
        remove(None)


# -- checking arguments


def _ms(what: str, seconds: float | None) -> int:
    """Return milliseconds, or 0 for None. 0 selects the library's default."""
    if seconds is None:
        return 0
    ms = float(seconds) * 1000
    if not 0 < ms < 2**32:
        raise errors.InvalidError(f"{what} of {seconds} s; want more than 0 s and less than {2**32 // 1000} s")
    return max(1, round(ms))


def _count(what: str, value: int, bits: int = 32) -> int:
    """Return value if it is an integer of that many bits. Without the check ctypes would drop the upper bits."""
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
    """The calls with a batch of keys. They block in ``Namespace``, return awaitables in ``Namespace.aio``, and return
    jobs in ``Namespace.jobs``.

    Keys are bytes or strings of 1 to 256 bytes. In a chained namespace the keys are those of one prompt, from its first
    block on. get and put transfer the values of the keys from index ``first`` on; the keys before ``first`` identify their
    ancestors. A value is an object with the buffer protocol, a tensor, or a list of such fragments. ``pieces`` lists (index
    of the key, layer group) for each value; by default there is one value for each key, of layer group 0. ``epoch`` 0
    means the epoch of the namespace. ``timeout`` is in seconds; None means the timeout of the store.
    """

    _core: _Core
    _ns: int

    def _match(self, job: Job, batch: _abi.CBatch) -> _M:
        raise NotImplementedError

    def _run(self, job: Job, batch: _abi.CBatch) -> _R:
        raise NotImplementedError

    def match(
        self,
        keys: Iterable[Key],
        *,
        lease: float | None = None,
        epoch: int = 0,
        oldest: int = 0,
        newest: bool = False,
        mix: bool = False,
        timeout: float | None = None,
    ) -> _M:
        """Find the longest stored prefix of the keys; in a flat namespace, the stored keys before the first absent one.

        With ``lease``, the matched prefix is not evicted for ``lease`` seconds. By default only keys of ``epoch`` match.
        With ``oldest``, the result is the longest match of one live epoch from ``oldest`` to ``epoch``; of equal matches
        it is that of the newest epoch. With ``newest``, the newest epoch of the nodes takes the place of ``epoch``. All
        keys of a match are of the result's ``epoch``, which a get of them names. With ``mix``, each key is of the newest
        live epoch of that range that has it; the result's ``epochs`` has the epoch of each key, which a get needs.
        """
        return self._match(
            *self._prepare(_abi.OP_MATCH, keys, epoch=epoch, timeout=timeout, lease=lease, oldest=oldest, newest=newest, mix=mix)
        )

    def get(
        self,
        keys: Iterable[Key],
        into: Sequence[Value] | Pointers,
        *,
        first: int = 0,
        pieces: _Pieces | None = None,
        epoch: int = 0,
        epochs: Sequence[int] | None = None,
        layers: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> _R:
        """Load values into writable memory, and verify each value against the checksums of its writer.

        ``epochs`` has the epoch of each key, in place of ``epoch``: after a match with ``mix`` the match's ``epochs``. With
        ``layers`` (first, number) only these layers of each value are loaded and verified. The memory of a value holds
        only these layers then.
        """
        return self._run(*self._prepare(_abi.OP_GET, keys, into, first, pieces, epoch=epoch, timeout=timeout, epochs=epochs, layers=layers))

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
        """Store values. Values that are stored already are not sent. In a chain the first refused value ends the put."""
        return self._run(*self._prepare(_abi.OP_PUT, keys, values, first, pieces, epoch=epoch, timeout=timeout))

    def exists(self, keys: Iterable[Key], *, epoch: int = 0, timeout: float | None = None) -> _R:
        """Report for each key whether it is stored. The order of eviction does not change."""
        return self._run(*self._prepare(_abi.OP_EXISTS, keys, epoch=epoch, timeout=timeout))

    def touch(self, keys: Iterable[Key], *, epoch: int = 0, timeout: float | None = None) -> _R:
        """Report for each key whether it is stored, and mark the stored keys as used now in the order of eviction."""
        return self._run(*self._prepare(_abi.OP_TOUCH, keys, epoch=epoch, timeout=timeout))

    def delete(self, keys: Iterable[Key], *, epoch: int = 0, timeout: float | None = None) -> _R:
        """Remove keys; in a chained namespace also all their descendants, including those of other clients."""
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
        oldest: int = 0,
        newest: bool = False,
        mix: bool = False,
        epochs: Sequence[int] | None = None,
        layers: tuple[int, int] | None = None,
    ) -> tuple[Job, _abi.CBatch]:
        """Return a job and its batch. The batch's arrays live as long as the batch."""
        self._core.open_handle()
        if not isinstance(keys, Keys):
            keys = Keys(keys)
        batch = _abi.CBatch(
            size=ctypes.sizeof(_abi.CBatch),
            epoch=_count("epoch", epoch, 64),
            flags=self._core.flags | (_abi.NEWEST if newest else 0) | (_abi.MIX if mix else 0),
            timeout_ms=_ms("timeout", timeout),
            lease_ms=_ms("lease", lease),
            n_keys=len(keys),
            keys=keys.blob,
            key_offsets=keys.offsets.buffer_info()[0],
            first=_count("first", first),
            oldest_epoch=_count("oldest", oldest, 64),
        )
        if layers is not None:
            batch.first_layer, batch.layers = (_count("layers", n) for n in layers)
            if not batch.layers:
                raise errors.InvalidError(f"layers {layers}; want the first layer and a number of at least 1")
        arrays = [keys.offsets]

        def address(numbers: array[int]) -> int:
            arrays.append(numbers)
            return numbers.buffer_info()[0]

        batch.arrays = arrays
        pins = Pins()
        key_epochs = array("Q", bytes(8 * len(keys)) if mix else b"")
        if epochs is not None:
            key_epochs.extend(_count("epoch of a key", e, 64) for e in epochs)
            if len(key_epochs) != len(keys):
                raise errors.InvalidError(f"epochs of {len(key_epochs)} keys; want {len(keys)}")
        if key_epochs:
            batch.key_epochs = address(key_epochs)
        n = 0 if op == _abi.OP_MATCH else len(keys)
        if op in (_abi.OP_GET, _abi.OP_PUT):
            try:
                if values is None:
                    raise TypeError("no values; want a sequence with a value for each key")
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
        job = Job(self._core, op, pins, array("B", bytes(n)))
        if mix:
            job._epochs = key_epochs
        return job, batch


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
        self._store = store  # a reference, because a store without references is closed
        self._core = core = store._core
        self._ns = ns
        self._block_tokens = block_tokens
        self.name = name
        self.piece_bytes = tuple(value_bytes)
        """The size of a value of each layer group, in bytes."""
        self.aio = _AsyncCalls(core, ns)
        """The calls for asyncio, which return awaitables."""
        self.jobs = _JobCalls(core, ns)
        """The calls that return a Job at once."""

    @property
    def value_bytes(self) -> int:
        """The size of a value of layer group 0, in bytes. Most models have only this group."""
        return self.piece_bytes[0]

    def _match(self, job: Job, batch: _abi.CBatch) -> Match:
        return cast(Match, self._run(job, batch))

    def _run(self, job: Job, batch: _abi.CBatch) -> Result:
        return self._core.run(self._ns, job, batch)

    @property
    def epoch(self) -> int:
        """The epoch that calls use by default."""
        return self._epoch(0)

    def refresh(self) -> int:
        """Move to the newest epoch of the nodes and return it. An engine refreshes after it has loaded new weights."""
        return self._epoch(1)

    def _epoch(self, refresh: int) -> int:
        self._core.open_handle()
        epoch = ctypes.c_uint64(0)
        _abi.call(self._core.lib.penstock_epoch, self._ns, refresh, byref(epoch))
        return epoch.value

    def bump(self, to: int = 0, *, keep: int = 1) -> int:
        """Begin a new epoch, because the weights have changed, and return it.

        ``to`` is the new epoch; 0 means the newest epoch + 1. The newest ``keep`` epochs stay live, the new one included,
        and pinned epochs too: keys of a live epoch are stored and found by calls that name the epoch. The keys of all
        other epochs become misses.
        """
        self._core.open_handle()
        epoch = ctypes.c_uint64(0)
        _abi.call(self._core.lib.penstock_bump_keep, self._ns, _count("to", to, 64), _count("keep", keep), byref(epoch))
        return epoch.value

    def pin(self, seconds: float, *, epoch: int = 0) -> Lease:
        """Keep an epoch live for ``seconds``, despite later bumps; 0 means the epoch of the namespace.

        A group of rollouts can then continue with the weights with which it began. The keys of the epoch may still be
        evicted. Raises MismatchError if the epoch is not live.
        """
        self._core.open_handle()
        lease = ctypes.c_uint64(0)
        _abi.call(self._core.lib.penstock_pin_epoch, self._ns, _count("epoch", epoch, 64), _ms("seconds", seconds), None, byref(lease))
        return Lease(self._core, lease.value)

    def retire(self, epoch: int, *, force: bool = False) -> None:
        """End a live epoch that is not the newest: all its keys become misses.

        Raises MismatchError if the epoch is pinned. ``force`` ends the pins instead.
        """
        self._core.open_handle()
        _abi.call(self._core.lib.penstock_retire, self._ns, _count("epoch", epoch, 64), int(force))

    def chain(self, tokens: Iterable[int], *, parent: bytes | None = None, extra: bytes = b"") -> Keys:
        """Return the ids of the whole blocks of tokens. The namespace must have ``ids=True``.

        ``parent`` is the id of the block before the tokens, or None at the start of the prompt. ``extra`` is what the KV
        depends on besides the tokens: LoRA, cache salt, hashes of images.
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
        """Return the block ids of keys, which nodes, logs and events use."""
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

    ``servers`` are the ``host:port`` of the nodes, as a list or separated by commas. All clients must use the same spelling
    of the addresses. Times are in seconds; None selects the library's default. By default the library registers the memory
    of values for each call. With ``any_memory=False`` it refuses values outside of memory that was registered with
    ``register``, which is cheaper.

    A node that does not answer is not an error: its keys are misses until it answers. Any thread may call any method. The
    library logs to the logger ``penstock``, at the level that the logger has when the store is opened.
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
        # The library's thread only puts the line into the queue: a logging handler takes locks, and close waits for the
        # thread.
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
        # The finalizer also runs at the interpreter's exit, so that the library makes no callback after that.
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
        """Create a namespace on every node, or check that an existing one has the same definition.

        A value has ``layers`` × ``block_tokens`` × ``token_bytes`` bytes. For a model with window attention or recurrent
        state pass ``groups`` instead of ``layers`` and ``token_bytes``. Put everything else on which the bytes depend into
        ``dtype`` and ``layout``: engines with equal definitions must have equal bytes for equal keys. Keys are chained (see
        Calls), or independent with ``flat``. With ``ids`` keys are block ids, for example from ``Namespace.chain``.

        Raises MismatchError if a node has a namespace of that name with another definition.
        """
        self._core.open_handle()
        if groups is None:
            if layers is None or token_bytes is None:
                raise errors.InvalidError(f"namespace {name!r}: give layers and token_bytes, or groups")
            groups = [Group(GroupKind.FULL, layers, token_bytes)]
        elif layers is not None or token_bytes is not None:
            raise errors.InvalidError(f"namespace {name!r}: give either groups, or layers and token_bytes")
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
        """Register writable memory for values. It stays exported until ``Memory.close``, or until the store is closed."""
        self._core.open_handle()
        pins = Pins()
        pins.add(memory, writable=True)
        return self._register(pins)

    def register_address(self, address: int, length: int, *, keep: object = None) -> Memory:
        """Register memory by its address. ``keep`` is referenced until ``Memory.close``, or until the store is closed."""
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

        The store owns the descriptor; do not read it. Calls with ``Namespace.aio`` on the same store drain jobs too.
        """
        fd = ctypes.c_int32(-1)
        _abi.call(self._core.lib.penstock_eventfd, self._core.open_handle(), byref(fd))
        return fd.value

    def drain(self) -> list[Job]:
        """Return the jobs that have completed since the last call. It does not wait."""
        self._core.drain()
        return self._core.take_collected()

    def stats(self) -> dict[str, Any]:
        """Return the counters of the store and the state of its nodes."""
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
        """Cancel all jobs and close the store. After that the library does not access the caller's memory.

        A second call does nothing. In a forked child, close does nothing.
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
        raise TypeError("a Store cannot be sent to another process: open a Store there")

    def __repr__(self) -> str:
        return f"<Store {self._servers}{', closed' if self.closed else ''}>"


def _write_logs(logs: queue.SimpleQueue[tuple[int, bytes] | None]) -> None:
    while (entry := logs.get()) is not None:
        level, line = entry
        _log.log(logging.INFO + level // 4 * 10, "%s", line.decode(errors="replace"))

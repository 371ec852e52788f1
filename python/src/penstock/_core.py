"""The open store of the library, its jobs, and their results."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import queue
import threading
import time
from array import array
from collections.abc import Sequence
from ctypes import byref
from enum import IntEnum
from typing import Any, NamedTuple

from penstock import _abi, errors
from penstock._checks import _ms
from penstock._memory import Pins

__all__ = ["Cut", "Group", "GroupKind", "Job", "KeyResult", "Lease", "Match", "Memory", "Result"]

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
        handle = self._open_handle()
        try:
            _abi.call(self._core.lib.penstock_lease_renew, handle, _ms("seconds", seconds))
        except errors.ClosedError:
            if not self._core.usable():
                raise
            # The library closes the handle some time after the lease has ended.
            raise errors.NotFoundError("the lease has ended, and its blocks may have been evicted") from None

    def release(self) -> None:
        """End the lease. A second call does nothing."""
        handle, self._handle = self._handle, 0
        if handle and self._core.usable():
            with contextlib.suppress(errors.ClosedError):  # the library closes the handle some time after the lease has ended
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
        # Held by the thread that waits for this job in the library. It is reentrant for signal handlers.
        self._waiter = threading.RLock()
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

    def _drop(self) -> None:
        """Release the lease of a job whose result no caller gets."""
        if not self._complete or self._raw.error.code != _abi.OK or not self._raw.lease:
            return
        try:
            Lease(self._core, self._raw.lease).release()
        except errors.Error:
            _log.debug("the lease of job %d could not be released; it expires at its time", self.id, exc_info=True)

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
        end = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while not job._complete:
            _abi.check_process(self.pid)
            if not self.handle.value:
                self.ended.wait()  # until then the library may access the job's memory
                continue
            ms = _WAIT_MS if end is None else min(_WAIT_MS, max(0, math.ceil((end - time.monotonic()) * 1000)))
            # The library returns the completion to one call only, so one thread at a time waits for the job there.
            if job._waiter.acquire(timeout=ms / 1000):
                try:
                    self._wait_once(job, ms)
                finally:
                    job._waiter.release()
            if not job._complete and end is not None and time.monotonic() >= end:
                raise errors.TimedOutError(f"job {job.id} is not complete after {timeout_ms} ms")
        with self.lock:
            if job in self.collected:
                self.collected.remove(job)

    def _wait_once(self, job: Job, ms: int) -> None:
        """Wait up to ms for a job's completion, and collect it. The caller holds job._waiter."""
        handle = self.handle.value
        if job._complete or not handle:
            return
        if job._raw.job == job._id.value:  # an exception interrupted the thread to which penstock_wait had returned the completion
            self._collect(job)
            return
        error = _abi.CError()
        code = self.lib.penstock_wait(handle, job._id.value, ms, byref(job._raw), byref(error))
        if code == _abi.OK:
            self._collect(job)
        elif code != _abi.ERR_TIMEOUT:
            # Another thread has drained the job and finishes it under the lock, or it closes the store.
            with self.lock:
                if not job._complete and self.handle.value:
                    error.code = code
                    raise _abi.error_of(error)

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
            job._drop()
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
            if job._raw.lease:  # in another thread, because a release is a call to a node
                await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, job._drop))
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

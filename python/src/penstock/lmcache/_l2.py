"""The six methods that LMCache's native_plugin adapter calls, and deletion.

LMCache calls ``submit_*`` under a lock of its own, polls ``event_fd`` and takes results from ``drain_completions``. So a
submit starts jobs of the library and returns. Steps that need a node's answer first run in one thread, the worker.

The length of an object is not a part of its key, and a namespace has values of one length. So each length has a namespace.
The lengths are stored too, in a directory, so that other processes find them. A lookup or a deletion has only keys and
queries the namespace of each known length.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import queue
import select
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock import errors
from penstock._adapter import Connection, Counters, options, release, row
from penstock._core import Job, KeyResult
from penstock._keys import KEY_MAX
from penstock._memory import Buffer
from penstock._store import Namespace

__all__ = ["PenstockL2"]

Completion = tuple[int, bool, str, list[bool]]
"""Number of the operation, whether it succeeded, the error, and a bool for each key."""

# Maximum number of lengths. LMCache has one for each object group of each model.
_LENGTHS_MAX = 64
_SLOTS = [f"length {i}" for i in range(_LENGTHS_MAX)]
_LENGTH_BYTES = 8

_JOBS_MAX = 65536

# How long LMCache waits for a deletion, in seconds.
_DELETION_WAIT = 30

_GET, _SET, _EXISTS, _DELETE = "get", "set", "exists", "delete"
_SUCCESS = (KeyResult.OK, KeyResult.EXISTS)


class _Op:
    """One submitted batch. It is complete when all its parts have ended."""

    __slots__ = ("asked", "done", "error", "id", "keys", "kind", "parts", "reasons", "valid")

    def __init__(self, number: int, kind: str, keys: list[str]) -> None:
        self.id = number
        self.kind = kind
        self.keys = keys
        self.done = [False] * len(keys)
        self.valid: list[int] = []  # indexes of the keys that are sent
        self.asked: set[int] = set()  # lengths whose namespace was queried, of a lookup or deletion
        self.parts = 0
        self.error = ""
        self.reasons: collections.Counter[str] = collections.Counter()

    def completion(self) -> Completion:
        # Some releases of LMCache use only ok, so ok of a get or set means that every key succeeded. LMCache uses the list
        # of a lookup only if ok is True.
        ok = all(self.done) if self.kind in (_GET, _SET) else any(self.done) or not self.error
        error = self.error or ", ".join(f"{why} ({n} of {len(self.keys)} keys)" for why, n in self.reasons.items())
        return self.id, ok and not (self.kind == _SET and self.error), "" if ok else error, self.done


class _Part(NamedTuple):
    """A job of an operation, for the keys with these indexes."""

    op: _Op
    indexes: Sequence[int]


class _Watch(NamedTuple):
    """The job that accompanies a lookup. It marks the directory's records as used, and finds new records."""

    op: _Op
    slots: Sequence[int]


class _Task(NamedTuple):
    """Work for the worker: ``wait`` may wait for nodes, ``then`` continues under the lock."""

    op: _Op
    submitted: float
    wait: Callable[[], None]
    then: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Options(Connection):
    """The ``adapter_params``."""

    namespace: str = "lmcache"
    """First part of the namespaces' names. LMCache servers with the same value share their objects."""
    timeout: float = 10.0
    """Time limit of an operation, in seconds. It is less than the 30 s that LMCache waits for a deletion."""


class PenstockL2:
    """The client of an L2 adapter of LMCache. Its parameters are ``Options``.

    If a node is down, full or slow, the result of the keys reports that, and no exception is raised. Methods may be called
    from any thread.
    """

    def __init__(self, **adapter_params: object) -> None:
        options_ = options(Options, adapter_params, where="adapter_params")
        if not 0 < options_.timeout < _DELETION_WAIT:
            raise errors.InvalidError(f"adapter_params: timeout is {options_.timeout} s; want more than 0 and less than {_DELETION_WAIT}")
        self._tenant = options_.tenant
        self.counters = Counters("lmcache")
        # The bytes that LMCache stores for a model may differ between its releases.
        self._prefix = f"{options_.namespace}/{release('lmcache')}"
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._ops: dict[int, _Op] = {}
        self._jobs: dict[Job, _Part | _Watch] = {}
        self._complete: list[Completion] = []
        self._closed = False
        self._ended = threading.Event()  # close has returned
        self._namespaces: dict[int, Namespace] = {}  # by length
        self._slots: dict[int, int] = {}  # the place of a length in the directory
        self._directory: Namespace | None = None
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # The adapter has its own store, so that no other code takes its completions.
        self._store = options_.open(timeout=options_.timeout, jobs_max=_JOBS_MAX)
        # The library signals the store's descriptor, this class signals _wake, and LMCache polls both as one.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._store.fileno(), select.EPOLLIN)
        self._poll.register(self._wake, select.EPOLLIN)
        self._worker = threading.Thread(target=self._work, name="penstock-lmcache", daemon=True)
        self._worker.start()

    # -- the methods that LMCache calls

    def event_fd(self) -> int:
        """Return a descriptor that is readable while completions wait. ``drain_completions`` resets it."""
        return self._poll.fileno()

    def submit_batch_get(self, keys: list[str], bufs: list[Buffer]) -> int:
        """Begin to load objects, each into writable memory of its length, which is in use until the completion."""
        return self._submit(_GET, keys, bufs)

    def submit_batch_set(self, keys: list[str], bufs: list[Buffer]) -> int:
        """Begin to store objects. The memory is in use until the completion. A key that is stored already is a success."""
        return self._submit(_SET, keys, bufs)

    def submit_batch_exists(self, keys: list[str]) -> int:
        """Begin to look up which objects are stored."""
        return self._submit(_EXISTS, keys)

    def submit_batch_delete(self, keys: list[str]) -> int:
        """Begin to remove objects. The completion reports which objects were stored."""
        return self._submit(_DELETE, keys)

    def drain_completions(self) -> list[Completion]:
        """Return the operations that have completed, each once, without blocking."""
        jobs: list[Job] = []
        with contextlib.suppress(errors.ClosedError):  # close completes the remaining operations
            jobs = self._store.drain()
        with self._lock:
            for job in jobs:
                self._fold(job)
            if not self._ended.is_set():
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            complete, self._complete = self._complete, []
        return complete

    def close(self) -> None:
        """End all operations. After it returns, no buffer is used.

        The operations in progress have failed, and a last ``drain_completions`` returns them. A second call does nothing.
        """
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            self._ended.wait()
            return
        self._store.close()
        self._tasks.put(None)
        self._worker.join()
        with self._lock:
            self._jobs.clear()
            for op in self._ops.values():
                op.error = op.error or "the adapter was closed"
                self._complete.append(op.completion())
            self._ops.clear()
            self._poll.close()
            os.close(self._wake)
            self._ended.set()

    # -- operations; the lock is held unless a function's docstring states otherwise

    def _submit(self, kind: str, keys: list[str], bufs: list[Buffer] | None = None) -> int:
        """Begin an operation. The lock is not held."""
        with self._lock:
            if self._closed:
                raise errors.ClosedError("the adapter is closed")
            op = _Op(next(self._numbers), kind, list(keys))
            self._ops[op.id] = op
            with self._part(op):
                op.valid = [i for i in range(len(op.keys)) if self._takes(op, i)]
                if bufs is None:
                    self._ask(op, watch=True)
                elif len(bufs) != len(op.keys):
                    raise errors.InvalidError(f"{len(bufs)} buffers for {len(op.keys)} keys")
                else:
                    self._move(op, bufs)
            return op.id

    def _takes(self, op: _Op, index: int) -> bool:
        """Return whether a key can be sent."""
        size = len(op.keys[index].encode(errors="replace"))
        if 1 <= size <= KEY_MAX:
            return True
        why = f"a key of {size} bytes; want 1 to {KEY_MAX}"
        op.reasons[why] += 1
        self.counters.add("keys_refused")
        self.counters.warn("keys_refused", f"{why}: {op.keys[index][:80]!r}. Such objects are neither stored nor found")
        return False

    def _move(self, op: _Op, bufs: list[Buffer]) -> None:
        """Begin a get or set: a job for each length."""
        by_length: dict[int, list[int]] = {}
        for i in op.valid:
            by_length.setdefault(memoryview(bufs[i]).nbytes, []).append(i)
        for length, indexes in by_length.items():
            part = _Values(op, length, indexes, [bufs[i] for i in indexes])
            if length in self._namespaces:
                self._transfer(part)
            elif op.kind == _SET:
                self._later(op, functools.partial(self._record, length), functools.partial(self._transfer, part))
            else:
                self._later(op, self._discover, functools.partial(self._transfer, part))

    def _transfer(self, part: _Values) -> None:
        """Start the job of one length. A get of a length that was never stored is a miss."""
        ns = self._namespaces.get(part.length)
        if ns is None:
            part.op.reasons["MISS"] += len(part.indexes)
            return
        with self._part(part.op):
            calls = ns.jobs
            keys = [part.op.keys[i] for i in part.indexes]
            job = calls.get(keys, part.values) if part.op.kind == _GET else calls.put(keys, part.values)
            self._started(job, _Part(part.op, part.indexes))

    def _ask(self, op: _Op, *, watch: bool) -> None:
        """Begin a lookup or deletion: a job for each length that was not queried before."""
        if not op.valid:
            return
        if self._directory is None:
            self._later(op, self._discover, lambda: self._ask(op, watch=False))
            return
        keys = [op.keys[i] for i in op.valid]
        for length in self._namespaces.keys() - op.asked:
            op.asked.add(length)
            with self._part(op):
                calls = self._namespaces[length].jobs
                job = calls.exists(keys) if op.kind == _EXISTS else calls.delete(keys)
                self._started(job, _Part(op, op.valid))
        if watch:
            known = set(self._slots.values())
            slots = sorted({*known, *itertools.islice((i for i in range(_LENGTHS_MAX) if i not in known), 1)})
            with self._part(op):
                self._started(self._directory.jobs.touch([_SLOTS[i] for i in slots]), _Watch(op, slots))

    def _started(self, job: Job, of: _Part | _Watch) -> None:
        of.op.parts += 1
        self._jobs[job] = of

    def _fold(self, job: Job) -> None:
        """Merge the result of a job into its operation."""
        of = self._jobs.pop(job, None)
        if of is None:  # close has completed the operation
            return
        error = job.error()
        if error is not None:
            self._failed(of.op, error)
        if isinstance(of, _Watch):
            self._fold_watch(of, job.codes)
        else:
            self._fold_keys(of, job.codes)
        self._end_part(of.op)

    def _fold_keys(self, of: _Part, codes: bytes) -> None:
        op = of.op
        for i, code in zip(of.indexes, codes, strict=True):
            if code in _SUCCESS:
                op.done[i] = True
            elif op.kind in (_GET, _SET) or code != KeyResult.MISS:
                op.reasons[KeyResult(code).name] += 1
        for code, n in collections.Counter(codes).items():
            event = f"{op.kind}_{KeyResult(code).name.lower()}"
            self.counters.add(event, n)
            if code in _TROUBLE:
                self.counters.warn(KeyResult(code).name, f"{n} keys of a {op.kind}: {_TROUBLE[KeyResult(code)]}")
            elif code in _SUCCESS and op.kind in (_GET, _SET):
                self.counters.settle(*_PASSING)

    def _fold_watch(self, of: _Watch, codes: bytes) -> None:
        present = {slot for slot, code in zip(of.slots, codes, strict=True) if code in _SUCCESS}
        absent = {slot for slot, code in zip(of.slots, codes, strict=True) if code == KeyResult.MISS}
        known = set(self._slots.values())
        if present - known:  # another process has stored objects of another length
            self._later(of.op, self._discover, lambda: self._ask(of.op, watch=False))
        else:  # since the submit, another operation may have found a length
            self._ask(of.op, watch=False)
        for length in [length for length, slot in self._slots.items() if slot in absent]:  # evicted
            del self._slots[length]
        for length in self._namespaces.keys() - self._slots.keys():
            self._later(of.op, functools.partial(self._record, length), lambda: None)

    @contextlib.contextmanager
    def _part(self, op: _Op) -> Iterator[None]:
        """Run a block as a part of an operation. If the block raises an exception, the operation completes as a failure."""
        op.parts += 1
        try:
            yield
        except Exception as e:
            self._failed(op, e)
        self._end_part(op)

    def _end_part(self, op: _Op) -> None:
        op.parts -= 1
        if not op.parts:
            del self._ops[op.id]
            self._complete.append(op.completion())
            os.eventfd_write(self._wake, 1)

    def _failed(self, op: _Op, error: Exception) -> None:
        op.error = op.error or str(error)
        self.counters.add(f"{op.kind}_failed")
        self.counters.warn(type(error).__name__, f"a {op.kind} failed: {error}")

    # -- the worker, the only thread that waits for nodes

    def _later(self, op: _Op, wait: Callable[[], None], then: Callable[[], None]) -> None:
        op.parts += 1
        self._tasks.put(_Task(op, time.monotonic(), wait, then))

    def _work(self) -> None:
        failed_at, failure = 0.0, None
        while (task := self._tasks.get()) is not None:
            error: Exception | None = None
            if failure is not None and task.submitted <= failed_at:
                error = failure  # so that a node that does not answer delays an operation by at most twice the timeout
            else:
                failure = None
                try:
                    task.wait()
                except Exception as e:
                    error = e
                    if isinstance(e, (errors.UnavailableError, errors.TimedOutError)):
                        failed_at, failure = time.monotonic(), e
            with self._lock, self._part(task.op):
                task.op.parts -= 1  # the count of _later; _part has counted another
                if error is not None:
                    raise error
                task.then()

    def _discover(self) -> None:
        """Open the namespaces of all lengths in the directory. The lock is not held."""
        directory = self._directory or self._namespace("lengths", _LENGTH_BYTES)
        room = bytearray(_LENGTH_BYTES * _LENGTHS_MAX)
        records = [memoryview(room)[i : i + _LENGTH_BYTES] for i in range(0, len(room), _LENGTH_BYTES)]
        stored = directory.get(_SLOTS, records).done()
        for slot, length in enumerate(array("Q", bytes(room))):
            if stored[slot] and length not in self._slots:
                ns = self._namespaces.get(length) or self._namespace(str(length), length)
                with self._lock:
                    self._namespaces[length], self._slots[length] = ns, slot
        with self._lock:
            self._directory = directory

    def _record(self, length: int) -> None:
        """Open the namespace of a length, and record the length in the directory. The lock is not held."""
        self._discover()
        if length in self._slots:
            return
        ns = self._namespaces.get(length) or self._namespace(str(length), length)
        assert self._directory is not None
        for slot in range(_LENGTHS_MAX):
            if slot in self._slots.values():
                continue
            result = self._directory.put(_SLOTS[slot : slot + 1], [array("Q", [length])])[0]
            if result == KeyResult.EXISTS:
                self._discover()  # another process has taken the slot, perhaps for the same length
                if length in self._slots:
                    return
                continue
            with self._lock:
                self._namespaces[length] = ns
                if result == KeyResult.OK:
                    self._slots[length] = slot
                else:  # the next lookup tries again
                    self.counters.add("lengths_not_recorded")
            return
        raise errors.InvalidError(f"objects of {length} bytes: {self._prefix} already has the maximum of {_LENGTHS_MAX} other lengths")

    def _namespace(self, name: str, length: int) -> Namespace:
        return self._store.namespace(f"{self._prefix}/{name}", flat=True, tenant=self._tenant, **row(length))


class _Values(NamedTuple):
    """The objects of one length in a get or set."""

    op: _Op
    length: int
    indexes: Sequence[int]
    values: Sequence[Buffer]


# Warnings about conditions that end by themselves. They are logged again when the condition returns.
_PASSING = ("BUSY", "DOWN", "REFUSED", "TimedOutError", "UnavailableError")

_TROUBLE = {
    KeyResult.BUSY: "the node had no room for them",
    KeyResult.LOST: "stored, and not delivered: damaged, or a device or transfer failed",
    KeyResult.REFUSED: "the node does not store them: it is full or over its quota, or the epoch of the namespace is over",
    KeyResult.DOWN: "the node does not answer; LMCache works without it until it does",
}

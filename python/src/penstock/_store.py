"""Stores, namespaces and the calls on them."""

from __future__ import annotations

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
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from penstock import _abi, errors
from penstock._checks import _ID_BYTES, _count, _ms, _numbers, _text
from penstock._core import (
    Group,
    GroupKind,
    Job,
    Lease,
    Match,
    Memory,
    Result,
    _Core,
)
from penstock._keys import Key, Keys
from penstock._memory import Buffer, Pins, Pointers, Tensor, Value, current_stream, fragments

__all__ = ["Calls", "Namespace", "Store"]

_log = logging.getLogger("penstock")

_M = TypeVar("_M")
_R = TypeVar("_R")
_Pieces = Sequence[tuple[int, int]]


class Calls(Generic[_M, _R]):
    """The calls with a batch of keys. They block in ``Namespace``, return awaitables in ``Namespace.aio``, and return
    jobs in ``Namespace.jobs``.

    Keys are bytes or strings of 1 to 256 bytes. In a chained namespace the keys are those of one prompt, from its first
    block on. get and put transfer the values of the keys from index ``first`` on; the keys before ``first`` identify their
    ancestors. A value is an object with the buffer protocol, a tensor, or a list of such fragments. CUDA tensors must lie in
    memory that ``Store.register`` has registered; their copies begin when the work is done that ``stream`` has, the handle of
    a CUDA stream. By default that is torch's current stream of the device. ``pieces`` lists (index
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
        stream: int | None = None,
        timeout: float | None = None,
    ) -> _R:
        """Load values into writable memory, and verify each value against the checksums of its writer.

        ``epochs`` has the epoch of each key, in place of ``epoch``: after a match with ``mix`` the match's ``epochs``. With
        ``layers`` (first, number) only these layers of each value are loaded and verified. The memory of a value holds
        only these layers then.
        """
        return self._run(
            *self._prepare(
                _abi.OP_GET, keys, into, first, pieces, epoch=epoch, timeout=timeout, epochs=epochs, layers=layers, stream=stream
            )
        )

    def put(
        self,
        keys: Iterable[Key],
        values: Sequence[Value] | Pointers,
        *,
        first: int = 0,
        pieces: _Pieces | None = None,
        epoch: int = 0,
        stream: int | None = None,
        timeout: float | None = None,
    ) -> _R:
        """Store values. Values that are stored already are not sent. In a chain the first refused value ends the put."""
        return self._run(*self._prepare(_abi.OP_PUT, keys, values, first, pieces, epoch=epoch, timeout=timeout, stream=stream))

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
        stream: int | None = None,
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
                if pins.device is not None:
                    batch.flags = (batch.flags & ~_abi.ANY_MEMORY) | _abi.ON_STREAM
                    batch.stream = current_stream(pins.device) if stream is None else _count("stream", stream, 64)
                elif stream is not None:
                    raise errors.InvalidError("the argument stream is for values on a CUDA device")
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
        numbers = _numbers("tokens", tokens, 32)
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


class Store:
    """A connection to one or several storage nodes.

    ``servers`` are the ``host:port`` of the nodes, as a list or separated by commas. All clients must use the same spelling
    of the addresses. With ``discover`` they are some members of a cluster, in any spelling: the store gets the list of all
    members from them and follows the list. All clients of a cluster must set ``discover`` alike. ``zone`` is the zone of this
    host: of the replicas of a block, one in the same zone is read first. Times are in seconds; None
    selects the library's default. By default the library registers the memory of values for each call. With
    ``any_memory=False`` it refuses values outside of memory that was registered with ``register``, which is cheaper.

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
        discover: bool = False,
        zone: str | None = None,
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
            discover=bool(discover),
            zone=_text("zone", zone),
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

    def register(self, memory: Buffer | Tensor, *, staging_bytes: int = 0) -> Memory:
        """Register writable memory for values. It stays exported until ``Memory.close``, or until the store is closed.

        The values of a CUDA tensor are copied to and from pinned host memory, ``staging_bytes`` for each device of the store; 0
        is the library's default. The first registration of a device decides it.
        """
        self._core.open_handle()
        pins = Pins()
        pins.add(memory, writable=True)
        return self._register(pins, staging_bytes)

    def register_address(
        self, address: int, length: int, *, keep: object = None, cuda: int | None = None, staging_bytes: int = 0
    ) -> Memory:
        """Register memory by its address. ``keep`` is referenced until ``Memory.close``, or until the store is closed.

        ``cuda`` is the CUDA device that has the memory; None means host memory. ``staging_bytes`` is as in ``register``.
        """
        self._core.open_handle()
        pins = Pins()
        pins.hold(Pointers([address], [length], keep=keep, cuda=cuda))
        return self._register(pins, staging_bytes)

    def _register(self, pins: Pins, staging_bytes: int) -> Memory:
        handle = ctypes.c_uint64(0)
        lib, store, place = self._core.lib, self._core.open_handle(), (pins.addresses[0], pins.lengths[0])
        try:
            if pins.device is None:
                _abi.call(lib.penstock_register, store, *place, byref(handle))
            else:
                options = _abi.CDeviceOptions(
                    size=ctypes.sizeof(_abi.CDeviceOptions),
                    staging_bytes=_count("staging_bytes", staging_bytes, 64),
                    device=_count("device", pins.device),
                )
                _abi.call(lib.penstock_register_device, store, byref(options), *place, byref(handle))
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

"""The KV of an engine in a prefill/decode cluster: a Traffic moves it between storage, device memory and the other engines.

    prefill engine                                 decode engine
    Traffic.prefill ─► PrefillJob                  Traffic.decode ─► DecodeJob
    LOADED                                         ...
    layer, computed for each layer ──── KV ──────► READY: the whole prompt is in device memory
    finish ─► FINISHED                             append; finish ─► FINISHED

There are no callbacks into the program: the events of the jobs are in the queue of the Traffic.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import re
import threading
import time
from collections.abc import Callable, Iterable
from ctypes import byref
from typing import Any, NamedTuple, TypeVar

from penstock import _abi, errors
from penstock._checks import _ID_BYTES, _address, _chain, _count, _ms, _numbers, _text
from penstock._cluster import NICS_MAX, Member, Nic, Part, _part, _Path, _Queue, _string
from penstock._core import _NO_LIMIT, _WAIT_MS
from penstock._keys import Keys
from penstock._memory import Buffer, Pins, Pointers, Tensor, current_stream
from penstock._store import Namespace

__all__ = ["NO_PAGE", "DecodeJob", "PrefillJob", "Traffic", "TransferEvent", "TransferKind"]

_J = TypeVar("_J", "PrefillJob", "DecodeJob")

NO_PAGE = 2**32 - 1
"""In place of a device page of a layer with recurrent state: the block has none. PENSTOCK_NO_PAGE of penstock.h."""


class TransferKind(enum.IntEnum):
    """A step of a job."""

    LOADED = 1
    """Prefill: each block of the cached prefix is in a buffer or is to be computed: ``first_miss``. The job does not
    wait for storage after this event. The last PROGRESS of a part may follow."""
    READY = 2
    """Decode: the whole prompt is in device memory and verified. Prefill, if layers have recurrent state: the cached prefix is, in all
    layers."""
    PROGRESS = 3
    """The blocks of ``part`` before ``upto`` were read and verified, and ``read`` bytes of the part have arrived."""
    STOPPED = 4
    """The read of ``part`` ended before block ``upto``: ``gone``, ``reason``."""
    FINISHED = 5
    """The last event: this side is complete."""
    FAILED = 6
    """The last event: ``error``, ``intact``."""


class TransferEvent(NamedTuple):
    """An event of a job. Fields that the kind does not name are 0, False, empty or None."""

    kind: TransferKind
    job: PrefillJob | DecodeJob
    first_miss: int = 0
    """LOADED: the lowest block that the model computes, or ``blocks`` of the job if there is none. The model computes
    the blocks that were passed to ``recompute``, and the blocks from ``hit`` on."""
    part: Part | None = None
    """PROGRESS, STOPPED: the blocks of the read."""
    upto: int = 0
    read: int = 0
    """PROGRESS: the bytes of the part that have arrived."""
    gone: bool = False
    """STOPPED: storage does not have block ``upto``."""
    reason: str = ""
    """STOPPED: the reason."""
    intact: int = 0
    """FAILED: how many leading blocks of the cached prefix are certainly intact, for ``Attempt.done``."""
    error: errors.Error | None = None
    """FAILED: the reason. UnavailableError: the other engine does not answer."""


class _Job:
    """One side of a request. Any thread may call any method. Calls on a job that has ended have no effect."""

    _traffic: Traffic
    request: str
    """The name of the request, ``Attempt.name``."""
    blocks: int
    """The whole prompt."""
    hit: int
    """The cached prefix, in blocks."""

    def __init__(self, traffic: Traffic, request: str, blocks: int, hit: int) -> None:
        self._traffic = traffic
        self._handle = ctypes.c_uint64(0)
        self.request, self.blocks, self.hit = request, blocks, hit

    def _function(self, name: str) -> Any:
        core = self._traffic._core
        _abi.check_process(core.pid)
        return getattr(core.lib, f"penstock_transfer_{name}")

    def _order(self, name: str, *arguments: Any) -> None:
        with contextlib.suppress(errors.ClosedError):
            _abi.call(self._function(name), self._handle.value, *arguments)

    def read(self, part: tuple[int, int]) -> None:
        """Also read a part of the cached prefix that is in no buffer and that neither side is reading.

        If the buffer of a prefill engine has no room, STOPPED follows.
        """
        self._order("read", _part(part))

    def cut(self) -> None:
        """End the running reads. STOPPED follows for each of them."""
        self._order("cut")

    def finish(self) -> None:
        """Declare that no other call follows, without waiting for the end.

        FINISHED comes, for prefill, when each layer has been computed and has arrived. For decode it comes after READY,
        when storage has the prompt's new blocks or has refused them.
        """
        self._order("finish")

    def cancel(self) -> None:
        """End the job early, without waiting for the end.

        The job of the other side fails too, unless it has not connected to this one. In that case it waits until it is
        cancelled, for example after END of the planner, or until its time limit. The last event is FAILED with
        CanceledError, or FINISHED if the job had ended before.
        """
        self._order("cancel")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.request}>"


class PrefillJob(_Job):
    """The prefill side of a request; see ``Traffic.prefill``."""

    def recompute(self, part: tuple[int, int]) -> None:
        """Make the model compute a part of the cached prefix.

        After LOADED it lowers ``first_miss`` as long as the cached blocks before ``first_miss`` lack device pages. After that
        the job fails instead, because the model may have used the part.
        """
        self._order("recompute", _part(part))

    def add_pages(self, pages: Iterable[int]) -> None:
        """Add the device pages of the next blocks, after the pages of earlier calls.

        Nothing is written to device memory before all blocks of the cached prefix that the model does not compute have
        their pages.
        """
        numbers = _numbers("pages", pages, 32)
        self._order("add_pages", _address(numbers), len(numbers))

    def computed(self, layer: int, block: int | None = None) -> None:
        """Report that the pages of a layer have the KV of all blocks before ``block``, by default of the whole prompt.

        The blocks that the decode engine lacks are then sent. The pages must not change until the last event, or, if the
        Traffic has fewer bases than layers, until ``layer`` has returned for the next layer with the same base.
        """
        self._order("computed", _count("layer", layer), self.blocks if block is None else _count("block", block))

    def layer(self, layer: int, timeout: float | None = None) -> None:
        """Wait until the cached prefix of a layer is in device memory and verified.

        Raises TimedOutError after ``timeout`` seconds, and CanceledError or ClosedError if the job has ended; its last
        event has the reason.
        """
        function, number = self._function("layer"), _count("layer", layer)
        _in_slices(timeout, lambda ms: _abi.call(function, self._handle.value, number, ms))


class DecodeJob(_Job):
    """The decode side of a request; see ``Traffic.decode``."""


def verify_number(choice: str) -> int:
    """Return libpenstock's number for a value of ``verify``."""
    named = {"every-hop": 0, "last-hop": 1}.get(choice)
    if named is not None:
        return named
    sampled = re.fullmatch("one-in-([0-9]{1,9})", choice)
    if not sampled or int(sampled[1]) < 2:
        raise errors.InvalidError(f"verify: {choice!r}; want 'every-hop', 'last-hop' or 'one-in-N' with an N above 1")
    return int(sampled[1])


def _in_slices(timeout: float | None, call: Callable[[int], None]) -> None:
    """Make a call with a time limit in ms. Repeat it after TimedOutError until the time limit.

    Python runs signal handlers, in the main thread only, between two calls.
    """
    until = None if timeout is None else time.monotonic() + timeout
    longest = _WAIT_MS if threading.current_thread() is threading.main_thread() else _NO_LIMIT
    while True:
        left = longest if until is None else min(longest, max(1, round((until - time.monotonic()) * 1000)))
        try:
            return call(left)
        except errors.TimedOutError:
            if until is not None and time.monotonic() >= until:
                raise


def _on_device(memory: Buffer | Tensor | Pointers, cuda: int | None) -> tuple[Buffer | Tensor | Pointers, int | None]:
    """Return device memory as addresses, with the index of its CUDA device, or memory as it is."""
    device: Any = getattr(memory, "device", None)
    if getattr(device, "type", "cpu") == "cuda" and isinstance(memory, Tensor):
        if not memory.is_contiguous():
            raise errors.InvalidError("device memory: a tensor that is not contiguous; give all of its storage")
        if cuda is not None and cuda != device.index:
            raise errors.InvalidError(f"device memory: a tensor on {device}, and cuda={cuda}")
        return Pointers([memory.data_ptr()], [memory.numel() * memory.element_size()], keep=memory), device.index
    if isinstance(memory, Pointers):
        return memory, memory.cuda if cuda is None else cuda
    if cuda is not None:
        raise errors.InvalidError(
            f"device memory: a value of type {type(memory).__name__} with cuda={cuda}; want Pointers or a tensor there"
        )
    return memory, cuda


class Traffic(_Queue[TransferEvent]):
    """Moves the KV of one engine in a prefill/decode cluster, and has a queue of the events of its jobs.

    ``ns`` is the KV of the engine's model: its keys are ids (``ids=True``), and it has a group of full attention. It may also
    have groups with sliding windows. In such a layer only the
    blocks of the cached prefix within the window at its end are read and sent, and the pages of the others do not change.

    It may also have groups with recurrent state, in which the page of a block has the state after the block's last token. Of the
    cached prefix only the state of the last block is read, for the prefill engine. Of the prompt only the state of the last block is sent
    to the decode engine, and stored if that block is full. Other blocks may have ``NO_PAGE`` in these layers. ``order``
    lists the layers in the order in which the model computes them, each by its index in a value, which has the layers of one
    group after the other; by default that order. Layer l below is the layer ``order[l]``, the same one on both sides.
    ``memory`` is the engine's device memory, or host memory in its place: a writable buffer, a tensor on the CPU or a CUDA
    device, or ``Pointers`` with one address, to memory of CUDA device ``cuda`` if that is given. Page p of layer l has the
    layer's bytes of one block, at ``bases[l % len(bases)] + p * stride``. A decode engine has a base for each layer. A
    prefill engine may have fewer, and then holds that many layers at a time. Without ``stride`` the pages of a layer are
    contiguous. ``pages`` is the number of pages of each layer, by default as many as ``memory`` has.

    ``tables`` has the number of the page table of each layer, for an engine that allocates pages for kinds of layers apart; by default all
    layers have one table. Wherever pages of blocks are arguments, they are those of the first block in each table, then those of the
    second block, and so on. Layers of different tables may share memory.

    ``buffer_bytes`` is the size of the host buffer for prompts on their way, which the library maps, and ``append_bytes``
    that for decoded blocks. ``listen`` is the host and port of the compute NIC, by default 127.0.0.1 and a free port.
    Other engines dial ``advertise`` and prove ``token``; by default these are the address of ``listen`` and random bytes.
    KV on a CUDA device passes through the host buffer; ``follow`` orders its copies after the work of a stream. At most
    ``persist_max`` blocks wait for storage; others are not stored. At most ``transfers_max`` (1024) jobs run or have events
    that were not taken.

    ``ca_file``, ``cert_file`` and ``key_file`` are PEM files for TLS with the other engines, all three or none. Each engine
    verifies the certificate of the other one, which is valid for the host of ``advertise``, as a server's and as a client's.
    Without them the payload is not encrypted. Engines with and without TLS refuse each other.

    ``verify`` chooses where KV is compared with its checksums between the engines: ``every-hop``; ``last-hop``, only in
    ``memory``, or in the host buffer before a CUDA device; or ``one-in-N``, there and for one layer of a block in N, chosen at
    random, so that some wrong blocks are not noticed. Blocks are always verified when storage returns and when it stores them.

    >>> from penstock import Store
    >>> from penstock.testing import node
    >>> with node() as n, Store(n.address) as store:
    ...     ns = store.namespace("demo", block_tokens=16, layers=2, token_bytes=64, ids=True)
    ...     with Traffic(ns, bytearray(8 * ns.value_bytes), [0, 4 * ns.value_bytes], buffer_bytes=1 << 20) as traffic:
    ...         traffic.member("engine 0", device_blocks=8).block_bytes == ns.value_bytes
    True
    """

    _NAME = "traffic"
    _RAW = _abi.CTransferEvent

    def __init__(
        self,
        ns: Namespace,
        memory: Buffer | Tensor | Pointers,
        bases: Iterable[int],
        *,
        buffer_bytes: int,
        order: Iterable[int] = (),
        stride: int = 0,
        pages: int = 0,
        tables: Iterable[int] = (),
        append_bytes: int = 0,
        listen: str | None = None,
        advertise: str | None = None,
        token: bytes = b"",
        persist_max: int = 0,
        transfers_max: int = 0,
        connections: int = 0,
        cuda: int | None = None,
        verify: str = "every-hop",
        ca_file: _Path | None = None,
        cert_file: _Path | None = None,
        key_file: _Path | None = None,
    ) -> None:
        super().__init__(ns._core)
        self._ns = ns  # a reference, because a store without references is closed
        self._jobs: dict[int, PrefillJob | DecodeJob] = {}
        offsets, layers = _numbers("bases", bases), _numbers("order", order, 32)
        of_tables = _numbers("tables", tables, 32)
        memory, cuda = _on_device(memory, cuda)
        self._cuda = cuda
        pins = Pins()
        try:
            if isinstance(memory, Pointers):
                pins.hold(memory)
            else:
                pins.add(memory, writable=True)
            if len(pins.addresses) != 1:
                raise errors.InvalidError(f"device memory at {len(pins.addresses)} addresses; want one")
            options = _abi.CTrafficOptions(
                size=ctypes.sizeof(_abi.CTrafficOptions),
                listen=_text("listen", listen),
                advertise=_text("advertise", advertise),
                token=token or None,
                memory=pins.addresses[0],
                memory_bytes=pins.lengths[0],
                bases=_address(offsets),
                stride=_count("stride", stride, 64),
                buffer_bytes=_count("buffer_bytes", buffer_bytes, 63),
                append_bytes=_count("append_bytes", append_bytes, 63),
                token_bytes=len(token),
                n_bases=len(offsets),
                pages=_count("pages", pages),
                persist_max=_count("persist_max", persist_max, 31),
                transfers_max=_count("transfers_max", transfers_max, 31),
                connections=_count("connections", connections, 31),
                cuda=0 if cuda is None else 1 + _count("cuda", cuda, 31),
                verify=verify_number(verify),
                ca_file=_text("ca_file", ca_file),
                cert_file=_text("cert_file", cert_file),
                key_file=_text("key_file", key_file),
                order=_address(layers),
                n_order=len(layers),
                tables=_address(of_tables),
                n_tables=len(of_tables),
            )
            self._core.open_handle()
        except BaseException:
            pins.release()
            raise
        self._core.keep(pins)
        try:
            self._open(ns, options, pins)
        except errors.Error:
            self._core.forget(pins)
            raise
        description = _abi.CTrafficDescription(size=ctypes.sizeof(_abi.CTrafficDescription))
        _abi.call(self._core.lib.penstock_traffic_describe, self._handle, byref(description))
        self.address: bytes = description.address
        """Where the engines of the other side reach this one: ``Member.address``."""
        self.token = bytes(description.token[: description.token_bytes])
        """The token that they prove: ``Member.token``."""
        self._description = description

    def follow(self, stream: int | None = None) -> None:
        """Make later calls wait for a CUDA stream, given by its handle; by default torch's current stream of the device.

        ``prefill``, ``decode``, ``add_pages``, ``computed`` and ``append`` then record an event in the stream, and their copies wait
        for it on the device: copies to pages for the work that may still use them, copies from pages for the work that computes
        them. Only ``append`` waits for its copy. After ``cancel`` the last event comes when the stream has done that work. Without
        this call the device must have done it before. For ``memory`` on a CUDA device, which has a base for each layer.
        """
        if self._cuda is None:
            raise errors.InvalidError("a stream is for device memory, and the memory of this Traffic is host memory")
        handle = current_stream(self._cuda) if stream is None else _count("stream", stream, 64)
        _abi.call(self._function("follow"), self._open_handle(), handle)

    def member(self, name: str, *, device_blocks: int = 0, prompt_blocks: int = 0, prefix_cache_blocks: int = 0) -> Member:
        """Return this engine as a member of the group of a Leader."""
        d = self._description
        return Member(
            name,
            device_blocks,
            self.address,
            self.token,
            prompt_blocks,
            buffer_bytes=d.buffer_bytes,
            block_bytes=d.block_bytes,
            sums_bytes=d.sums_bytes,
            request_bytes=d.request_bytes,
            prefix_cache_blocks=prefix_cache_blocks,
        )

    def nics(self) -> list[Nic]:
        """Return the counters of the compute NIC, for ``Leader.report_nics``."""
        raw, n = (_abi.CNic * NICS_MAX)(), ctypes.c_uint32()
        _abi.call(self._function("nics"), self._open_handle(), raw, NICS_MAX, byref(n))
        return [Nic(_string(nic.name), nic.bytes_out, nic.bytes_in) for nic in raw[: n.value]]

    def prefill(
        self,
        request: str,
        ids: Keys | Iterable[bytes],
        *,
        blocks: int,
        hit: int = 0,
        parts: Iterable[tuple[int, int]] = (),
        pages: Iterable[int] = (),
        epoch: int = 0,
        timeout: float | None = None,
    ) -> PrefillJob:
        """Begin the prefill side of a request and return at once. Its events are in the queue.

        ``request`` is ``Attempt.name``, as on the other side. It differs from those of the other jobs of this Traffic.
        ``ids`` are at least the ids of the cached prefix, ``blocks`` is the length of the prompt, whose last block may be
        partly filled, and ``hit`` is the length of the cached prefix. ``parts`` are its ranges that this side reads.
        ``pages`` are the device pages of the first blocks, of any number; ``PrefillJob.add_pages`` adds the others.
        ``epoch`` is by default the epoch of the namespace. After ``timeout`` seconds the job fails.

        Raises BusyError if ``transfers_max`` jobs have not ended.
        """
        job = PrefillJob(self, request, blocks, hit)
        return self._begin("prefill", job, ids, parts, pages, epoch, timeout, b"", b"", True, 0)

    def decode(
        self,
        request: str,
        ids: Keys | Iterable[bytes],
        *,
        blocks: int,
        pages: Iterable[int],
        peer_address: bytes,
        peer_token: bytes,
        hit: int = 0,
        parts: Iterable[tuple[int, int]] = (),
        epoch: int = 0,
        timeout: float | None = None,
        persist: bool = True,
        resident: int = 0,
    ) -> DecodeJob:
        """Begin the decode side of a request and return at once. Its events are in the queue.

        ``peer_address`` and ``peer_token`` are the values in the attempt: ``address`` and ``token`` of the other engine's
        Traffic. ``ids`` are the ids of the prompt's full blocks, and ``pages`` the device pages of all ``blocks``. With
        ``persist`` the prompt's new full blocks are stored. The first ``resident`` pages have their KV of ``epoch``
        already; those of the cached prefix do not change, so other requests may use them too. The other arguments are as
        for ``prefill``.
        """
        job = DecodeJob(self, request, blocks, hit)
        return self._begin("decode", job, ids, parts, pages, epoch, timeout, peer_address, peer_token, persist, resident)

    def _begin(
        self,
        function: str,
        job: _J,
        ids: Keys | Iterable[bytes],
        parts: Iterable[tuple[int, int]],
        pages: Iterable[int],
        epoch: int,
        timeout: float | None,
        address: bytes,
        token: bytes,
        persist: bool,
        resident: int,
    ) -> _J:
        chain, numbers, c_parts = _chain(ids), _numbers("pages", pages, 32), [_part(p) for p in parts]
        options = _abi.CTransferOptions(
            size=ctypes.sizeof(_abi.CTransferOptions),
            request=_text("request", job.request),
            ids=chain or None,
            parts=(_abi.CPart * len(c_parts))(*c_parts),
            pages=_address(numbers),
            peer_address=address or None,
            peer_token=token or None,
            epoch=_count("epoch", epoch, 64),
            peer_address_bytes=len(address),
            peer_token_bytes=len(token),
            n_ids=len(chain) // _ID_BYTES,
            n_parts=len(c_parts),
            n_pages=len(numbers),
            blocks=_count("blocks", job.blocks),
            hit_blocks=_count("hit", job.hit),
            timeout_ms=_ms("timeout", timeout),
            no_persist=not persist,
            resident_blocks=_count("resident", resident),
        )
        self._open_handle()
        with self._core.lock:  # no other thread takes an event of the job before it is in the table
            _abi.call(self._function(function), self._open_handle(), byref(options), byref(job._handle))
            self._jobs[job._handle.value] = job
        return job

    def append(self, request: str, ids: Keys | Iterable[bytes], *pages: int, epoch: int = 0, timeout: float | None = None) -> None:
        """Store one decoded block, whose KV is in ``pages``, one in each page table. ``ids`` end with the id of the block.

        With ``NO_PAGE`` for all layers of a group with recurrent state the block is stored without that state, and no prefix ends
        there. It waits for room for the block, and returns when the pages may change. Raises TimedOutError after ``timeout``
        seconds; then nothing was stored. A block that storage refuses raises no exception.
        """
        chain, name = _chain(ids), _text("request", request)
        function, handle = self._function("append_pages"), self._open_handle()
        numbers, version = _numbers("pages", pages, 32), _count("epoch", epoch, 64)

        def call(ms: int) -> None:
            _abi.call(function, handle, name, chain or None, len(chain) // _ID_BYTES, version, _address(numbers), len(numbers), ms)

        _in_slices(timeout, call)

    def settle(self, id: bytes, timeout: float | None = None) -> None:
        """Wait until a block that was computed or decoded here is stored or was refused.

        It returns at once for a block that is not being stored. Raises TimedOutError after ``timeout`` seconds.
        """
        if len(id) != _ID_BYTES:
            raise errors.InvalidError(f"an id of {len(id)} bytes; want {_ID_BYTES}")
        function, handle = self._function("settle"), self._open_handle()
        _in_slices(timeout, lambda ms: _abi.call(function, handle, bytes(id), ms))

    def _accept(self, raw: _abi.CTransferEvent) -> None:
        kind = TransferKind(raw.kind)
        job = self._jobs.get(raw.transfer)
        if job is None:  # an exception of a signal handler ended its begin
            self._at += 1
            return
        event = TransferEvent(
            kind,
            job,
            first_miss=raw.first_miss,
            part=Part(getattr(raw.part, "from"), raw.part.to) if kind in (TransferKind.PROGRESS, TransferKind.STOPPED) else None,
            upto=raw.upto,
            read=raw.bytes,
            gone=bool(raw.gone),
            reason=_string(raw.error.message) if kind == TransferKind.STOPPED else "",
            intact=raw.intact,
            error=_abi.error_of(raw.error) if kind == TransferKind.FAILED else None,
        )
        # No signal handler runs between these two statements.
        self._at += 1
        self._ready.append(event)
        if kind in (TransferKind.FINISHED, TransferKind.FAILED):
            self._jobs.pop(raw.transfer, None)

    def close(self) -> None:
        """End the jobs, whose events are lost, and release the memory.

        It waits for the ends of the jobs, and for blocks that are being stored, at most a minute for each write. A second
        call does nothing. In a forked child, close does nothing.
        """
        super().close()

    def __repr__(self) -> str:
        return f"<Traffic of {self._ns.name}{', closed' if self.closed else ''}>"

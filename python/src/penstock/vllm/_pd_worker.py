"""The worker's side of PenstockDualPath: the jobs of a traffic manager for each shard on the KV cache of one rank.

              prefill engine                                decode engine
begin         jobs, pages of the step ─► add_pages          jobs, with all pages of the prompt
each layer    wait_for_layer ─► layer, compute,
              save_layer ─► computed
append                                                      blocks that the step has filled
poll          LOADED, PROGRESS, STOPPED, ends               READY: the request is scheduled

With recurrent state a prefill engine loads the whole cached prefix before the request is scheduled (Fetch), because the engine copies the
state before it computes the first layer, and no layer with state waits for its load. Such layers leave at the end of a step.

With several ranks the last layer of a step leaves when all of them have taken the step (Release). Of latent KV, rank 0 has all jobs,
and passes what has arrived to the other ranks: each layer in wait_for_layer on a prefill engine, the prompt in begin on a decode engine.
Each rank takes part in the same broadcasts in the same order, which the Plan alone determines.
"""

from __future__ import annotations

import ctypes
import logging
import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock import _adapter, errors
from penstock._cluster import ActionKind, Nic, Role
from penstock._keys import Keys
from penstock._memory import Pointers
from penstock._store import Namespace, Store
from penstock._traffic import DecodeJob, PrefillJob, Traffic, TransferEvent, TransferKind
from penstock.vllm import _layout
from penstock.vllm._layout import LATENT, Layer, Layout, read_layout, rows_apart, split
from penstock.vllm._pd_plan import Append, Definition, Ended, Fetch, Job, Options, Order, Plan, Progress, Release, Report, Step, Stopped
from penstock.vllm._worker import define, open_namespace

__all__ = ["GROUPS", "Broadcast", "Worker"]

_log = logging.getLogger("penstock.vllm")

_ID = _adapter.Chain.SIZE

GROUPS = (
    "the engine has a KV cache group for each kind of layer; PenstockDualPath serves one for all layers: start it without"
    " --no-disable-hybrid-kv-cache-manager"
)
"""The reason why an engine that frees blocks of a running request is refused."""

_IDLE = 0.005
"""Seconds that a step without computation waits for an event. While requests wait for transfers, the engine repeats such
steps, which would otherwise take the CPU from engines that compute."""


Broadcast = Callable[[Sequence[tuple[int, int]]], None]
"""Copies spans of rank 0's memory to spans of the other ranks. A span is (address, length). Every rank calls it with the same
lengths."""


class _Shard(NamedTuple):
    number: int
    ns: Namespace
    traffic: Traffic


@dataclass
class _Open:
    store: Store
    shards: list[_Shard]

    def close(self) -> None:
        for shard in self.shards:
            shard.traffic.close()
        self.store.close()


@dataclass
class _Running:
    """A job that has not ended in all shards of the rank."""

    job: Job
    pages: list[int]
    handles: dict[int, PrefillJob | DecodeJob] = field(default_factory=dict)  # by shard
    left: set[int] = field(default_factory=set)  # the shards in which it has not ended
    ready: set[int] = field(default_factory=set)  # decode: those that have the prompt in the KV cache
    failed: bool = False  # prefill: a layer did not arrive; the engine computes the prompt again
    fetching: bool = False  # prefill: the request waits for the cached prefix

    def cancel(self) -> None:
        for handle in self.handles.values():
            handle.cancel()

    def finish(self) -> None:
        for handle in self.handles.values():
            handle.finish()


class Worker:
    """Begins the jobs of each step and collects their results.

    Only register and bump wait for nodes. wait_for_layer waits for copies from DRAM and from the decode engine, because
    storage has been read when the request is scheduled. The end of a job is reported when it no longer accesses its blocks.
    """

    def __init__(
        self, options: Options, counters: _adapter.Counters, *, role: Role, broadcast: Broadcast, prefix_cache: bool = False
    ) -> None:
        """``prefix_cache``: the engine has a prefix cache, which is for decode engines only."""
        self._options = options
        self._prefix_cache = prefix_cache
        self._counters = counters
        self._role = role
        self._broadcast = broadcast
        self._layers: dict[str, list[int]] = {}  # by name: the numbers of its fragments
        self._states: list[str] = []  # the layers with recurrent state
        self._memory: list[Layer] = []
        self._rank, self._ranks = 0, 1
        self._on_device = False
        self._passes = False  # rank 0 has all jobs, and passes the KV to the other ranks
        self._link: _adapter.Link[_Open] | None = None
        self.definitions: tuple[Definition, ...] = ()
        """Of the shards of this rank, after register."""
        self._running: dict[str, _Running] = {}
        self._by_handle: dict[PrefillJob | DecodeJob, tuple[_Running, int]] = {}
        self._steps: list[tuple[Step, _Running]] = []
        self._passing: list[Step] = []  # the steps whose cached prefix rank 0 passes on
        self._appends: list[Append] = []
        self._idle = self._waited = False
        self._freed: set[str] = set()
        self._loaded: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()  # with recurrent state: those whose load has failed
        self._report = Report()
        self._nics: dict[int, list[Nic]] = {}  # by shard: the last counters that a report had

    def register(
        self, tensors: Mapping[str, Any], config: Any, windows: Mapping[str, int], facts: Mapping[str, Any], rank: int, ranks: int
    ) -> None:
        """Take the KV cache, of layers some of which have windows, and wait for the nodes and the compute NIC for at most connect_timeout.

        Raises InvalidError for a KV cache that a traffic manager cannot carry.
        """
        layout = read_layout(tensors, config, windows)
        heads = max(getattr(group.kv_cache_spec, "num_kv_heads", 0) for group in config.kv_cache_groups)
        self.open(layout, facts, rank, ranks, heads=heads)

    def open(self, layout: Layout, facts: Mapping[str, Any], rank: int, ranks: int, *, heads: int = 0) -> None:
        """Register a KV cache of a known layout, which has ``heads`` KV heads."""
        o = self._options
        self._take(layout)
        if layout.facts["specs"] == [LATENT]:
            if o.shards > 1:
                raise errors.InvalidError(
                    f"option 'shards' is {o.shards}: the model's KV is latent ({LATENT}), which is one shard for any number of ranks."
                    " Remove the option"
                )
            self._passes = ranks > 1
            if self._passes and layout.cuda is not None:
                raise errors.InvalidError(
                    f"the model's KV is latent ({LATENT}) and on CUDA device {layout.cuda}; PenstockDualPath passes latent KV between"
                    " ranks in host memory only. Set tensor_parallel_size to 1, or use PenstockConnector"
                )
            if rank:
                self._rank = rank
                return
            ranks = 1
        self._rank, self._ranks = rank, ranks
        self._on_device = layout.cuda is not None
        address, length, keep = layout.memory[0]
        shards = o.shards or ranks
        if shards > 1:
            layout = rows_apart(layout)
        mine = shards // ranks
        layouts = split(layout, mine, heads)
        order, stride = self._take(layouts[0])  # each shard has fragments of its own, and all have the same number
        tables = [layer.pool for layer in self._memory] if layout.pools > 1 else []
        bases = [define(o, part, facts, rank * mine + i, shards) for i, part in enumerate(layouts)]

        def open_shard(store: Store, part: Layout, base: _layout.Definition) -> _Shard:
            ns = open_namespace(store, base)
            offsets = [layer.address - address for layer in part.in_order()[0]]
            traffic = Traffic(
                ns, Pointers([address], [length], keep=keep, cuda=layout.cuda), offsets, order=order, stride=stride, pages=layout.blocks,
                tables=tables, buffer_bytes=(o.buffer_mib << 20) // shards, listen=_listen(o.listen, base.rank), verify=o.verify,
                ca_file=o.listen_ca_file, cert_file=o.listen_cert_file, key_file=o.listen_key_file,
            )  # fmt: skip
            return _Shard(base.rank, ns, traffic)

        def open_() -> _Open:
            opened = _Open(o.open(), [])
            try:
                for part, base in zip(layouts, bases, strict=True):
                    opened.shards.append(open_shard(opened.store, part, base))
            except BaseException:
                opened.close()
                raise
            return opened

        self._link = _adapter.Link(f"penstock: rank {rank}", open_, retry=o.retry_interval, log=_log)
        if not self._link.wait(o.connect_timeout):
            late = errors.UnavailableError(f"no node at {o.servers} within connect_timeout, {o.connect_timeout:g} s")
            raise self._link.refused or late
        opened = self._link.value
        assert opened is not None
        usable = layout.blocks - 1  # the null block
        self.definitions = tuple(
            Definition(
                **vars(base),
                member=shard.traffic.member(o.engine, device_blocks=usable, prefix_cache_blocks=usable if self._prefix_cache else 0),
                epoch=shard.ns.epoch,
            )
            for base, shard in zip(bases, opened.shards, strict=True)
        )

    def _take(self, layout: Layout) -> tuple[list[int], int]:
        """Number the layers of a layout. Return order and stride as ``_device`` does."""
        self._memory, order, stride = _device(layout)
        self._layers = {}
        for i, layer in enumerate(self._memory):
            self._layers.setdefault(layer.name, []).append(i)
        self._states = list({layer.name: 0 for group in layout.groups if group.state for layer in group.layers})
        return order, stride

    def begin(self, plan: Plan) -> None:
        """Begin a step, before the engine computes."""
        self._follow()
        opened = self._link.value if self._link is not None else None
        if opened is not None:
            for job in plan.jobs:
                self._start(opened, job)
        running = dict(self._running)
        for name in plan.cancels:
            self._cancel(name)
        for release in plan.releases:
            self._release(release)
        for order in plan.orders:
            self._order(order)
        for fetch in plan.fetches:
            self._fetch(fetch)
        self._idle, self._waited, self._steps, self._passing, self._appends = plan.idle, False, [], [], plan.appends
        for step in plan.steps:
            # The prefix of a job that a cancel has just ended is not loaded, so the step fails.
            one = (running if step.first else self._running).get(step.name)
            if self._passes and step.hit:
                self._passing.append(step)
            if one is None:
                if step.first and opened is not None and not self._states:
                    self._failed_blocks.update(step.pages)
                continue
            self._steps.append((step, one))
            one.pages += step.pages
            if step.pages:
                for handle in one.handles.values():
                    assert isinstance(handle, PrefillJob)
                    handle.add_pages(step.pages)
        self._freed.update(plan.freed)
        for request, pages in plan.lost:
            self._lose(request, pages)
        for request, pages in plan.received:
            for layer in range(len(self._memory)):
                self._pass(layer, pages)
            self._loaded.add(request)

    def _fetch(self, fetch: Fetch) -> None:
        running = self._running.get(fetch.name)
        if running is None:
            self._lose(fetch.request, ())
            return
        running.fetching = True
        for handle in running.handles.values():
            assert isinstance(handle, PrefillJob)
            handle.add_pages(fetch.pages)

    def _lose(self, request: str, pages: Sequence[int]) -> None:
        """Report the failed load of a request that waits for it."""
        self._loaded.add(request)
        if self._states:
            # vLLM takes failed blocks only from models with one KV cache group. It computes a failed request from the beginning.
            self._failed_requests.add(request)
        else:
            self._failed_blocks.update(pages)

    def _follow(self) -> None:
        """Order the copies of the next calls after the work in the engine's stream. The device waits for that, and no thread."""
        if self._on_device and self._link is not None and self._link.value is not None:
            for shard in self._link.value.shards:
                shard.traffic.follow()

    def _start(self, opened: _Open, job: Job) -> None:
        running = self._running[job.name] = _Running(job, list(job.pages), left={shard.number for shard in opened.shards})
        for shard in opened.shards:
            try:
                handle = self._begin(shard, job)
            except errors.Error as e:
                self._end(running, shard.number, Ended(f"its transfers were not started: {e}", 0))
                continue
            running.handles[shard.number] = handle
            self._by_handle[handle] = running, shard.number
        if len(running.handles) < len(opened.shards):
            running.cancel()

    def _begin(self, shard: _Shard, job: Job) -> PrefillJob | DecodeJob:
        ids, limit = Keys.packed(job.ids, _ID), self._options.job_timeout
        if self._role == Role.PREFILL:
            return shard.traffic.prefill(job.name, ids, epoch=job.epoch, blocks=job.blocks, hit=job.hit, parts=job.parts, timeout=limit)
        address, token = job.peers[shard.number]
        return shard.traffic.decode(
            job.name, ids, epoch=job.epoch, blocks=job.blocks, hit=job.hit, parts=job.parts, pages=job.pages,
            resident=job.resident, peer_address=address, peer_token=token, timeout=limit,
        )  # fmt: skip

    def _end(self, running: _Running, shard: int, ended: Ended) -> None:
        """Report the end of a job in a shard. The engine computes a prompt that a decode engine has not received."""
        job = running.job
        self._report.ended.setdefault(job.name, {})[shard] = ended
        running.left.discard(shard)
        if ended.failure:
            running.cancel()
        if running.left:
            return
        del self._running[job.name]
        if running.fetching:
            self._lose(job.request, ())
        if self._role == Role.DECODE and len(running.ready) < len(self.definitions):
            missing = job.pages[job.resident :]
            self._counters.add("failed_blocks", job.blocks - job.resident)
            if not self._passes:  # otherwise all ranks get it as lost
                self._lose(job.request, missing)

    def _cancel(self, name: str) -> None:
        """End a job, and wait until it no longer accesses its blocks."""
        running = self._running.get(name)
        if running is not None:
            running.cancel()
            self._await_end(running)

    def _await_end(self, running: _Running) -> None:
        assert self._link is not None
        assert self._link.value is not None
        for shard in self._link.value.shards:
            while shard.number in running.left:
                self._collect(shard.traffic.wait())

    def _release(self, release: Release) -> None:
        """Send what a step that all ranks have taken has computed of the last layer."""
        running = self._running.get(release.name)
        if running is not None and not running.failed:
            for fragment in self._last:
                self._computed(running, fragment, release.computed)
            if release.computed == running.job.blocks:
                running.finish()

    @property
    def _last(self) -> list[int]:
        """The fragments of the last layer."""
        return self._layers[self._memory[-1].name]

    def _order(self, order: Order) -> None:
        running = self._running.get(order.name)
        if running is None:
            return
        for handle in running.handles.values():
            if order.kind == ActionKind.CUT:
                handle.cut()
                continue
            assert order.part is not None
            if order.kind == ActionKind.READ:
                handle.read(order.part)
            elif isinstance(handle, PrefillJob):
                # The model computes all blocks after the first block that it computes.
                handle.recompute((order.part.start, running.job.hit))

    def wait_for_layer(self, name: str) -> None:
        """Wait until a layer of the cached prefixes of this step is in the KV cache and verified."""
        self._waited = True
        if self._states:
            return  # the prefix was loaded before the step
        fragments = self._layers.get(name, [])
        for _, running in self._steps:
            if not fragments or running.failed:
                continue
            try:
                for handle in running.handles.values():
                    assert isinstance(handle, PrefillJob)
                    for fragment in fragments:
                        handle.layer(fragment, timeout=self._options.layer_timeout)
            except errors.Error as e:
                self._fail(running, f"layer {name} did not come: {e}")
        for fragment in fragments:
            for step in self._passing:
                # Also if the layer has not come: each rank decides by the plan alone, and the engine computes the blocks again.
                self._pass(fragment, step.pages[: step.hit])

    def _pass(self, layer: int, pages: Sequence[int]) -> None:
        """Copy blocks of a layer from rank 0 to the other ranks."""
        one = self._memory[layer]
        self._broadcast([(one.address + page * one.stride, one.page) for page in pages])

    def save_layer(self, name: str) -> None:
        """Send the blocks of a layer that this step has computed. With several ranks the last layer waits for its release."""
        fragments = self._layers.get(name, [])
        if not fragments or (self._ranks > 1 and fragments == self._last):
            return
        if self._steps:
            self._follow()
        for step, running in self._steps:
            if not running.failed:
                for fragment in fragments:
                    self._computed(running, fragment, step.computed)

    def _computed(self, running: _Running, layer: int, end: int) -> None:
        for handle in running.handles.values():
            assert isinstance(handle, PrefillJob)
            handle.computed(layer, end)

    def end(self) -> None:
        """End a step, after the engine has computed."""
        if self._steps:
            for name in self._states:
                self.save_layer(name)
        steps, self._steps = self._steps, []
        for step, running in steps:
            if not self._waited and not running.failed:
                self._counters.warn("hooks", "the engine does not call wait_for_layer_load, so every prefill fails")
                self._fail(running, "the engine does not call wait_for_layer_load")
            if running.failed:
                self._await_end(running)  # the next step computes these blocks
            elif self._ranks > 1:
                self._report.taken[step.number] = {self._rank}
            elif step.computed == running.job.blocks:
                running.finish()
        appends, self._appends = self._appends, []
        if appends:
            self._follow()
        for one in appends:
            self._append(one)

    def _fail(self, running: _Running, why: str) -> None:
        """Fail a job in the middle of a step, which continues with blocks that are not loaded."""
        running.failed = True
        self._counters.warn("layer", f"attempt {running.job.name}: {why}")
        if not self._states:
            self._failed_blocks.update(running.pages[: running.job.hit])
        running.cancel()

    def _append(self, one: Append) -> None:
        if self._link is None or self._link.value is None:
            return
        stored = True
        for shard in self._link.value.shards:
            try:
                shard.traffic.append(one.name, Keys.packed(one.ids, _ID), *one.pages, epoch=one.epoch, timeout=self._options.append_timeout)
            except errors.Error as e:
                stored = False
                self._counters.warn("append", f"a decoded block was not stored: {e}")
        self._counters.add("saved_blocks" if stored else "dropped_blocks")

    def poll(self) -> None:
        """Collect the events of the jobs."""
        if self._link is None or self._link.value is None:
            return
        shards = self._link.value.shards
        if self._idle:
            poll = select.poll()
            for shard in shards:
                poll.register(shard.traffic.fileno(), select.POLLIN)
            poll.poll(_IDLE * 1000)
        for shard in shards:
            self._collect(shard.traffic.drain())

    def _collect(self, events: list[TransferEvent]) -> None:
        report = self._report
        for event in events:
            found = self._by_handle.get(event.job)
            if found is None:
                continue
            running, shard = found
            name = running.job.name
            if event.kind == TransferKind.LOADED:
                report.loaded.setdefault(name, {})[shard] = event.first_miss
            elif event.kind == TransferKind.READY:
                running.ready.add(shard)
                if self._role == Role.DECODE:
                    event.job.finish()  # its end comes when storage has the prompt's new blocks
                if len(running.ready) < len(self.definitions):
                    continue
                if self._role == Role.PREFILL:
                    if running.fetching:
                        running.fetching = False
                        self._loaded.add(running.job.request)
                elif self._passes:
                    report.received.append(name)
                else:
                    self._loaded.add(running.job.request)
            elif event.kind == TransferKind.PROGRESS:
                assert event.part is not None
                report.reads.append((name, shard, Progress(event.part, event.upto, event.read)))
            elif event.kind == TransferKind.STOPPED:
                assert event.part is not None
                report.reads.append((name, shard, Stopped(event.part, event.upto, event.gone)))
            else:
                del self._by_handle[event.job]
                failure = "" if event.kind == TransferKind.FINISHED else str(event.error) or "no reason was given"
                self._end(running, shard, Ended(failure, event.intact, isinstance(event.error, errors.CanceledError)))

    def take_freed(self) -> set[str]:
        """Return the finished requests whose blocks the engine may reuse."""
        freed, self._freed = self._freed, set()
        return freed

    def take_loaded(self) -> set[str]:
        """Return the requests whose loads have ended since the last call, also with failed blocks."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed(self) -> set[int]:
        """Return the blocks that were not loaded."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Return the requests whose load has failed, which the engine computes from the beginning."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_report(self) -> Report | None:
        if self._link is not None and self._link.value is not None:
            for shard in self._link.value.shards:
                nics = shard.traffic.nics()
                if nics != self._nics.get(shard.number):
                    self._nics[shard.number] = self._report.nics[shard.number] = nics
        report, self._report = self._report, Report()
        return report if report != Report() else None

    def bump(self, to: int) -> int:
        """Begin epoch to of the namespaces, the next one if 0. It waits for the nodes."""
        if not self._memory:
            raise errors.InvalidError("the connector has no KV cache yet")
        if not self._passes:
            return self._bump(to)
        epoch = ctypes.c_uint64(0)
        try:
            if self._rank == 0:
                epoch.value = self._bump(to)
        finally:
            self._broadcast([(ctypes.addressof(epoch), ctypes.sizeof(epoch))])
        if not epoch.value:
            raise errors.UnavailableError("rank 0 has not begun the epoch")
        return epoch.value

    def _bump(self, to: int) -> int:
        assert self._link is not None
        limit = self._options.connect_timeout
        epochs = self._link.call(lambda opened: {shard.number: shard.ns.bump(to) for shard in opened.shards}).result(limit)
        self._report = self._report.merge(Report(epochs=epochs))
        return max(epochs.values())

    def close(self) -> None:
        """End all jobs. Afterwards none of them accesses the KV cache."""
        if self._link is not None:
            self._link.close()
            if self._link.value is not None:
                self._link.value.close()


def _device(layout: Layout) -> tuple[list[Layer], list[int], int]:
    """Return the layers in the order in which the model computes them, the index of each in a value of the namespace, and the
    distance of two blocks of a layer.

    Raises InvalidError for a layout that a traffic manager does not support.
    """
    state = bool(layout.state_pools)
    if layout.pools != 1 and (not state or any(group.window for group in layout.groups)):
        raise errors.InvalidError(GROUPS)
    if layout.groups[0].window:
        raise errors.InvalidError(
            "every layer has a window of another kind than sliding attention, or windows of two sizes; PenstockDualPath serves full"
            " attention, alone or beside sliding windows, and one sliding window in every layer"
        )
    if len(layout.memory) != 1:
        raise errors.InvalidError(f"the KV cache lies in {len(layout.memory)} allocations; PenstockDualPath serves one")
    layers, order = layout.in_order()
    if len({layer.stride for layer in layers}) != 1 or (len({layer.page for layer in layers}) != 1 and not state):
        raise errors.InvalidError("the layers' blocks differ in size or distance; PenstockDualPath serves equal ones")
    return layers, order, layers[0].stride


def _listen(address: str, shard: int) -> str:
    """Return where a shard listens: at a port of its own, which the system chooses or which follows that of the shard before."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + shard}" if port.isdigit() and int(port) else address

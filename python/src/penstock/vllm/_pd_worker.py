"""The worker's side of PenstockDualPath: the jobs of a traffic manager on the KV cache of one rank.

              prefill engine                                decode engine
begin         jobs, pages of the step ─► add_pages          jobs, with all pages of the prompt
each layer    wait_for_layer ─► layer, compute,
              save_layer ─► computed
append                                                      blocks that the step has filled
poll          LOADED, PROGRESS, STOPPED, ends               READY: the request is scheduled
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock import _adapter, errors
from penstock._cluster import ActionKind, Role
from penstock._keys import Keys
from penstock._memory import Pointers
from penstock._store import Namespace, Store
from penstock._traffic import DecodeJob, PrefillJob, Traffic, TransferEvent, TransferKind
from penstock.vllm._layout import Layout, read_layout
from penstock.vllm._pd_plan import Append, Definition, Ended, Job, Options, Order, Plan, Progress, Report, Step, Stopped
from penstock.vllm._worker import define, open_namespace

__all__ = ["Worker"]

_log = logging.getLogger("penstock.vllm")

_ID = _adapter.Chain.SIZE

_IDLE = 0.005
"""Seconds that a step without computation waits for an event. While requests wait for transfers, the engine repeats such
steps, which would otherwise take the CPU from engines that compute."""


@dataclass
class _Open:
    store: Store
    ns: Namespace
    traffic: Traffic

    def close(self) -> None:
        self.traffic.close()
        self.store.close()


@dataclass
class _Running:
    """A job that has not ended."""

    job: Job
    handle: PrefillJob | DecodeJob
    pages: list[int]
    ready: bool = False  # decode: the prompt is in the KV cache
    failed: bool = False  # prefill: a layer did not arrive; the engine computes the prompt again


class Worker:
    """Begins the jobs of each step and collects their results.

    Only register and bump wait for nodes. wait_for_layer waits for copies from DRAM and from the decode engine, because
    storage has been read when the request is scheduled. The end of a job is reported when it no longer accesses its blocks.
    """

    def __init__(self, options: Options, counters: _adapter.Counters, *, role: Role) -> None:
        self._options = options
        self._counters = counters
        self._role = role
        self._layers: dict[str, int] = {}
        self._link: _adapter.Link[_Open] | None = None
        self.definition: Definition | None = None
        self._running: dict[str, _Running] = {}
        self._by_handle: dict[PrefillJob | DecodeJob, str] = {}
        self._steps: list[Step] = []
        self._appends: list[Append] = []
        self._idle = self._waited = False
        self._freed: set[str] = set()
        self._loaded: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._report = Report()

    def register(self, tensors: Mapping[str, Any], config: Any, facts: Mapping[str, Any], rank: int, ranks: int) -> None:
        """Take the KV cache, and wait for the nodes and the compute NIC for at most connect_timeout.

        Raises InvalidError for a KV cache that a traffic manager cannot carry.
        """
        self.open(read_layout(tensors, config), facts, rank, ranks)

    def open(self, layout: Layout, facts: Mapping[str, Any], rank: int, ranks: int) -> None:
        """Register a KV cache of a known layout."""
        layers, stride = _device(layout)
        self._layers = {layer.name: i for i, layer in enumerate(layers)}
        address, length, keep = layout.memory[0]
        o = self._options
        base = define(o, layout, facts, rank, ranks)
        bases = [layer.address - address for layer in layers]

        def open_() -> _Open:
            store = o.open()
            try:
                ns = open_namespace(store, base)
                traffic = Traffic(
                    ns, Pointers([address], [length], keep=keep), bases, stride=stride, pages=layout.blocks,
                    buffer_bytes=o.buffer_mib << 20, listen=o.listen, verify=o.verify,
                )  # fmt: skip
            except BaseException:
                store.close()
                raise
            return _Open(store, ns, traffic)

        self._link = _adapter.Link(f"penstock: rank {rank}", open_, retry=o.retry_interval, log=_log)
        if not self._link.wait(o.connect_timeout):
            late = errors.UnavailableError(f"no node at {o.servers} within connect_timeout, {o.connect_timeout:g} s")
            raise self._link.refused or late
        opened = self._link.value
        assert opened is not None
        usable = layout.blocks - 1  # the null block
        self.definition = Definition(**vars(base), member=opened.traffic.member(o.engine, device_blocks=usable))

    def begin(self, plan: Plan) -> None:
        """Begin a step, before the engine computes."""
        if self._link is None or self._link.value is None:
            return
        for job in plan.jobs:
            self._start(self._link.value, job)
        for name in plan.cancels:
            self._cancel(name)
        self._idle, self._waited, self._steps, self._appends = plan.idle, False, plan.steps, plan.appends
        for step in plan.steps:
            running = self._running.get(step.name)
            if running is not None and step.pages:
                assert isinstance(running.handle, PrefillJob)
                running.pages += step.pages
                running.handle.add_pages(step.pages)
        for order in plan.orders:
            self._order(order)
        self._freed.update(plan.freed)
        for request, pages in plan.lost:
            self._failed_blocks.update(pages)
            self._loaded.add(request)

    def _start(self, opened: _Open, job: Job) -> None:
        try:
            handle = self._begin(opened.traffic, job)
        except errors.Error as e:
            self._end(job, Ended(f"its transfers were not started: {e}", 0), ready=False)
            return
        self._running[job.name] = _Running(job, handle, list(job.pages))
        self._by_handle[handle] = job.name

    def _begin(self, traffic: Traffic, job: Job) -> PrefillJob | DecodeJob:
        ids, limit = Keys.packed(job.ids, _ID), self._options.job_timeout
        if self._role == Role.PREFILL:
            return traffic.prefill(job.name, ids, epoch=job.epoch, blocks=job.blocks, hit=job.hit, parts=job.parts, timeout=limit)
        return traffic.decode(
            job.name, ids, epoch=job.epoch, blocks=job.blocks, hit=job.hit, parts=job.parts, pages=job.pages,
            peer_address=job.peer_address, peer_token=job.peer_token, timeout=limit,
        )  # fmt: skip

    def _end(self, job: Job, ended: Ended, *, ready: bool) -> None:
        """Report the end of a job. The engine computes a prompt that a decode engine has not received."""
        self._report.ended[job.name] = ended
        if self._role == Role.DECODE and not ready:
            self._failed_blocks.update(job.pages)
            self._counters.add("failed_blocks", len(job.pages))
            self._loaded.add(job.request)

    def _cancel(self, name: str) -> None:
        """End a job, and wait until it no longer accesses its blocks."""
        running = self._running.get(name)
        if running is None or self._link is None or self._link.value is None:
            return
        running.handle.cancel()
        while name in self._running:
            self._collect(self._link.value.traffic.wait())

    def _order(self, order: Order) -> None:
        running = self._running.get(order.name)
        if running is None:
            return
        if order.kind == ActionKind.CUT:
            running.handle.cut()
            return
        assert order.part is not None
        if order.kind == ActionKind.READ:
            running.handle.read(order.part)
        elif isinstance(running.handle, PrefillJob):
            # The model computes all blocks after the first block that it computes.
            running.handle.recompute((order.part.start, running.job.hit))

    def wait_for_layer(self, name: str) -> None:
        """Wait until a layer of the cached prefixes of this step is in the KV cache and verified."""
        self._waited = True
        layer = self._layers.get(name)
        for step in self._steps:
            running = self._running.get(step.name)
            if layer is None or running is None or running.failed:
                continue
            assert isinstance(running.handle, PrefillJob)
            try:
                running.handle.layer(layer, timeout=self._options.layer_timeout)
            except errors.Error as e:
                self._fail(running, f"layer {layer} did not come: {e}")

    def save_layer(self, name: str) -> None:
        """Send the blocks of a layer that this step has computed."""
        layer = self._layers.get(name)
        for step in self._steps:
            running = self._running.get(step.name)
            if layer is None or running is None or running.failed:
                continue
            assert isinstance(running.handle, PrefillJob)
            running.handle.computed(layer, step.computed)

    def end(self) -> None:
        """End a step, after the engine has computed."""
        steps, self._steps = self._steps, []
        for step in steps:
            running = self._running.get(step.name)
            if running is None or running.failed:
                continue
            if not self._waited:
                self._counters.warn("hooks", "the engine does not call wait_for_layer_load, so every prefill fails")
                self._fail(running, "the engine does not call wait_for_layer_load")
            elif step.computed == running.job.blocks:
                running.handle.finish()
        appends, self._appends = self._appends, []
        for one in appends:
            self._append(one)

    def _fail(self, running: _Running, why: str) -> None:
        """Fail a job in the middle of a step, which continues with blocks that are not loaded."""
        running.failed = True
        self._counters.warn("layer", f"attempt {running.job.name}: {why}")
        self._failed_blocks.update(running.pages[: running.job.hit])
        running.handle.cancel()

    def _append(self, one: Append) -> None:
        if self._link is None or self._link.value is None:
            return
        try:
            self._link.value.traffic.append(
                one.name, Keys.packed(one.ids, _ID), one.page, epoch=one.epoch, timeout=self._options.append_timeout
            )
        except errors.Error as e:
            self._counters.add("dropped_blocks")
            self._counters.warn("append", f"a decoded block was not stored: {e}")
            return
        self._counters.add("saved_blocks")

    def poll(self) -> None:
        """Collect the events of the jobs."""
        if self._link is not None and self._link.value is not None:
            traffic = self._link.value.traffic
            self._collect(traffic.wait(_IDLE) if self._idle else traffic.drain())

    def _collect(self, events: list[TransferEvent]) -> None:
        for event in events:
            name = self._by_handle.get(event.job)
            if name is None:
                continue
            running = self._running[name]
            report = self._report
            if event.kind == TransferKind.LOADED:
                report.loaded[name] = event.first_miss
            elif event.kind == TransferKind.READY:
                running.ready = True
                running.handle.finish()  # its end comes when storage has the prompt's new blocks
                self._loaded.add(running.job.request)
            elif event.kind == TransferKind.PROGRESS:
                assert event.part is not None
                report.reads.append((name, Progress(event.part, event.upto, event.read)))
            elif event.kind == TransferKind.STOPPED:
                assert event.part is not None
                report.reads.append((name, Stopped(event.part, event.upto, event.gone)))
            else:
                del self._running[name]
                del self._by_handle[event.job]
                failure = "" if event.kind == TransferKind.FINISHED else str(event.error) or "no reason was given"
                self._end(running.job, Ended(failure, event.intact), ready=running.ready)

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

    def take_report(self) -> Report | None:
        report, self._report = self._report, Report()
        return report if report != Report() else None

    def bump(self, to: int) -> int:
        """Begin epoch to of the namespace, the next one if 0. It waits for the nodes."""
        if self._link is None or self.definition is None:
            raise errors.InvalidError("the connector has no KV cache yet")
        epoch = self._link.call(lambda opened: opened.ns.bump(to)).result(self._options.connect_timeout)
        self._report = self._report.merge(Report(epochs={self.definition.rank: epoch}))
        return epoch

    def close(self) -> None:
        """End all jobs. Afterwards none of them accesses the KV cache."""
        if self._link is not None:
            self._link.close()
            if self._link.value is not None:
                self._link.value.close()


def _device(layout: Layout) -> tuple[list[Any], int]:
    """Return the layers in the order of the namespace, and the distance of two blocks of a layer.

    Raises InvalidError for a layout that a traffic manager does not support.
    """
    if len(layout.groups) != 1 or layout.groups[0].window or layout.pools != 1:
        raise errors.InvalidError(
            "the model has several KV cache groups or a sliding window; PenstockDualPath serves one group of full attention"
        )
    if len(layout.memory) != 1:
        raise errors.InvalidError(f"the KV cache lies in {len(layout.memory)} allocations; PenstockDualPath serves one")
    layers = layout.groups[0].layers
    if len({(layer.stride, layer.page) for layer in layers}) != 1:
        raise errors.InvalidError("the layers' blocks differ in size or distance; PenstockDualPath serves equal ones")
    return list(layers), layers[0].stride

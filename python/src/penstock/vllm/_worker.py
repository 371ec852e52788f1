"""The worker's side: transfers between the KV cache of one rank and the nodes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock import _adapter, errors
from penstock._core import Group, GroupKind, Job, KeyResult
from penstock._keys import Keys
from penstock._store import Namespace, Store
from penstock.vllm._layout import Definition, Layout, Part, read_layout, rows_apart
from penstock.vllm._plan import NULL, Load, Options, Plan, Report, Save

__all__ = ["Worker", "define", "open_namespace"]

_log = logging.getLogger("penstock.vllm")


def open_namespace(store: Store, d: Definition) -> Namespace:
    return store.namespace(d.name, tenant=d.tenant, block_tokens=d.block_tokens, groups=d.groups, dtype=d.dtype, layout=d.layout, ids=True)


def define(options: _adapter.Connection, layout: Layout, facts: Mapping[str, Any], rank: int, ranks: int) -> Definition:
    """Return the namespace of a rank. facts are the engine's."""
    all_facts = {**facts, **layout.facts, "ranks": ranks}
    return Definition(
        name=_adapter.namespace_name(options.namespace, str(facts["model"]), all_facts, f"tp{ranks}.{rank}"),
        tenant=options.tenant,
        block_tokens=layout.block_tokens,
        groups=tuple(
            Group(GroupKind.STATE, len(group.layers), group.layers[0].page)
            if group.state
            else Group(
                GroupKind.WINDOW if group.window else GroupKind.FULL,
                len(group.layers),
                group.layers[0].page // layout.block_tokens,
                group.window,
            )
            for group in layout.groups
        ),
        dtype=str(layout.facts["layers"][0][4]).removeprefix("torch."),
        layout=_adapter.digest({**all_facts, "rank": rank}),
        rank=rank,
        state_pools=tuple(layout.state_pools),
    )


_PARALLEL = 2
"""With "layers", the maximum number of concurrent reads. Jobs start in the order of their submission, so the reads of
the first layers end first."""


_STAGING, _SLOTS = 256 << 20, 16
"""Pinned host memory of a store for KV on a CUDA device: this number of bytes, or this number of blocks if that is more."""


@dataclass
class _Open:
    store: Store
    ns: Namespace
    reads: Store
    """With "layers", a store for loads alone, so that they do not wait for saves. Otherwise ``store``."""
    reads_ns: Namespace

    def close(self) -> None:
        self.store.close()
        self.reads.close()


class Worker:
    """Submits the jobs of each step and collects completed jobs. Only register and bump wait for nodes. With load "layers"
    wait_for_layer and end_loads wait too, until the time limit of the loads.

    The memory of a load belongs to the job until the job is complete: after the time limit, the library ends the job, and
    reports its end when nothing writes to the memory. On a CUDA device a transfer begins when the work is done that the engine's
    stream has at its submission: the device waits for that, and no thread of the engine.
    """

    def __init__(self, options: Options, counters: _adapter.Counters) -> None:
        self._options = options
        self._counters = counters
        self._layout: Layout | None = None
        self._link: _adapter.Link[_Open] | None = None
        self.definition: Definition | None = None
        self._jobs: dict[Job, tuple[Load | Save, list[tuple[int, int]]]] = {}
        self._parts: list[Part] = []  # of the layers, with "layers"
        self._part_of: dict[str, Part] = {}
        self._arriving: dict[Part, list[Job]] = {}
        self._loads: dict[int, tuple[Load, set[int]]] = {}  # of this step, by job, with the indexes of blocks that did not arrive
        self._waited = False
        self._loaded: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._report = Report()

    def register(self, tensors: Mapping[str, Any], config: Any, facts: Mapping[str, Any], rank: int, ranks: int) -> None:
        """Take the KV cache, and wait for the nodes for at most connect_timeout.

        Raises InvalidError for a KV cache that the connector cannot store.
        """
        layout = read_layout(tensors, config)
        if ranks > 1:
            layout = rows_apart(layout)
        self._layout = layout
        if self._options.load == "layers":
            self._parts = layout.parts(self._options.layers_per_read)
            self._part_of = {layer.name: part for part in self._parts for layer in part.layers}
        staging = max(_STAGING, _SLOTS * layout.block_bytes)
        definition = self.definition = define(self._options, layout, facts, rank, ranks)

        def open_one(**options: int) -> tuple[Store, Namespace]:
            store = self._options.open(any_memory=False, **options)
            try:
                for address, length, keep in layout.memory:
                    store.register_address(address, length, keep=keep, cuda=layout.cuda, staging_bytes=staging)
                return store, open_namespace(store, definition)
            except BaseException:
                store.close()
                raise

        def open_() -> _Open:
            store, ns = open_one()
            if not self._parts:
                return _Open(store, ns, store, ns)
            try:
                # A step has at most as many jobs as it has requests and parts.
                return _Open(store, ns, *open_one(jobs_parallel=_PARALLEL, jobs_max=1 << 20))
            except BaseException:
                store.close()
                raise

        self._link = _adapter.Link(f"penstock: rank {rank}", open_, retry=self._options.retry_interval, log=_log)
        self._link.wait(self._options.connect_timeout)

    def _opened(self) -> _Open | None:
        return self._link.value if self._link is not None else None

    def load(self, plan: Plan) -> None:
        for load in plan.loads:
            self._counters.add("loads")
            if not self._parts and self._submit(load, plan) is None:
                self._fail(load, range(len(load.blocks[0])))
                self._loaded.add(load.request)
        if not self._parts:
            return
        self._waited = False
        self._loads = {load.job: (load, set()) for load in plan.loads}
        for part in self._parts:
            for load, lost in self._loads.values():
                if len(lost) == len(load.blocks[0]):
                    continue
                job = self._submit(load, plan, part)
                if job is None:
                    lost.update(range(len(load.blocks[0])))
                else:
                    self._arriving.setdefault(part, []).append(job)

    def wait_for_layer(self, name: str) -> None:
        """Wait until a layer of all loads of this step has arrived and is verified, or until the time limit of the
        loads."""
        self._waited = True
        if self._arriving:
            # A layer that the connector does not store uses the KV of another layer.
            part = self._part_of.get(name)
            for p in self._parts if part is None else (part,):
                self._wait(p)

    def _wait(self, part: Part) -> None:
        for job in self._arriving.pop(part, ()):
            # The job has a time limit of its own. After its end nothing writes to the memory.
            with contextlib.suppress(errors.Error):
                job.wait()
            self._ended(job)

    def end_loads(self) -> None:
        """With "layers", wait for the remaining loads of this step, and report their end."""
        for part in list(self._arriving):
            self._wait(part)
        loads, self._loads = self._loads, {}
        if loads and not self._waited:
            self._counters.warn("hooks", 'the engine does not call wait_for_layer_load, so every load fails. Set load to "async"')
        for load, lost in loads.values():
            if not self._waited:
                lost.update(range(len(load.blocks[0])))
            if lost:
                self._fail(load, sorted(lost))
            self._report = self._report.merge(Report(loads={load.job: 1}))

    def save(self, plan: Plan) -> None:
        for save in plan.saves:
            self._counters.add("saves")
            if self._submit(save, plan) is None:
                self._saved(save, 0)

    def _submit(self, work: Load | Save, plan: Plan, part: Part | None = None) -> Job | None:
        opened = self._opened()
        if opened is None or self._layout is None or self.definition is None:
            return None
        keys = Keys.packed(work.keys, _adapter.Chain.SIZE)
        if isinstance(work, Load) and any(work.blocks[pool][-1] == NULL for pool in self._layout.state_pools):
            self._counters.warn("state", "a load failed: the engine has no block for the recurrent state at the end of the load")
            return None
        pieces, memory = self._layout.pieces(work.first, work.blocks, part)
        epoch = work.epoch or plan.epochs[self.definition.rank]
        try:
            if isinstance(work, Load):
                job = opened.reads_ns.jobs.get(
                    keys, memory, first=work.first, pieces=pieces, epoch=epoch, timeout=self._options.load_timeout,
                    layers=None if part is None else part.range,
                )  # fmt: skip
            else:
                job = opened.ns.jobs.put(keys, memory, first=work.first, pieces=pieces, epoch=epoch, timeout=self._options.save_timeout)
        except errors.Error as e:
            self._counters.warn("transfer", f"a transfer was not started: {e}")
            return None
        self._jobs[job] = work, pieces
        return job

    def poll(self) -> None:
        """Collect completed jobs."""
        opened = self._opened()
        if opened is None or not self._jobs:
            return
        try:
            ended = opened.store.drain()
        except errors.ClosedError:  # close has ended all jobs; wait_for_layer and end_loads take those of layers
            layers = {job for jobs in self._arriving.values() for job in jobs}
            ended = [job for job in self._jobs if job not in layers]
        for job in ended:
            self._ended(job)

    def _ended(self, job: Job) -> None:
        """Handle the result of a completed job."""
        work, pieces = self._jobs.pop(job)
        error = job.error()
        moved = 0 if error is not None else job.result().bytes
        if error is not None:
            self._counters.warn("transfer", f"a {type(work).__name__.lower()} has failed: {error}")
        else:
            self._counters.settle("transfer")
        done = zip(pieces, job.codes, strict=True)
        bad = sorted({block - work.first for (block, _), code in done if code not in (KeyResult.OK, KeyResult.EXISTS)})
        if isinstance(work, Save):
            self._counters.add("saved_bytes", moved)
            if bad and error is None:
                # MISS is the result of the blocks after the refused one.
                codes = (KeyResult(code) for code in job.codes)
                why = next((c for c in codes if c not in (KeyResult.OK, KeyResult.EXISTS, KeyResult.MISS)), KeyResult.MISS).name
                self._counters.warn(
                    f"save {why}", f"a save was not stored completely: {why}. Further ones are only counted, in save_failures"
                )
            self._saved(work, bad[0] if bad else len(work.blocks[0]))
            return
        self._counters.add("loaded_bytes", moved)
        if self._parts:
            self._loads[work.job][1].update(bad)
            return
        if bad:
            self._fail(work, bad)
        self._loaded.add(work.request)

    def _saved(self, save: Save, stored: int) -> None:
        """Report that the first blocks of a save are stored."""
        self._counters.add("saved_blocks", stored)
        if stored < len(save.blocks[0]):
            self._counters.add("save_failures")
        self._report = self._report.merge(Report({save.job: (1, stored)}))

    def _fail(self, load: Load, blocks: Sequence[int]) -> None:
        """Report blocks that were not loaded, given by their indexes in the load."""
        self._counters.add("load_failures")
        self._counters.add("failed_blocks", len(blocks))
        assert self._layout is not None
        if len(load.blocks) == 1 and not self._layout.groups[0].window:
            self._failed_blocks.update(load.blocks[0][i] for i in blocks)
        else:
            # The engine accepts failed blocks only from models with one KV cache group, and computes from the first one on. In layers
            # with a window it has no block in front of the loaded ones, so it computes the whole prompt.
            self._failed_requests.add(load.request)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended since the last call, and those of them that are to be computed again."""
        loaded, self._loaded = self._loaded, set()
        failed, self._failed_requests = self._failed_requests, set()
        return loaded, failed

    def take_failed(self) -> set[int]:
        """Return the blocks that were not loaded. With load "async" each request of them is in take_loaded of the same step."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> Report | None:
        report, self._report = self._report, Report()
        return report if report != Report() else None

    def bump(self, to: int) -> int:
        """Begin epoch to of this rank's namespace, the next one if 0. It waits for the nodes."""
        if self._link is None or self.definition is None:
            raise errors.InvalidError("the connector has no KV cache yet")
        epoch = self._link.call(lambda opened: opened.ns.bump(to)).result(self._options.save_timeout)
        self._report = self._report.merge(Report(epochs={self.definition.rank: epoch}))
        self._counters.add("epochs")
        return epoch

    def close(self) -> None:
        """End all transfers. Afterwards none of them accesses the KV cache."""
        if self._link is not None:
            self._link.close()
            if self._link.value is not None:
                self._link.value.close()

"""The worker's side: transfers between the KV cache of one rank and the nodes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock import _adapter, errors
from penstock._keys import Keys
from penstock._memory import Pointers
from penstock._store import Job, KeyResult, Namespace, Store
from penstock.vllm._layout import Definition, Layout, read_layout
from penstock.vllm._plan import Load, Options, Plan, Report, Save

__all__ = ["Worker", "open_namespace"]

_log = logging.getLogger("penstock.vllm")


def open_namespace(store: Store, d: Definition) -> Namespace:
    return store.namespace(
        d.name, tenant=d.tenant, block_tokens=d.block_tokens, layers=d.layers, token_bytes=d.token_bytes,
        dtype=d.dtype, layout=d.layout, ids=True,
    )  # fmt: skip


@dataclass
class _Open:
    store: Store
    ns: Namespace


class Worker:
    """Submits the jobs of each step and collects those that are complete. Only register and bump wait for nodes.

    The memory of a load is the engine's again when its job is complete, not before: when the time limit has passed, the library
    ends the job, and reports its end when nothing writes to the memory any more.
    """

    def __init__(self, options: Options, counters: _adapter.Counters) -> None:
        self._options = options
        self._counters = counters
        self._layout: Layout | None = None
        self._link: _adapter.Link[_Open] | None = None
        self.definition: Definition | None = None
        self._jobs: dict[Job, Load | Save] = {}
        self._loaded: set[str] = set()
        self._failed: set[int] = set()
        self._report = Report()

    def register(self, tensors: Mapping[str, Any], config: Any, facts: Mapping[str, Any], rank: int, ranks: int) -> None:
        """Take the KV cache, and wait for the nodes for at most connect_timeout.

        Raises InvalidError for a KV cache that the connector cannot store.
        """
        layout = self._layout = read_layout(tensors, config)
        all_facts = {**facts, **layout.facts, "ranks": ranks}
        first = layout.layers[0]
        definition = self.definition = Definition(
            name=_adapter.namespace_name(self._options.namespace, str(facts["model"]), all_facts, f"tp{ranks}.{rank}"),
            tenant=self._options.tenant,
            block_tokens=layout.block_tokens,
            layers=len(layout.layers),
            token_bytes=first.page // layout.block_tokens,
            dtype=str(layout.facts["layers"][0][3]).removeprefix("torch."),
            layout=_adapter.digest({**all_facts, "rank": rank}),
            rank=rank,
        )

        def open_() -> _Open:
            store = self._options.open(any_memory=False)
            try:
                for address, length, keep in layout.memory:
                    store.register_address(address, length, keep=keep)
                return _Open(store, open_namespace(store, definition))
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
            if not self._submit(load, plan):
                self._counters.add("load_failures")
                self._loaded.add(load.request)
                self._fail(load, load.blocks)

    def save(self, plan: Plan) -> None:
        for save in plan.saves:
            self._counters.add("saves")
            if not self._submit(save, plan):
                self._counters.add("save_failures")
                self._report = self._report.merge(Report({save.job: (1, 0)}))

    def _submit(self, work: Load | Save, plan: Plan) -> bool:
        opened = self._opened()
        if opened is None or self._layout is None or self.definition is None:
            return False
        keys = Keys.packed(work.keys, _adapter.Chain.SIZE)
        memory = Pointers(*self._layout.fragments(work.blocks), fragments=len(self._layout.layers))
        epoch = plan.epochs[self.definition.rank]
        try:
            if isinstance(work, Load):
                job = opened.ns.jobs.get(keys, memory, first=work.first, epoch=epoch, timeout=self._options.load_timeout)
            else:
                job = opened.ns.jobs.put(keys, memory, first=work.first, epoch=epoch, timeout=self._options.save_timeout)
        except errors.Error as e:
            self._counters.warn("transfer", f"a transfer was not started: {e}")
            return False
        self._jobs[job] = work
        return True

    def poll(self) -> None:
        """Collect the jobs that are complete."""
        opened = self._opened()
        if opened is None or not self._jobs:
            return
        for job in opened.store.drain():
            work = self._jobs.pop(job)
            error = job.error()
            done = [code in (KeyResult.OK, KeyResult.EXISTS) for code in job.codes]
            moved = 0 if error is not None else job.result().bytes
            if error is not None:
                self._counters.warn("transfer", f"a {type(work).__name__.lower()} has failed: {error}")
            else:
                self._counters.settle("transfer")
            if isinstance(work, Load):
                self._counters.add("loaded_bytes", moved)
                self._loaded.add(work.request)
                bad = [block for block, good in zip(work.blocks, done, strict=True) if not good]
                if bad:
                    self._counters.add("load_failures")
                    self._fail(work, bad)
            else:
                stored = done.index(False) if False in done else len(done)
                self._counters.add("saved_bytes", moved)
                self._counters.add("saved_blocks", stored)
                if stored < len(work.blocks):
                    self._counters.add("save_failures")
                self._report = self._report.merge(Report({work.job: (1, stored)}))

    def _fail(self, load: Load, blocks: list[int]) -> None:
        self._counters.add("failed_blocks", len(blocks))
        self._failed.update(blocks)

    def take_loaded(self) -> set[str]:
        """Return the requests whose loads have ended since the last call, failed ones included."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed(self) -> set[int]:
        """Return the blocks that were not loaded. Each request of them is in take_loaded of the same step."""
        failed, self._failed = self._failed, set()
        return failed

    def take_report(self) -> Report | None:
        report, self._report = self._report, Report()
        return report if report.saves or report.epochs else None

    def bump(self, to: int) -> int:
        """Begin epoch to of this rank's namespace, the next one if 0. It waits for the nodes."""
        if self._link is None or self.definition is None:
            raise errors.InvalidError("the connector has no KV cache yet")
        epoch = self._link.call(lambda opened: opened.ns.bump(to)).result(self._options.save_timeout)
        self._report = self._report.merge(Report(epochs={self.definition.rank: epoch}))
        self._counters.add("epochs")
        return epoch

    def close(self) -> None:
        """End all transfers. After that nothing touches the KV cache."""
        if self._link is not None:
            self._link.close()
            if self._link.value is not None:
                self._link.value.store.close()

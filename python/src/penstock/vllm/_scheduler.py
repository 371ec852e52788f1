"""The scheduler's side: which blocks a request loads, which are saved, and which are kept until they are saved."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from penstock import _adapter, errors
from penstock._core import Cut, Job
from penstock._keys import Keys
from penstock._store import Namespace, Store
from penstock.vllm._extra import Extra, Extras
from penstock.vllm._layout import Definition
from penstock.vllm._plan import LIVE_MAX, NULL, Blocks, Load, Options, Plan, Report, Save
from penstock.vllm._worker import open_namespace

__all__ = ["Scheduler"]

_log = logging.getLogger("penstock.vllm")


@dataclass
class _Open:
    store: Store
    ranks: list[Namespace]


class _Request:
    """The connector's state of one request of the engine."""

    def __init__(self, request: Any, chain: _adapter.Chain) -> None:
        self.request = request
        self.chain = chain
        self.extra: Extra | None = None
        self.preemptions = -1  # when the lookup was made
        self.lookup: list[Job] | None = None
        self.unnamed = False  # its blocks have no ids
        self.epoch = 0  # the epoch in the request; 0: the engine's
        self.oldest = 0  # the oldest epoch of which it takes KV; 0: epoch alone
        self.at = 0  # the epoch that lookups begin with, then that of the found blocks
        self.base = 0  # the epoch under which its blocks are saved: the oldest that its KV depends on
        self.since: float | None = None  # when it began to wait for its epoch
        self.found: int | None = None  # blocks that the nodes have
        self.computed = 0  # tokens that the engine had computed at that time
        self.loading: Load | None = None
        self.may_load = True
        self.may_save = True
        self.stored = 0  # blocks that are certainly stored
        self.saving: Save | None = None
        self.waiting: Blocks = []  # blocks that are kept for the next save
        self.waiting_first = 0

    @property
    def kept_until(self) -> int:
        """The first block that is neither stored, nor being saved, nor waiting."""
        if self.waiting:
            return self.waiting_first + len(self.waiting[0])
        return self.saving.end if self.saving is not None else self.stored


class Scheduler:
    """Decides in each step which blocks the workers load and save. Only attach and reset wait for nodes.

    A block is kept from the step that computes it: the connector holds a reference to it in the engine's block pool until
    all ranks have reported the end of its save. The engine does not reuse the block before that, even if the block leaves
    its layer's window, or the request ends or is preempted. A request has at most one save in progress, because the node
    refuses a block whose predecessor is not stored. Blocks that are computed during a save wait for the next save.

    With load "layers" requests run while their blocks are loaded. If a load fails, the engine reverts the results that the
    step has computed from it, on all ranks. So no save begins until all ranks have reported the end of the step's loads.
    The engine also leaves such blocks in its prefix cache, where a request could find them before they are computed again,
    or permanently if the request that computes them is aborted. So the connector removes them.

    KV that a request computes on KV of an older epoch depends on weights of both. It is saved under the older epoch: in the chains
    of requests that take KV of several epochs, which have a cache salt of their own, the epoch of a block is the oldest that its
    KV depends on. The engine's prefix cache has no epochs, so the connector removes such blocks from it in each step. Within
    one step of the engine's scheduler another request can find them. Its blocks are then saved under the older epoch, too.

    Of recurrent state the engine has a snapshot only at the ends of some blocks. It offers the snapshot's block in the step that
    computes the end of the block; a position in the request's table may have another state. Other blocks are saved without state, and
    a lookup finds a prefix only if it ends at a snapshot.
    """

    def __init__(
        self,
        options: Options,
        counters: _adapter.Counters,
        extras: Extras,
        *,
        loads: bool = True,
        saves: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._counters = counters
        self._extras = extras
        self._may_load, self._may_save = loads, saves
        self._clock = clock
        self._link: _adapter.Link[_Open] | None = None
        self._block = 0
        self._ranks = 0
        self._groups = 1  # layer groups of a namespace
        self._state_pools: tuple[int, ...] = ()
        self._pool: Any = None
        self._room = 0  # blocks that may be kept at once
        self._requests: dict[str, _Request] = {}
        self._loads: list[Load] = []
        self._layers = options.load == "layers"
        # With "layers": the running loads, by job, with the number of ranks that have not ended; and the requests that run
        # during the loads, each with its state, if it has one, and its blocks.
        self._loading: dict[int, int] = {}
        self._running: list[tuple[_Request | None, list[int]]] = []
        self._jobs = 0
        self._saves: dict[int, tuple[_Request, Save, int, int]] = {}  # by job: ranks that have not ended, least blocks stored
        self._tails: deque[_Request] = deque()  # finished requests with blocks that wait
        self._kept: dict[int, int] = {}  # blocks with a reference of the connector, and the number of references
        self._older: dict[str, set[int]] = {}  # by request: blocks whose KV depends on that of an older epoch
        self._down_until = 0.0
        self._without = ""  # the request that was last counted as served without the cache, because the engine may call repeatedly
        self._bumping: Future[list[int]] | None = None
        self._epochs: list[int] = []
        self._named: dict[int, Future[None]] = {}  # the epochs that requests name: done when they are live

    # -- lifecycle

    def attach(self, definitions: Sequence[Definition]) -> None:
        """Open the namespaces of all ranks. It waits for the nodes for at most connect_timeout."""
        self._block = definitions[0].block_tokens
        self._ranks = len(definitions)
        self._groups = len(definitions[0].groups)
        self._state_pools = definitions[0].state_pools

        def open_() -> _Open:
            store = self._options.open()
            try:
                return _Open(store, [open_namespace(store, d) for d in definitions])
            except BaseException:
                store.close()
                raise

        self._link = _adapter.Link("penstock: scheduler", open_, retry=self._options.retry_interval, log=_log)
        self._link.wait(self._options.connect_timeout)

    def bind(self, pool: Any) -> None:
        """Take the engine's block pool."""
        if pool.null_block.block_id != NULL:
            raise errors.InvalidError(f"the engine's null block is {pool.null_block.block_id}; the connector was written for {NULL}")
        self._pool = pool
        self._room = self._options.save_blocks or max(1, pool.num_gpu_blocks // 8)

    def close(self) -> None:
        self._extras.close()
        if self._link is not None:
            self._link.close()
            if self._link.value is not None:
                self._link.value.store.close()

    # -- lookups

    def _opened(self) -> _Open | None:
        """Return the namespaces, or None if the engine has to serve without the cache."""
        opened = self._link.value if self._link is not None else None
        if opened is not None and opened.store.closed:
            self._counters.warn("closed", "the store was closed. The engine serves without the cache")
            return None
        if opened is None or (self._bumping is not None and not self._bump_done(opened)):
            return None
        if not self._epochs:
            self._epochs = [ns.epoch for ns in opened.ranks]
        return opened

    def _bump_done(self, opened: _Open) -> bool:
        assert self._bumping is not None
        if not self._bumping.done():
            return False
        error = self._bumping.exception()
        if error is None:
            self._epochs = self._bumping.result()
            self._bumping = None
            return True
        if self._clock() >= self._down_until:
            self._down_until = self._clock() + self._options.retry_interval
            self._counters.warn("bump", f"the new epoch did not begin, and the cache is not used until one has begun: {error}")
            self._begin_bump()
        return False

    def lookup(self, request: Any, computed: int) -> int | None:
        """Return how many tokens beyond the computed ones a load would bring, or None while the answer is pending."""
        opened = self._opened()
        if opened is not None and request.request_id not in self._requests and not self._extras.ready(request):
            return None
        state = self._state(request, opened) if opened is not None else None
        if opened is None or self._clock() < self._down_until:
            if request.request_id != self._without:
                self._counters.add("unavailable")
            self._without = request.request_id
            return 0
        blocks = (request.num_tokens - 1) // self._block  # the engine computes one token at least
        if state is not None and state.epoch and (state.may_load or state.may_save):
            live = self._live(state)
            if live is None:
                return None
            if not live:
                state.may_load = state.may_save = False
        if state is None or not state.may_load or blocks * self._block <= computed or request.skip_reading_prefix_cache:
            return 0
        if computed % self._block:
            return 0  # the engine has a part of a block, of a model with recurrent state and a prefix_match_unit
        if state.preemptions != request.num_preemptions:
            state.preemptions, state.found, state.lookup, state.at = request.num_preemptions, None, None, state.epoch
        if state.found is None:
            state.found = self._found(state, opened, blocks)
            if state.found is None:
                return None
            if state.at == state.base:
                state.stored = max(state.stored, state.found)
        state.computed = computed
        return max(0, state.found * self._block - computed)

    def _state(self, request: Any, opened: _Open) -> _Request | None:
        """Return the request's state with the ids of all blocks so far, or None for a request whose blocks have no
        shared ids."""
        state = self._requests.get(request.request_id)
        if state is None:
            state = _Request(request, _adapter.Chain(opened.ranks[0], self._block))
            state.may_load, state.may_save = self._may_load, self._may_save
            self._requests[request.request_id] = state
            try:
                state.epoch, state.oldest = _epochs_of(request)
                state.at = state.base = state.epoch
                state.extra = self._extras.of(request)
            except errors.InvalidError as e:
                self._without_name(state, e)
                return None
        elif state.unnamed:
            return None
        try:
            state.chain.extend(request.all_token_ids, state.extra)
        except errors.InvalidError as e:
            self._without_name(state, e)
            return None
        return state

    def _without_name(self, state: _Request, why: errors.InvalidError) -> None:
        """Serve a request without the cache, because its blocks have no ids that other processes would compute too."""
        self._counters.add("unnamed")
        self._counters.warn(f"id: {why}", f"a request is served without the cache: {why}")
        state.unnamed = True
        state.may_load = state.may_save = False

    def _found(self, state: _Request, opened: _Open, blocks: int) -> int | None:
        """Return how many of the first blocks every rank's namespace has, or None while the nodes have not answered."""
        if state.lookup is None:
            keys = Keys.packed(bytes(state.chain.ids[: blocks * _adapter.Chain.SIZE]), _adapter.Chain.SIZE)
            try:
                state.lookup = [
                    ns.jobs.match(keys, epoch=state.at or epoch, oldest=state.oldest, timeout=self._options.lookup_timeout)
                    for ns, epoch in zip(opened.ranks, self._epochs, strict=True)
                ]
            except errors.Error as e:
                return self._unanswered(f"a lookup was not started: {e}")
        opened.store.drain()
        if not all(job.complete for job in state.lookup):
            return None
        jobs, state.lookup = state.lookup, None
        prefixes, epochs = set(), set()
        for job in jobs:
            if error := job.error():
                return self._unanswered(f"a lookup has failed: {error}")
            result = job.result()
            if result.cut == Cut.EPOCH and state.epoch:
                self._named.pop(state.epoch, None)
                self._ended(state)
                return 0
            if result.cut == Cut.EPOCH:
                self._counters.warn("epoch", "the nodes are at a later epoch, begun by another engine: nothing is found until new_weights")
            if result.cut in (Cut.DOWN, Cut.BUSY):
                return self._unanswered(f"a lookup was not answered: the node is {result.cut.name.lower()}")
            prefixes.add(result.prefix)
            epochs.add(result.epoch)
        self._counters.settle("down", "bump")
        found = min(prefixes)
        if self._groups > 1 and len(prefixes) > 1:
            # A rank that has a longer prefix may lack the window or the snapshot that the shorter one needs.
            return self._found(state, opened, found) if found else 0
        self._counters.add("lookups")
        if state.oldest and found:
            return self._found_at(state, opened, blocks, found, epochs)
        return found

    def _found_at(self, state: _Request, opened: _Open, blocks: int, found: int, epochs: set[int]) -> int | None:
        """Take the answer of a lookup in several epochs. If the ranks have found different ones, look up the oldest of them alone."""
        if len(epochs) > 1:
            state.at = state.oldest = min(epochs)
            return self._found(state, opened, blocks)
        (state.at,) = epochs
        return found

    def _live(self, state: _Request) -> bool | None:
        """Return whether the epoch that a request names is live, or None while the nodes have not answered. It begins a later one."""
        assert self._link is not None
        if state.since is None:
            state.since = self._clock()
        epoch, keep = state.epoch, self._options.live_epochs
        answer = self._named.get(epoch)
        if answer is None:
            if len(self._named) == LIVE_MAX:
                del self._named[min(self._named)]
            answer = self._named[epoch] = self._link.call(lambda opened: _begin(opened.ranks, epoch, keep))
        if not answer.done():
            if self._clock() - state.since < self._options.lookup_timeout:
                return None
            self._unanswered(f"no answer yet whether epoch {epoch} is live")
            return False
        error = answer.exception()
        if isinstance(error, errors.MismatchError):
            self._ended(state)
            return False
        if error is not None:
            del self._named[epoch]
            self._unanswered(f"epoch {epoch} was not begun: {error}")
            return False
        return True

    def _ended(self, state: _Request) -> None:
        """Serve a request without the cache, because its epoch has ended."""
        state.may_load = state.may_save = False
        self._counters.add("unavailable")
        self._counters.warn("ended", f"a request names epoch {state.epoch}, which has ended, and is served without the cache")

    def _unanswered(self, why: str) -> int:
        """Do not use the nodes for a while."""
        self._counters.add("lookup_failures")
        self._counters.warn("down", f"{why}. The engine serves without the cache, and retries every {self._options.retry_interval:g} s")
        self._down_until = self._clock() + self._options.retry_interval
        return 0

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        """Plan the load of ``tokens`` tokens into the request's blocks, beginning with the first block that the engine has not computed."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if tokens and state.found is not None and state.at != state.base:
            state.base, state.stored = state.at, state.found
        if tokens and state.at != state.epoch:
            self._counters.add("older_hits")
        if state.oldest:
            self._mark_older(state, blocks)
        if not tokens or state.found is None:
            return
        first = state.computed // self._block
        last = first + tokens // self._block
        keys = bytes(state.chain.ids[: last * _adapter.Chain.SIZE])
        self._jobs += 1
        state.loading = Load(self._jobs, request.request_id, keys, first, [list(pool[first:last]) for pool in blocks], state.at)
        self._counters.add("hit_tokens", tokens)
        self._loads.append(state.loading)

    def _mark_older(self, state: _Request, blocks: Sequence[Sequence[int]]) -> None:
        """Note the request's blocks if their KV depends on that of an older epoch, by its own load or another request's."""
        own = {block for pool in blocks for block in pool if block != NULL}
        state.base = min([state.base, *(self._requests[name].base for name, others in self._older.items() if own & others)])
        if state.base == state.epoch:
            self._older.pop(state.request.request_id, None)
        else:
            self._older[state.request.request_id] = own

    # -- a step

    def plan(
        self,
        scheduled: dict[str, int],
        resolve: Callable[[str], Sequence[Sequence[int]]],
        snapshots: Mapping[str, Sequence[tuple[int, int, int]]] | None = None,
    ) -> Plan:
        """Return the transfers that begin in this step.

        resolve returns the blocks of a request, by KV cache group. snapshots has the blocks with recurrent state that the engine
        offers in this step, by request: each with its KV cache group, its id and the number of tokens after which it is the state.
        """
        plan = Plan(loads=self._loads)
        self._loads = []
        opened = self._opened()
        # Loads were planned at these epochs. If a new one is about to begin, the nodes refuse them.
        plan.epochs = list(self._epochs)
        if self._layers and plan.loads:
            self._loading.update((load.job, self._ranks) for load in plan.loads)
            self._running += [(self._requests.get(name), list(resolve(name)[0])) for name in scheduled]
        usable = opened is not None and self._clock() >= self._down_until
        for name in scheduled:
            if name in self._older:
                self._mark_older(self._requests[name], resolve(name))
        if self._older:
            self._pool.evict_blocks(set().union(*self._older.values()))
        for name, tokens in scheduled.items() if usable else ():
            state = self._requests.get(name)
            if state is not None and state.may_save:
                # With asynchronous scheduling or drafts some tokens of this step are not known yet.
                tokens = min(state.request.num_computed_tokens + tokens, state.request.num_tokens)
                self._keep_until(state, tokens // self._block, self._without_state(resolve(name), (snapshots or {}).get(name, ())))
        finished, self._tails = self._tails, deque()
        for state in [*self._requests.values(), *finished]:
            if not usable or not state.may_save:
                self._drop(state)
            elif state.waiting and state.saving is None and not self._loading:
                self._begin_save(plan, state)
        self._tails.extend(state for state in finished if state.waiting)
        return plan

    def _without_state(self, blocks: Sequence[Sequence[int]], offered: Sequence[tuple[int, int, int]] = ()) -> Sequence[Sequence[int]]:
        """Return the request's blocks, of recurrent state only the offered snapshots at the ends of blocks."""
        if not self._state_pools:
            return blocks
        count = max(map(len, blocks))
        table = [[NULL] * count if pool in self._state_pools else list(ids) for pool, ids in enumerate(blocks)]
        for pool, block, tokens in offered:
            if tokens and tokens % self._block == 0:
                table[pool][tokens // self._block - 1] = block
        return table

    def _keep_until(self, state: _Request, end: int, blocks: Sequence[Sequence[int]]) -> int:
        """Keep the request's blocks up to end, as far as there is room. Return the number of blocks without room."""
        first = state.kept_until
        room = max(0, self._room - len(self._kept)) // len(blocks)
        take = min(end - first, room)
        if take > 0:
            state.chain.extend(state.request.all_token_ids, state.extra)
            new = [list(pool[first : first + take]) for pool in blocks]
            self._keep(new)
            if state.waiting:
                state.waiting = [a + b for a, b in zip(state.waiting, new, strict=True)]
            else:
                state.waiting, state.waiting_first = new, first
        return max(0, end - first - max(0, take))

    def _drop(self, state: _Request) -> None:
        """Drop the blocks that wait for a save."""
        if state.waiting:
            self._counters.add("dropped_blocks", len(state.waiting[0]))
            self._release(state.waiting)
            state.waiting = []

    def _begin_save(self, plan: Plan, state: _Request) -> None:
        """Plan a save of the blocks that wait."""
        self._jobs += 1
        blocks, state.waiting = state.waiting, []
        end = state.waiting_first + len(blocks[0])
        state.saving = Save(self._jobs, bytes(state.chain.ids[: end * _adapter.Chain.SIZE]), state.waiting_first, blocks, state.base)
        self._saves[self._jobs] = (state, state.saving, self._ranks, len(blocks[0]))
        plan.saves.append(state.saving)

    def _keep(self, blocks: Blocks) -> None:
        for block in _each(blocks):
            self._kept[block] = self._kept.get(block, 0) + 1
            self._pool.touch([self._pool.blocks[block]])

    def _release(self, blocks: Blocks) -> None:
        each = _each(blocks)
        for block in each:
            self._kept[block] -= 1
            if not self._kept[block]:
                del self._kept[block]
        # The end of a prompt is evicted first.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(each)])

    def update(self, report: Report | None, loaded: Iterable[str], failed_blocks: Iterable[int], failed: Iterable[str] = ()) -> None:
        """Handle the workers' report after a step.

        The engine recomputes the blocks of a request from the first failed block on, or a failed request from its
        beginning.
        """
        bad = set(failed_blocks)
        if bad and self._layers:
            self._step_failed(bad)
        for state in self._requests.values() if bad else ():
            if state.loading is not None and bad.intersection(state.loading.blocks[0]):
                good = next(i for i, block in enumerate(state.loading.blocks[0]) if block in bad)
                self._load_failed(state, state.loading.first + good)
        for name in failed:
            if name in self._requests:
                self._load_failed(self._requests[name], 0)
        for name in loaded:
            if name in self._requests:
                self._requests[name].loading = None
        if report is None:
            return
        for job, ranks in report.loads.items():
            self._load_ended(job, ranks)
        for job, (ranks, stored) in report.saves.items():
            self._save_ended(job, ranks, stored)
        for rank, epoch in report.epochs.items():
            if self._epochs and epoch > self._epochs[rank]:
                self._epochs[rank] = epoch
                self._new_generation()

    def _load_failed(self, state: _Request, good: int) -> None:
        """Mark the blocks that failed as not stored, and load no more for this request, because a repeated load would
        fail again."""
        state.stored = min(state.stored, good)
        state.may_load = False

    def _step_failed(self, bad: set[int]) -> None:
        """Drop the results that requests have computed from blocks that were not loaded, and make them unavailable to
        other requests."""
        worthless: set[int] = set()
        for state, blocks in self._running:
            first = next((i for i, block in enumerate(blocks) if block in bad), len(blocks))
            worthless.update(blocks[first:])
            if state is None or first == len(blocks):
                continue
            if state.loading is None or first < state.loading.first:
                # Another request loads the block and computes it again. The engine does not revert the results of this
                # request.
                state.may_load = state.may_save = False
            keep = max(0, first - state.waiting_first)
            if state.waiting and keep < len(state.waiting[0]):
                self._release([pool[keep:] for pool in state.waiting])
                state.waiting = [pool[:keep] for pool in state.waiting] if keep else []
        self._pool.evict_blocks(worthless)

    def _load_ended(self, job: int, ranks: int) -> None:
        self._loading[job] -= ranks
        if self._loading[job]:
            return
        del self._loading[job]
        for state in self._requests.values():
            if state.loading is not None and state.loading.job == job:
                state.loading = None
        if not self._loading:
            self._running = []

    def _save_ended(self, job: int, ranks: int, stored: int) -> None:
        state, save, to_come, least = self._saves[job]
        to_come, least = to_come - ranks, min(least, stored)
        if to_come:
            self._saves[job] = (state, save, to_come, least)
            return
        del self._saves[job]
        self._release(save.blocks)
        state.saving = None
        state.stored = save.first + least
        if least < len(save.blocks[0]):
            state.may_save = False
            self._counters.add("dropped_blocks", len(save.blocks[0]) - least)
            self._drop(state)

    def finished(self, request: Any, blocks: Sequence[Sequence[int]]) -> None:
        """Keep the blocks of a request that are not saved yet, and remove the request."""
        self._extras.forget(request)
        self._older.pop(request.request_id, None)
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        for job in state.lookup or ():
            job.cancel()
        if state.loading is None and state.may_save:
            in_flight = getattr(request, "num_in_flight_tokens", 0)
            end = min(request.num_computed_tokens - in_flight, request.num_tokens) // self._block
            self._counters.add("dropped_blocks", self._keep_until(state, end, self._without_state(blocks)))
        if state.waiting:
            self._tails.append(state)

    @property
    def busy(self) -> bool:
        """Whether a save is running or about to begin, so that the engine has to continue its steps."""
        return bool(self._saves or self._tails)

    # -- new weights

    def _new_generation(self) -> None:
        """Do not save blocks that were computed before, because their KV belongs to the old weights."""
        self._counters.add("epochs")
        for state in [*self._requests.values(), *self._tails]:
            state.may_save = state.may_load = False
            self._drop(state)

    def _begin_bump(self) -> None:
        assert self._link is not None
        self._bumping = self._link.call(lambda opened: [ns.bump() for ns in opened.ranks])

    def reset(self) -> bool:
        """Begin a new epoch in all ranks' namespaces. Return whether the nodes have confirmed it within connect_timeout.

        Until they have, the cache is not used.
        """
        self._new_generation()
        if self._link is None or self._link.refused is not None:
            return True  # nothing is ever loaded
        self._begin_bump()
        assert self._bumping is not None
        try:
            self._bumping.result(self._options.connect_timeout)
        except (errors.Error, FutureTimeoutError) as e:
            self._counters.warn("bump", f"no new epoch yet: {e!r}. The cache is not used until the nodes have confirmed it")
            return False
        return self._opened() is not None


def _epochs_of(request: Any) -> tuple[int, int]:
    """Return the epoch that a request names in its kv_transfer_params, and the oldest of which it takes KV; each 0 if it names none.

    {"penstock": {"epoch": 7}} is epoch 7 alone, {"penstock": {"epoch": 7, "oldest": 6}} any live epoch from 6 to 7.
    """
    named = (request.kv_transfer_params or {}).get("penstock")
    if named is None:
        return 0, 0
    known = isinstance(named, dict) and named.keys() <= {"epoch", "oldest"}
    epoch, oldest = (named.get("epoch"), named.get("oldest", 1)) if known else (None, None)
    if type(epoch) is not int or type(oldest) is not int or not 0 < oldest <= epoch < 1 << 63:
        raise errors.InvalidError(
            f'"penstock" in kv_transfer_params is {named!r}; want {{"epoch": N}} with N from 1 to 2**63-1, or'
            ' {"epoch": N, "oldest": M} with M from 1 to N'
        )
    if "oldest" not in named:
        return epoch, 0
    if not request.cache_salt:
        raise errors.InvalidError(
            f"a request takes KV of the epochs {oldest} to {epoch} and has no cache_salt, so that requests of one epoch would find its"
            " KV in the engine's prefix cache: give all such requests a cache_salt of their own"
        )
    return epoch, oldest


def _begin(ranks: Sequence[Namespace], epoch: int, keep: int) -> None:
    """Begin an epoch in each rank's namespace, unless it has begun there. Raise MismatchError if it has ended."""
    for ns in ranks:
        try:
            ns.bump(epoch, keep=keep)
        except errors.MismatchError:  # a node is at a later epoch
            ns.pin(1, epoch=epoch).release()


def _each(blocks: Blocks) -> list[int]:
    """Return the ids of all blocks except null blocks, in the order of the prompt."""
    return [block for places in zip(*blocks, strict=True) for block in places if block != NULL]

"""The scheduler's side of PenstockDualPath: the engine's session with the planner, and its jobs.

    planner ── START, READ, CUT, RECOMPUTE, END ──► leader's thread ─► attempts ─┐
    gateway ── request with the attempt's name ───► lookup ──────────────────────┴► jobs, orders ─► Plan, each step
    planner ◄── progress, stopped, passed, done ── update ◄─ Report, each step

A request names its attempt in kv_transfer_params, {"penstock": {"attempt": NAME, "epoch": N}}. The planner's order and the
request arrive separately, in either order.

With {"penstock": {"identify": true}} a gateway asks for the part of the ids that is of the request's LoRA adapter
(Scheduler.identity), because only the engine has the adapter's weights.

If no request has named an attempt after request_timeout, because the gateway has ended or the engine's HTTP server has not passed the
request on, the attempt fails. A request arrives when vLLM puts it in its queue: the time in the queue does not count.

A prefill engine's job begins when both have arrived, and the request is scheduled when storage has been read: no step waits for
storage. A decode engine's job begins when the engine has blocks for the prompt. A request that names no attempt is computed
without the cache. So is a request whose attempt has failed; the gateway is
notified of the failure, ends the request and sends another one.

With recurrent state, the engines exchange the state at the end of the prompt's full blocks before its last token. vLLM ends a step of
a prefill there, and the decode engine computes the tokens behind:

    tokens     0        B                 fB       N      f = (N - 1) // B
    prefill    │ cached │ computed         │ computed │
    KV         └────────┴──────────────────┘          to the decode engine
    state                                  ▲          to the decode engine, and stored
    decode                                 └──────────┘ computed, then the output

Storage has the state at these ends of prompts and at each end of a block in the output. A prefill engine loads the cached prefix
asynchronously too (Fetch).

A job is over when it has ended in all shards. Its prefix is what all of them have, and a shard that fails ends it in all of them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from penstock import _adapter, errors
from penstock._cluster import NICS_MAX, Action, ActionKind, Attempt, Leader, Nic, Part, Role
from penstock._store import Namespace, Store
from penstock._traffic import NO_PAGE
from penstock.vllm._extra import Extra, Extras
from penstock.vllm._pd_plan import (
    Append,
    Definition,
    Ended,
    Fetch,
    Job,
    Options,
    Order,
    Plan,
    Progress,
    Release,
    Report,
    Step,
    Stopped,
    join_members,
    split_peer,
)
from penstock.vllm._plan import NULL
from penstock.vllm._worker import open_namespace

__all__ = ["Scheduler"]

_log = logging.getLogger("penstock.vllm")

_ID = _adapter.Chain.SIZE

_EXPIRE_EVERY = 1.0  # the longest time in seconds between two checks for attempts whose request has not arrived


@dataclass
class _Open:
    store: Store
    ns: Namespace
    leader: Leader

    def close(self) -> None:
        self.leader.close()
        self.store.close()


@dataclass
class _Turn:
    """An attempt of the planner at this engine."""

    attempt: Attempt
    early: list[Order] = field(default_factory=list)  # orders that came before the job
    job: bool = False  # the workers have its job, or receive it with the next plan
    request: str = ""  # the engine's id of the request, if it has arrived
    reads: dict[Part, dict[int, _Read]] = field(default_factory=dict)  # by part that is being read, and by shard
    loaded: dict[int, int] = field(default_factory=dict)  # prefill: the first block to compute, by shard whose storage has been read
    recomputed: int | None = None  # prefill: the first block that the planner has the engine compute
    scheduled: bool = False  # prefill: the engine has begun to compute
    served: bool = False  # decode: the engine has completed the output
    over: bool = False  # the planner has ended the attempt, so transfers that this cancels have not failed
    until: float | None = None  # the attempt fails then, unless its request has arrived; None: it has


class _Read(NamedTuple):
    """How far a shard has read a part."""

    upto: int
    bytes: int
    stopped: bool = False
    gone: bool = False


@dataclass
class _Running:
    """A job that has not ended in all shards."""

    request: str
    pages: tuple[int, ...] = ()  # decode: the engine's blocks for the prompt that its prefix cache does not have
    received: bool = False  # decode: rank 0 has the prompt, and passes it to the other ranks
    ended: dict[int, Ended] = field(default_factory=dict)


@dataclass
class _Taken:
    """A step of a prefill, and the ranks that have taken it with the right KV."""

    release: Release
    ranks: set[int] = field(default_factory=set)


class _Request:
    """The connector's state of one request of the engine that names an attempt."""

    def __init__(self, request: Any, name: str, epoch: int, since: float) -> None:
        self.request = request
        self.name = name
        self.epoch = epoch
        self.since = since
        self.chain: _adapter.Chain | None = None
        self.extra: Extra | None = None  # of the chain's blocks
        self.alone = False  # the engine computes it without the other side
        self.pages = 0  # prefill: blocks that the worker knows
        self.fetching = False  # prefill, with recurrent state: it waits for its cached prefix
        self.computed = False  # prefill, with recurrent state: the whole job is computed
        self.appended = 0  # decode: blocks that are stored, or are being stored
        self.resident = 0  # decode: blocks of the prompt that the engine has in its prefix cache


class Scheduler:
    """Decides in each step which blocks the worker moves. Only attach waits for nodes. No call waits for the planner.

    The lock guards the attempts, which the leader's thread and the engine's thread use.
    """

    def __init__(
        self,
        options: Options,
        counters: _adapter.Counters,
        *,
        role: Role,
        extras: Extras,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._extras = extras
        self._counters = counters
        self._role = role
        self._clock = clock
        self.definition: Definition | None = None
        """Of the first shard, in whose namespace a gateway finds prefixes. It is known after attach."""
        self._block = 0
        self._whole = False  # some layers need other blocks for a shorter prefix: windows or recurrent state
        self._states: tuple[int, ...] = ()  # the engine's KV cache groups of layers with recurrent state
        self._pool: Any = None  # with recurrent state: the engine's block pool
        self._shards = self._ranks = 0
        self._passes = False  # rank 0 passes the KV to other ranks, which have no shard
        self._epoch = 0
        self._epochs: dict[int, int] = {}  # by shard
        self._link: _adapter.Link[_Open] | None = None
        self._thread: threading.Thread | None = None
        self._requests: dict[str, _Request] = {}
        self._nics: dict[int, list[Nic]] = {}  # by shard
        self._lock = threading.Lock()
        self._turns: dict[str, _Turn] = {}
        self._named: dict[str, str] = {}  # by request of the engine that has not ended: the attempt that it names
        self._jobs: list[Job] = []
        self._fetches: list[Fetch] = []
        self._kept: dict[str, list[int]] = {}  # by attempt: blocks with recurrent state, which the engine would free before they have left
        self._orders: list[Order] = []
        self._cancels: list[str] = []
        self._running: dict[str, _Running] = {}  # by attempt
        self._numbers = count()
        self._steps: dict[int, _Taken] = {}  # by number: the steps that not all ranks have taken
        self._releases: list[Release] = []
        self._held: set[str] = set()  # finished requests whose blocks the engine holds for their job
        self._freed: list[str] = []  # requests whose job has ended
        # decode: requests that wait for a job that will not begin, or that has failed where rank 0 passes the KV to the other ranks
        self._lost: list[tuple[str, tuple[int, ...]]] = []
        self._received: list[tuple[str, tuple[int, ...]]] = []  # decode: requests whose prompt rank 0 passes to the other ranks

    # -- lifecycle

    def attach(self, definitions: Sequence[Definition], ranks: int) -> None:
        """Open the namespace of the first shard and the session with the planner. It waits for the nodes for at most connect_timeout.

        ``definitions`` are those of all shards, which ``ranks`` workers have. Of latent KV, rank 0 has the only one.
        """
        definitions = sorted(definitions, key=lambda d: d.rank)
        assert [d.rank for d in definitions] == list(range(len(definitions)))
        self.definition = definitions[0]
        self._block = self.definition.block_tokens
        self._whole = len(self.definition.groups) > 1
        self._states = self.definition.state_pools
        self._shards, self._ranks = len(definitions), min(ranks, len(definitions))
        self._passes = len(definitions) < ranks
        o = self._options

        def open_() -> _Open:
            store = o.open()
            try:
                ns = open_namespace(store, definitions[0])
                leader = Leader(
                    ns, o.planner, group=o.group or o.engine, node=o.machine, role=self._role, members=[join_members(definitions)],
                    token=o.token, token_file=o.token_file, ca_file=o.ca_file, cert_file=o.cert_file, key_file=o.key_file,
                    insecure=o.insecure,
                )  # fmt: skip
            except BaseException:
                store.close()
                raise
            self._new_epochs({**{d.rank: d.epoch for d in definitions}, 0: ns.epoch})
            self._thread = threading.Thread(target=self._lead, args=(leader,), name="penstock-leader", daemon=True)
            self._thread.start()
            return _Open(store, ns, leader)

        self._link = _adapter.Link(f"penstock: engine {o.engine}", open_, retry=o.retry_interval, log=_log)
        self._link.wait(o.connect_timeout)

    def bind(self, pool: Any) -> None:
        """Take the engine's block pool. It is needed with recurrent state."""
        self._pool = pool

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            if self._link.value is not None:
                self._link.value.close()
        if self._thread is not None:
            self._thread.join()
        self._extras.close()

    # -- the planner's orders

    def _lead(self, leader: Leader) -> None:
        with contextlib.suppress(errors.ClosedError):
            while True:
                actions = leader.wait(min(_EXPIRE_EVERY, self._options.request_timeout))
                for action in actions:
                    with self._lock:
                        self._take(action)
                self.expire()

    def _take(self, action: Action) -> None:
        """Handle an action of the planner. The lock is held."""
        attempt = action.attempt
        turn = self._turns.get(attempt.name)
        if action.kind == ActionKind.START:
            turn = self._turns[attempt.name] = _Turn(attempt)
            if attempt.name not in self._named.values():
                turn.until = self._clock() + self._options.request_timeout
            self._counters.add("attempts")
        elif turn is None:
            return  # the attempt has already ended here
        elif action.kind == ActionKind.END:
            turn.over = True
            if turn.job:
                self._cancels.append(attempt.name)
            else:
                self._done(turn, "the planner gave the attempt up")
        else:
            if action.kind == ActionKind.RECOMPUTE and not turn.scheduled:
                assert action.part is not None
                turn.recomputed = action.part.start if turn.recomputed is None else min(turn.recomputed, action.part.start)
            order = Order(attempt.name, action.kind, action.part)
            (self._orders if turn.job else turn.early).append(order)

    def expire(self) -> None:
        """End the attempts whose request has not arrived in time. Without it the other engine would wait for job_timeout."""
        now = self._clock()
        with self._lock:
            for turn in list(self._turns.values()):
                if turn.until is not None and turn.until <= now:
                    self._done(turn, f"no request has named attempt {turn.attempt.name} within {self._options.request_timeout:g} s")

    def _done(self, turn: _Turn, failure: str = "", intact: int = 0) -> None:
        """End an attempt. The lock is held."""
        self._turns.pop(turn.attempt.name, None)
        turn.attempt.done(failure or None, intact=intact)
        if failure and not turn.over:
            self._counters.add("attempts_failed")
            self._counters.warn(f"attempt {self._role}", f"an attempt has failed, and the planner plans its request again: {failure}")

    # -- requests

    def arrived(self, request: Any) -> None:
        """Take note of a new request of the engine, which may wait in the engine's queue before its first lookup."""
        named = (request.kv_transfer_params or {}).get("penstock")
        name = named.get("attempt") if isinstance(named, dict) else None
        if not isinstance(name, str):
            return
        if self._states:
            _own_hashes(request)
        with self._lock:
            self._named[request.request_id] = name
            if (turn := self._turns.get(name)) is not None:
                turn.until = None

    def _left(self, request: Any) -> None:
        """Remove a request that has ended. Its attempt waits for another request if it has not begun. The lock is held."""
        name = self._named.pop(request.request_id, None)
        turn = self._turns.get(name) if name is not None else None
        if turn is not None and not turn.request and name not in self._named.values():
            turn.until = self._clock() + self._options.request_timeout

    def lookup(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens a load brings, and whether the load runs between steps.

        None: call again later. ``computed`` is the number of tokens of the prompt in the engine's prefix cache.
        """
        if _identifies(request):
            return (0 if self._extras.ready(request) else None), False
        state = self._state(request)
        if state is None or state.alone:
            return 0, False
        if state.chain is None and not self._extras.ready(request):
            return None, False
        with self._lock:
            turn = self._turns.get(state.name)
            if turn is None and state.chain is None:
                if self._clock() - state.since < self._options.start_timeout:
                    return None, False
                return self._alone(state, f"no order of the planner for attempt {state.name} within {self._options.start_timeout:g} s")
            if turn is None:
                return self._alone(state, "the planner has given the attempt up")
            if not turn.request:
                failure = self._accept(state, turn)
                if failure:
                    self._done(turn, failure)
                    return self._alone(state, failure)
            if turn.request != request.request_id:
                return self._alone(state, f"request {turn.request} has named attempt {state.name} before")
            if not self._job_blocks(request.num_tokens):
                return 0, False
            if self._states:
                return self._lookup_state(request, turn)
            if self._role == Role.DECODE:
                state.resident = computed // self._block
                return request.num_tokens - computed, True
            first = self._first(turn)
            return None if first is None else first * self._block, False

    def _lookup_state(self, request: Any, turn: _Turn) -> tuple[int | None, bool]:
        """Return the result of lookup for a model with recurrent state. The lock is held."""
        if self._role == Role.DECODE:
            return self._job_blocks(request.num_tokens) * self._block, True
        first = self._first(turn)
        return None if first is None else first * self._block, bool(first)

    def _job_blocks(self, tokens: int) -> int:
        """Return the length of a job for a prompt of that many tokens, in blocks. It is 0 for one token, which the decode engine computes:
        vLLM would take the prompt for one that was not loaded, and would load it again, for ever."""
        if tokens == 1:
            return 0
        return (tokens - 1) // self._block if self._states else -(-tokens // self._block)

    def _first(self, turn: _Turn) -> int | None:
        """Return the first block of a prompt to compute, when the storage of all shards is read. The lock is held."""
        if len(turn.loaded) < self._shards:
            return None
        first = min(turn.loaded.values())
        if turn.recomputed is not None:
            first = min(first, turn.recomputed)
        if self._whole and first < turn.attempt.hit:
            return 0  # windows and state in front of the block were not read, so the workers' jobs recompute the whole prefix
        return first

    def _state(self, request: Any) -> _Request | None:
        """Return the state of a request that names an attempt."""
        state = self._requests.get(request.request_id)
        if state is None:
            named = (request.kv_transfer_params or {}).get("penstock")
            if named is None:
                return None
            name, epoch = (named.get("attempt"), named.get("epoch")) if isinstance(named, dict) else (None, None)
            if not isinstance(name, str) or type(epoch) is not int:
                self._counters.add("unnamed")
                self._counters.warn(
                    "name",
                    f'"penstock" in kv_transfer_params is {named!r}; want {{"attempt": NAME, "epoch": N}}. The engine computes alone',
                )
                return None
            state = self._requests[request.request_id] = _Request(request, name, epoch, self._clock())
        return state

    def _alone(self, state: _Request, why: str) -> tuple[int, bool]:
        """Compute a request without the other side."""
        state.alone = True
        self._counters.add("unavailable")
        self._counters.warn("alone", f"request {state.request.request_id} is computed alone: {why}")
        return 0, False

    def _give_up(self, state: _Request, why: str) -> tuple[int, bool]:
        """End the attempt of a request, which continues alone."""
        with self._lock:
            turn = self._turns.get(state.name)
            if turn is not None and turn.request == state.request.request_id:
                if state.name in self._running:
                    self._cancels.append(state.name)
                else:
                    self._done(turn, why)
        return self._alone(state, why)

    def _accept(self, state: _Request, turn: _Turn) -> str:
        """Assign a request to its attempt. Return the reason if that is impossible. The lock is held."""
        request, attempt = state.request, turn.attempt
        assert self._link is not None
        assert self._link.value is not None
        ns = self._link.value.ns
        if attempt.epoch != self._epoch or state.epoch != self._epoch:
            return (
                f"the attempt is at epoch {attempt.epoch}, the request names epoch {state.epoch}, and the engine has the weights of"
                f" epoch {self._epoch}"
            )
        if (shards := len(split_peer(attempt.peer_address, attempt.peer_token))) != self._shards:
            return (
                f"engine {attempt.peer_engine} stores a block in {shards} shards, and this one in {self._shards}: set the option shards of"
                " all engines to the greatest tensor_parallel_size"
            )
        if request.skip_reading_prefix_cache:  # vLLM would run it beside its load, and fail when the load ends
            return "the engine computes the whole prompt, for its logprobs, and loads no KV"
        state.chain = _adapter.Chain(ns, self._block)
        try:
            state.extra = self._extras.of(request)
            full = state.chain.extend(request.all_token_ids, state.extra)
        except errors.InvalidError as e:
            return f"the KV of its prompt cannot be identified: {e}"
        if attempt.prompt_tokens != request.num_tokens or bytes(attempt.ids.blob[: full * _ID]) != bytes(state.chain.ids):
            return (
                f"the gateway planned a prompt of {attempt.prompt_tokens} tokens and the engine has another one, of {request.num_tokens},"
                " or another cache salt, LoRA adapter or image"
            )
        if attempt.hit * self._block >= request.num_tokens:
            return (
                f"{attempt.hit} cached blocks of {self._block} tokens cover all of a prompt of {request.num_tokens}; the engine"
                " computes one token at least"
            )
        turn.request, turn.until = request.request_id, None
        blocks = self._job_blocks(request.num_tokens)
        state.appended = min(full, blocks)
        if not blocks:  # the decode engine computes the whole prompt
            turn.job = True
            if self._role == Role.DECODE:
                attempt.passed()
        elif self._role == Role.PREFILL:
            self._begin(state, turn, ())
        return ""

    def _begin(self, state: _Request, turn: _Turn, pages: tuple[int, ...]) -> None:
        """Plan the job of an attempt. The lock is held."""
        a = turn.attempt
        turn.job = True
        self._running[a.name] = _Running(turn.request, pages[state.resident :])
        self._counters.add("loads")
        self._counters.add("hit_tokens", a.hit * self._block)
        self._counters.add("resident_tokens", state.resident * self._block)
        assert state.chain is not None
        blocks = self._job_blocks(a.prompt_tokens)
        self._jobs.append(
            Job(
                a.name, turn.request, bytes(state.chain.ids[: blocks * _ID]), a.epoch, blocks, a.hit, tuple(a.parts),
                split_peer(a.peer_address, a.peer_token), pages, state.resident,
            )
        )  # fmt: skip
        self._orders += turn.early
        turn.early = []

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        """Begin the job of a decode engine, which has its blocks now, or the load of the cached prefix of ``tokens`` tokens on a
        prefill engine with recurrent state. ``blocks`` are those of the request in each KV cache group.
        """
        state = self._requests.get(request.request_id)
        if state is None or state.alone:
            return
        if self._role == Role.PREFILL and not self._states:
            return
        end = tokens // self._block if self._role == Role.PREFILL else self._job_blocks(request.num_tokens)
        pages = self._pages(blocks, 0, end)
        with self._lock:
            turn = self._turns.get(state.name)
            if self._role == Role.PREFILL and state.name in self._running:
                state.pages, state.fetching = end, True
                self._fetches.append(Fetch(state.name, request.request_id, pages))
                self._keep(state, blocks, end)
            elif turn is None:  # the planner has ended the attempt since the lookup
                self._alone(state, "the planner has given the attempt up")
                self._lost.append((request.request_id, pages[state.resident :]))
            elif not turn.job:
                self._begin(state, turn, pages)

    def _pages(self, blocks: Sequence[Sequence[int]], first: int, end: int) -> tuple[int, ...]:
        """Return the engine's blocks from first to end, each as one page in each KV cache group. Raise InvalidError if the engine has
        freed a block before the end."""
        if any(NULL in ids[:end] for pool, ids in enumerate(blocks) if pool not in self._states):
            raise errors.InvalidError(
                "the engine has freed blocks of a running request, which other requests may write while they are transferred: this version"
                " of the engine makes its KV cache manager before its connector. Start the engine without PenstockDualPath"
            )
        end = min(end, *map(len, blocks))
        return tuple(NO_PAGE if ids[i] == NULL else ids[i] for i in range(first, end) for ids in blocks)

    # -- a step

    def plan(self, scheduled: dict[str, int], resolve: Callable[[str], Sequence[Sequence[int]]], preempted: Iterable[str] = ()) -> Plan:
        """Return the work that begins in this step. resolve returns the blocks of a request in each KV cache group.

        The engine may give the blocks of preempted requests to others in this step: the worker ends their jobs before it.
        """
        for name in preempted:
            if name in self._requests:
                self._give_up(self._requests[name], "the engine has preempted the request")
        plan = Plan(idle=not scheduled)
        with self._lock:
            # An order that comes from here on is carried out after the steps.
            plan.jobs, self._jobs = self._jobs, []
            plan.orders, self._orders = self._orders, []
        plan.fetches, self._fetches = self._fetches, []
        for name, tokens in scheduled.items():
            state = self._requests.get(name)
            if state is None or state.alone or state.chain is None:
                continue
            end = min(state.request.num_computed_tokens + tokens, state.request.num_tokens)
            if self._role == Role.PREFILL:
                self._prefill_step(plan, state, end, resolve(name))
            else:
                self._decode_step(plan, state, end, resolve(name))
        with self._lock:
            plan.releases, self._releases = [r for r in self._releases if r.name in self._running], []
            plan.cancels, self._cancels = [name for name in self._cancels if name in self._running], []
            plan.freed, self._freed = self._freed, []
            plan.lost, self._lost = self._lost, []
            plan.received, self._received = self._received, []
        return plan

    def _prefill_step(self, plan: Plan, state: _Request, end: int, blocks: Sequence[Sequence[int]]) -> None:
        with self._lock:
            turn = self._turns.get(state.name)
            state.fetching = False
            if turn is None or state.name not in self._running or state.computed:
                return
            prompt = turn.attempt.prompt_tokens
            first, turn.scheduled = not turn.scheduled, True
            hit = state.request.num_computed_tokens // self._block if first else 0
            if first and hit > (self._first(turn) or 0):
                self._cancels.append(state.name)  # the planner has it recompute a block that the engine counts as loaded
        if end > prompt:
            return
        whole = self._job_blocks(prompt)
        computed = whole if end == prompt else end // self._block
        if self._states:
            if state.request.num_computed_tokens < whole * self._block < end:
                at = state.request.num_computed_tokens
                self._give_up(state, f"the engine computes the tokens {at} to {end} in one step, over the end of block {whole}")
                return
            computed = min(computed, whole)
            state.computed = computed == whole
        pages = self._pages(blocks, state.pages, whole)
        state.pages += len(pages) // len(blocks)
        if state.computed:
            self._keep(state, blocks, whole)
        step = Step(next(self._numbers), state.name, first, hit, pages, computed)
        plan.steps.append(step)
        if self._ranks > 1:
            self._steps[step.number] = _Taken(Release(step.name, step.computed))

    def _keep(self, state: _Request, blocks: Sequence[Sequence[int]], end: int) -> None:
        """Keep the recurrent state at the end of a block until the job has ended: vLLM frees the state before the last one of a request
        that computes further, and when the request finishes."""
        kept = [blocks[pool][end - 1] for pool in self._states]
        if NULL in kept:
            raise errors.InvalidError(
                f"the engine has no recurrent state at the end of block {end} of a request: this version of the engine keeps states"
                " elsewhere. Start the engine without PenstockDualPathHybrid"
            )
        self._pool.touch([self._pool.blocks[block] for block in kept])
        self._kept.setdefault(state.name, []).extend(kept)

    def _decode_step(self, plan: Plan, state: _Request, end: int, blocks: Sequence[Sequence[int]]) -> None:
        assert state.chain is not None
        with self._lock:
            turn = self._turns.get(state.name)
            epoch = 0 if turn is None else turn.attempt.epoch
        if turn is None or end // self._block <= state.appended:
            return
        state.chain.extend(state.request.all_token_ids, state.extra)
        while state.appended < min(end // self._block, len(state.chain)):
            block = state.appended
            pages = self._pages(blocks, block, block + 1)
            if end != (block + 1) * self._block:  # the state is that after a later token
                pages = tuple(NO_PAGE if pool in self._states else page for pool, page in enumerate(pages))
            plan.appends.append(Append(state.name, bytes(state.chain.ids[: (block + 1) * _ID]), epoch, pages))
            state.appended += 1

    def update(self, report: Report) -> None:
        """Handle the workers' report after a step."""
        with self._lock:
            for name, loaded in report.loaded.items():
                if name in self._turns:
                    self._turns[name].loaded.update(loaded)
            for name, shard, read in report.reads:
                if name in self._turns:
                    self._read(self._turns[name], shard, read)
            for number, ranks in report.taken.items():
                step = self._steps.get(number)
                if step is None:
                    continue
                step.ranks |= ranks
                if len(step.ranks) == self._ranks:
                    self._releases.append(self._steps.pop(number).release)
            for name in report.received:
                running = self._running[name]
                running.received = True
                self._received.append((running.request, running.pages))
            for name, ended in report.ended.items():
                self._ended(name, ended)
        if report.epochs and self._new_epochs(report.epochs):
            self._counters.add("epochs")
        self._nics.update(report.nics)
        opened = self._link.value if self._link is not None else None
        if report.nics and opened is not None:
            # A leader that opens later gets the counters with the next change.
            with contextlib.suppress(errors.ClosedError):
                opened.leader.report_nics(self._options.engine, [nic for nics in self._nics.values() for nic in nics][:NICS_MAX])

    def _read(self, turn: _Turn, shard: int, read: Progress | Stopped) -> None:
        """Report how far all shards have read a part, or that its read has ended. The lock is held."""
        part, shards = read.part, turn.reads.setdefault(read.part, {})
        if isinstance(read, Progress):
            shards[shard] = _Read(read.upto, read.bytes)
        else:
            shards[shard] = _Read(read.upto, shards[shard].bytes if shard in shards else 0, True, read.gone)
        whole = len(shards) == self._shards
        upto = min(s.upto for s in shards.values()) if whole else part.start
        if whole and all(s.stopped or s.upto == part.stop for s in shards.values()):
            del turn.reads[part]
            if upto < part.stop:
                turn.attempt.stopped(part, upto, gone=any(s.gone for s in shards.values() if s.upto == upto))
                return
        turn.attempt.progress(part, upto, sum(s.bytes for s in shards.values()) // self._shards)

    def _ended(self, name: str, ended: dict[int, Ended]) -> None:
        """Handle the end of a job in some shards. The lock is held."""
        running = self._running[name]
        running.ended.update(ended)
        if len(running.ended) < self._shards:
            if any(e.failure for e in ended.values()):
                self._cancels.append(name)
                if running.request in self._requests:
                    self._requests[running.request].alone = True
            return
        del self._running[name]
        if kept := self._kept.pop(name, None):
            self._pool.free_blocks([self._pool.blocks[block] for block in kept])
        self._steps = {n: s for n, s in self._steps.items() if s.release.name != name}
        request = running.request
        if self._passes and self._role == Role.DECODE and not running.received:
            self._lost.append((request, running.pages))
        if request in self._held:
            self._held.remove(request)
            self._freed.append(request)
        turn = self._turns.get(name)
        failures = [e for e in running.ended.values() if e.failure]
        if failures:
            if turn is not None and any(not e.cancelled for e in failures):
                turn.over = False
            if turn is None or not turn.over:
                self._counters.add("load_failures")
            if request in self._requests:
                self._requests[request].alone = True
            if turn is not None:
                causes = [e for e in failures if not e.cancelled] or failures
                self._done(turn, causes[0].failure, min(e.intact for e in causes))
        elif turn is not None:
            if self._role == Role.PREFILL or turn.served:
                self._done(turn)
            else:
                turn.attempt.passed()

    def identity(self, request: Any) -> dict[str, Any] | None:
        """Return the answer to a request that asks what its adapter is, at the end of the request, and None for other requests.

        The answer is what ``Chain`` hashes for the adapter, as text. It is None too if the adapter cannot be identified.
        """
        if not _identifies(request) or not request.num_output_tokens:
            return None
        try:
            return {"penstock": {"adapter": _adapter.canonical(self._extras.adapter(request)).decode()}}
        except errors.InvalidError as e:
            self._counters.add("unnamed")
            self._counters.warn("adapter", f"the KV of a LoRA adapter is not stored: {e}")
            return None

    def finished(self, request: Any) -> bool:
        """Remove a request. Return whether its blocks are held until the worker reports the end of its job."""
        self._extras.forget(request)
        state = self._requests.pop(request.request_id, None)
        with self._lock:
            self._left(request)
            if state is None:
                return False
            turn = self._turns.get(state.name)
            if turn is None or turn.request != request.request_id:
                return False
            if state.name in self._running:
                complete = request.num_output_tokens > 0
                if self._role == Role.PREFILL:
                    if not complete:
                        self._cancels.append(state.name)
                    if state.fetching:
                        return False  # vLLM holds the blocks until the load has ended
                    self._held.add(request.request_id)
                    return True
                if complete:
                    turn.served = True
                else:
                    self._cancels.append(state.name)
                return False
            self._done(turn, "" if turn.job else "the engine's request has ended")
        return False

    @property
    def busy(self) -> bool:
        """Whether a job is running or about to begin, or the workers have work to begin, so that the engine has to continue its steps."""
        return bool(self._running or self._freed or self._lost or self._received)

    # -- new weights

    def reset(self) -> None:
        """End all attempts, and refuse others until new_weights has set the epoch, because the engine may have other
        weights.

        If each engine chose an epoch itself, the epochs would differ.
        """
        with self._lock:
            self._epoch = 0  # no attempt has this epoch
            self._epochs = {}
            for state in self._requests.values():
                state.alone = True
            for turn in list(self._turns.values()):
                if turn.attempt.name in self._running:
                    self._cancels.append(turn.attempt.name)
                else:
                    self._done(turn, "the engine has reset its cache")
        self._counters.warn("reset", "the engine has reset its cache, and refuses attempts until penstock.vllm.new_weights sets its epoch")

    def _new_epochs(self, epochs: dict[int, int]) -> bool:
        """Take the epochs of shards. The engine has the weights of an epoch when all shards are at it. Return whether they are."""
        self._epochs.update(epochs)
        values = set(self._epochs.values())
        if len(self._epochs) < self._shards:
            return False
        if len(values) > 1:
            self._epoch = 0
            self._counters.warn(
                "epochs",
                f"the namespaces of the shards are at epochs {self._epochs}; the engine refuses attempts until penstock.vllm.new_weights"
                " names one for all",
            )
            return False
        (self._epoch,) = values
        self._counters.settle("epochs", "reset")
        return True


def _identifies(request: Any) -> bool:
    """Return whether a request asks what its adapter is."""
    named = (request.kv_transfer_params or {}).get("penstock")
    return isinstance(named, dict) and named.get("identify") is True and "attempt" not in named


def _own_hashes(request: Any) -> None:
    """Give a new request hashes of blocks that no other request has. So the engine's prefix cache, without which vLLM has no states
    at the ends of blocks, gives the request no block that a job would write, and gives no block of the request to others."""
    salt, request.cache_salt = request.cache_salt, f"penstock {uuid.uuid4()}"
    request.block_hashes.clear()
    request.update_block_hashes()
    request.cache_salt = salt

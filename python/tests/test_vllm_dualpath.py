"""PenstockDualPath without vLLM: prefill and decode engines on a real node and a real planner. python/engines has the
tests with the engine."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import math
import re
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import certificate

from penstock import Event, EventKind, Gateway, Keys, Role, Store, _adapter, errors, testing
from penstock._cluster import Action, ActionKind, Member, Part
from penstock.vllm._extra import Adapters, Extras
from penstock.vllm._layout import APART, Layer, LayerGroup, Layout, rows_apart, split
from penstock.vllm._pd_plan import EVENTS, Ended, Options, Progress, Release, Report, Stopped, join_members, read_options, split_peer
from penstock.vllm._pd_scheduler import Scheduler, _Running, _Taken, _Turn
from penstock.vllm._pd_worker import Worker
from penstock.vllm._worker import open_namespace

BLOCK = 4
HEADS = 2  # KV heads of the model
HEAD = 4  # bytes of a token in a head of a layer
ROW = HEADS * HEAD
PAGE = BLOCK * ROW
LAYERS = 3
GROUPS = ((1,), (0, 2))  # the layers of full attention, and those with a window, if a model has windows
WINDOW = 9  # tokens that a layer with a window reads before the next one: the last 3 blocks of a prefix
STATE_ROWS = 2
STATE = 24  # bytes of the state of the layer with recurrent state, if a model has one; less than a page
BLOCKS = 64
OUTPUT = 6
BUSY = 120.0  # seconds; only a failure reaches the limit
DOC = Path(__file__).parents[2] / "docs" / "dualpath.md"
# By cache salt: the extras of the first two blocks.
VECTORS: dict[str, tuple[str, str]] = {
    v["salt"]: (v["first"], v["second"])
    for v in json.loads((Path(__file__).parents[2] / "server" / "front" / "testdata" / "cache_salts.json").read_text())
}


def test_the_page_has_all_options_and_events() -> None:
    page = DOC.read_text()
    for name in [*(f.name for f in dataclasses.fields(Options)), *EVENTS]:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("buffer_mib", 0, "want at least 1"),
        ("request_timeout", 0, "more than 0 seconds"),
        ("planner", "", "no option 'planner'"),
        ("verify", "maybe", "verify"),
    ],
)
def test_invalid_options(option: str, value: object, why: str) -> None:
    given: dict[str, Any] = {"servers": ["n0:7420"], "namespace": "m", "planner": "p:7430", "engine": "p0"}
    assert read_options(given).request_timeout == Options.request_timeout
    with pytest.raises(errors.InvalidError, match=why):
        read_options({**given, option: value})


def row(tokens: list[int], layer: int) -> bytes:
    """Return the KV of the last token in a layer, which depends on all tokens."""
    return hashlib.blake2b(repr((tokens, layer)).encode(), digest_size=ROW).digest()


def state(tokens: list[int], part: int = 0, parts: int = 1) -> bytes:
    """Return a part of the recurrent state after tokens: of each row, some of the channels."""
    whole = hashlib.blake2b(repr(tokens).encode(), digest_size=STATE).digest()
    row, size = STATE // STATE_ROWS, STATE // STATE_ROWS // parts
    return b"".join(whole[at : at + size] for at in range(part * size, STATE, row))


def following(tokens: list[int]) -> int:
    """Return the token that the model generates after tokens."""
    return int.from_bytes(hashlib.blake2b(repr(tokens).encode(), digest_size=2).digest(), "little")


@dataclasses.dataclass
class Request:
    """The part of vLLM's Request that the connector uses."""

    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None
    output: int
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None
    block_hashes: list[Any] = dataclasses.field(default_factory=list)
    blocks: list[int] = dataclasses.field(default_factory=list)
    states: list[int] = dataclasses.field(default_factory=list)  # blocks with recurrent state; 0: none
    waits: bool = False  # for an asynchronous load
    aborted: bool = False

    def update_block_hashes(self) -> None:
        """The engine does not use the hashes."""

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def done(self) -> bool:
        return self.aborted or self.num_output_tokens == self.output


def keys(request: Request, start: int, end: int) -> tuple[tuple[Any, ...], ...] | None:
    """Return the extra keys of a block, as vLLM's generate_block_hash_extra_keys. A contract test compares them."""
    images = [("mm", image.identifier, image.start - start) for image in request.mm_features if start < image.stop and image.start < end]
    return (*images, *([("cache_salt", request.cache_salt)] if request.cache_salt and start == 0 else [])) or None


EXTRAS = Extras(keys, None)


def image(identifier: str, start: int, stop: int) -> Any:
    """Return an image of a prompt, in the tokens from start to stop."""
    return SimpleNamespace(identifier=identifier, mm_hash=identifier, start=start, stop=stop)


class Broadcasts:
    """Broadcasts from rank 0 of an engine, whose ranks are called one after the other."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.received: Counter[int] = Counter()  # by rank

    def of(self, rank: int) -> Callable[[Sequence[tuple[int, int]]], None]:
        def broadcast(spans: Sequence[tuple[int, int]]) -> None:
            if rank == 0:
                self.sent.append(b"".join(ctypes.string_at(address, length) for address, length in spans))
                return
            data = self.sent[self.received[rank]]
            self.received[rank] += 1
            assert len(data) == sum(length for _, length in spans)
            for address, length in spans:
                ctypes.memmove(address, data[:length], length)
                data = data[length:]

        return broadcast


class Rank:
    """The worker of one rank of an engine, and its memory. Latent KV is the same in all ranks."""

    def __init__(
        self,
        o: Options,
        counters: _adapter.Counters,
        role: Role,
        rank: int,
        ranks: int,
        broadcasts: Broadcasts,
        *,
        latent: bool,
        windows: bool,
        apart: bool,
        states: bool,
        prefix_cache: bool,
    ) -> None:
        self.worker = Worker(o, counters, role=role, broadcast=broadcasts.of(rank), prefix_cache=prefix_cache)
        self.heads = range(HEADS) if latent else range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        self.page = len(self.heads) * BLOCK * HEAD  # [heads, tokens, bytes]
        self.rank, self.count = rank, ranks
        self.held = False  # what its transfers report does not come
        self.memory = ctypes.create_string_buffer(LAYERS * BLOCKS * self.page)
        self.base = ctypes.addressof(self.memory)
        # All blocks of a layer are adjacent, or all layers of a block.
        self.layer, self.block = (BLOCKS * self.page, self.page) if latent else (self.page, LAYERS * self.page)
        self.head, fragments = BLOCK * HEAD, 1
        if apart:  # all blocks of a head are adjacent
            self.block, fragments = self.head, len(self.heads)
            self.head, self.layer = BLOCKS * self.block, BLOCKS * self.page
        layers = [
            Layer(f"layer {i}", self.base + i * self.layer + k * self.head, self.block, self.page // fragments, 0, k)
            for i in range(LAYERS)
            for k in range(fragments)
        ]
        shape = [1, BLOCK, ROW] if latent else [len(self.heads), BLOCK, HEAD]
        strides = [APART if apart else shape[1] * shape[2], shape[2], 1]
        facts = [[f"layer {i}", 0, shape, strides, "torch.uint8"] for i in range(LAYERS)]
        memory = [(self.base, len(self.memory), self.memory)]
        specs = ["MLAAttentionSpec" if latent else "FullAttentionSpec"]
        groups = [LayerGroup(0, layers, fragments=fragments)]
        if windows:
            groups = [
                LayerGroup(WINDOW if g else 0, [one for one in layers if one.name in [f"layer {i}" for i in group]], fragments=fragments)
                for g, group in enumerate(GROUPS)
            ]
        if states:  # in other blocks of the same memory; the model computes the layer first
            groups.append(LayerGroup(0, [Layer("conv", self.base, self.block, STATE // ranks, 1)], True, rows=STATE_ROWS))
            facts.append(["conv", "rows", [1, 1, STATE // ranks], [STATE // ranks, STATE // ranks, 1], "torch.int8"])
            specs.append("MambaSpec")
        layout = Layout(groups, 1 + states, BLOCKS, BLOCK, memory, {"layers": facts, "specs": specs})
        self.worker.open(layout, {"model": "m"}, rank, ranks, heads=shape[0])

    def places(self, block: int, token: int, layer: int) -> list[int]:
        """Return where each head has the KV of a token of a block."""
        page = block * self.block + layer * self.layer
        return [page + i * self.head + token * HEAD for i in range(len(self.heads))]

    def write(self, block: int, token: int, layer: int, kv: bytes) -> None:
        for head, at in zip(self.heads, self.places(block, token, layer), strict=True):
            ctypes.memmove(self.base + at, kv[head * HEAD : (head + 1) * HEAD], HEAD)

    def has(self, block: int, token: int, layer: int, kv: bytes) -> bool:
        return all(
            ctypes.string_at(self.base + at, HEAD) == kv[head * HEAD : (head + 1) * HEAD]
            for head, at in zip(self.heads, self.places(block, token, layer), strict=True)
        )

    def write_state(self, block: int, tokens: list[int]) -> None:
        ctypes.memmove(self.base + block * self.block, state(tokens, self.rank, self.count), STATE // self.count)

    def has_state(self, block: int, tokens: list[int]) -> bool:
        return ctypes.string_at(self.base + block * self.block, STATE // self.count) == state(tokens, self.rank, self.count)

    def spoil(self, block: int) -> None:
        for layer in range(LAYERS):
            for at in self.places(block, 0, layer):
                ctypes.memset(self.base + at, 0xCC, BLOCK * HEAD)


class Engine:
    """The calls of vLLM to a connector and the workers of all ranks, on a model whose KV is a hash of the tokens.

    Each step computes at most ``chunk`` tokens of each request. Before it computes a token it compares the KV of all earlier tokens,
    in a layer with a window that of the last WINDOW tokens.
    With ``states`` a first layer has recurrent state, in blocks of its own, and a step of a prompt ends at the ends of blocks, as in vLLM's
    mode "align".
    When a rank has not loaded a layer, all ranks compute garbage in the layers behind it, and the step is reverted.
    """

    def __init__(
        self,
        node: testing.Node,
        planner: str,
        name: str,
        role: Role,
        *,
        chunk: int = 1000,
        ranks: int = 1,
        latent: bool = False,
        windows: bool = False,
        apart: bool = False,
        states: bool = False,
        prefix_cache: bool = False,
        **options: Any,
    ) -> None:
        self.states = states
        self.refs: Counter[int] = Counter()  # references to blocks, of requests and of the connector
        self.name = name
        self.prefix_cache = prefix_cache
        self.cached: dict[tuple[int, ...], int] = {}  # by the tokens up to its end: a full block. None is evicted
        self.windows = windows
        self.latent = latent
        self.role = role
        self.chunk = chunk
        self.free = list(range(1, BLOCKS))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.held: dict[str, Request] = {}  # finished requests whose blocks the connector still holds
        self.loaded_by: Counter[str] = Counter()  # how many ranks have reported it
        self.freed_by: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.loaded_tokens: dict[str, int] = {}
        self.preempted: list[str] = []
        self.before_plan: Callable[[dict[str, int]], None] = lambda scheduled: None
        self.before_layer: Callable[[int], None] = lambda layer: None
        self.ends_of_reads: Counter[str] = Counter()  # by attempt, over all shards
        given: dict[str, Any] = {
            "namespace": "dual", "buffer_mib": 8, "connect_timeout": BUSY, "start_timeout": BUSY, "request_timeout": BUSY,
            "job_timeout": BUSY, "layer_timeout": BUSY, "append_timeout": BUSY, **options,
        }  # fmt: skip
        o = Options(servers=node.address, planner=planner, engine=name, machine=f"machine of {name}", **given)
        self.counters = _adapter.Counters(name)
        self.broadcasts = Broadcasts()
        self.ranks = [
            Rank(
                o,
                self.counters,
                role,
                i,
                ranks,
                self.broadcasts,
                latent=latent,
                windows=windows,
                apart=apart,
                states=states,
                prefix_cache=prefix_cache,
            )
            for i in range(ranks)
        ]
        self.workers = [rank.worker for rank in self.ranks]
        self.late = 0.0  # seconds that the scheduler's clock is ahead
        self.side = Scheduler(o, self.counters, role=role, extras=EXTRAS, clock=lambda: time.monotonic() + self.late)
        self.side.bind(SimpleNamespace(blocks=range(BLOCKS), touch=self.refs.update, free_blocks=self._drop))
        self.side.attach([d for worker in self.workers for d in worker.definitions], ranks)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.side.close()
        for worker in self.workers:
            worker.close()  # a second call does nothing

    def add(self, request: Request) -> None:
        self.side.arrived(request)
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        for request in [*self.waiting, *self.running]:
            if request.request_id == request_id:
                request.aborted = True
                self._finish(request)

    def _take(self, n: int) -> list[int]:
        taken, self.free = self.free[:n], self.free[n:]
        assert len(taken) == n, "the engine has no block left"
        self.refs.update(taken)
        return taken

    def _drop(self, blocks: Sequence[int]) -> None:
        # A job that still uses these blocks reads or overwrites these bytes, and a check fails.
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                for rank in self.ranks:
                    rank.spoil(block)
                self.free.append(block)

    def _tables(self, request: Request) -> list[list[int]]:
        return [request.blocks, request.states] if self.states else [request.blocks]

    def _retire(self, request: Request, end: int) -> None:
        """Free the states of a request before block end."""
        self._drop([block for block in request.states[:end] if block])
        request.states[:end] = [0] * len(request.states[:end])

    def _aligned(self, request: Request, n: int) -> int:
        """Return how many of the next n tokens the engine computes in a step, which ends at the end of a block within a prompt."""
        start, end, last = request.num_computed_tokens, request.num_computed_tokens + n, (request.num_tokens - 1) // BLOCK * BLOCK
        if end < request.num_tokens:
            end -= end % BLOCK
        return (last if start < last < end else end) - start

    def _compute(self, request: Request, end: int, layer: int, lost: list[bool]) -> None:
        """Compute a layer of a request. ``lost``: by rank, whether it has not loaded the layer or one before."""
        first = max(0, request.num_computed_tokens - WINDOW) if self.windows and layer in GROUPS[1] else 0
        for rank, missing in zip(self.ranks, lost, strict=True):
            for token in range(first, end):
                block, at = request.blocks[token // BLOCK], token % BLOCK
                kv = row(request.all_token_ids[: token + 1], layer)
                if token >= request.num_computed_tokens:
                    rank.write(block, at, layer, kv)
                elif not missing and not rank.has(block, at, layer, kv):
                    self.wrong.append(f"{request.request_id}: token {token} of layer {layer}")

    def _garble(self, request: Request, end: int, layer: int) -> None:
        for rank in self.ranks:
            for token in range(request.num_computed_tokens, end):
                rank.write(request.blocks[token // BLOCK], token % BLOCK, layer, b"\xee" * ROW)

    def _finish(self, request: Request) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._retire(request, (request.num_computed_tokens - 1) // BLOCK if request.num_computed_tokens else 0)
        if self.side.finished(request) or request.waits:
            self.held[request.request_id] = request
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        self._drop([block for block in request.blocks if block not in self.cached.values()])
        self._retire(request, len(request.states))
        request.blocks, request.states = [], []

    def _in_cache(self, tokens: list[int]) -> list[int]:
        """Return the blocks of the prefix cache for all tokens but the last."""
        blocks: list[int] = []
        for end in range(BLOCK, len(tokens), BLOCK):
            block = self.cached.get(tuple(tokens[:end]))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _cache(self, request: Request) -> None:
        """Add the full blocks that the request has computed or loaded to the prefix cache."""
        if self.prefix_cache:
            for i in range(request.num_computed_tokens // BLOCK):
                self.cached.setdefault(tuple(request.all_token_ids[: (i + 1) * BLOCK]), request.blocks[i])

    def preempt(self, request: Request) -> None:
        """Free a request's blocks, as vLLM does when it has none left. The next step reports the preemption to the
        connector."""
        self.running.remove(request)
        self.preempted.append(request.request_id)
        self._release(request)
        request.num_computed_tokens = 0
        self.waiting.append(request)

    def step(self) -> None:
        for request in list(self.waiting):
            if request.waits:
                continue
            whole = -(-request.num_tokens // BLOCK)
            if request.num_computed_tokens == 0:
                cached = self._in_cache(request.all_token_ids)
                tokens, later = self.side.lookup(request, len(cached) * BLOCK)
                if tokens is None:
                    continue
                if request.skip_reading_prefix_cache:  # vLLM asks, and does not use the answer
                    tokens, later = 0, False
                    request.blocks = self._take(whole)
                    self.side.allocated(request, self._tables(request), 0)
                self.loaded_tokens[request.request_id] = tokens
                if later:
                    if self.states:
                        whole = tokens // BLOCK
                        request.states = [0] * (whole - 1) + self._take(1)
                    request.blocks = cached + self._take(whole - len(cached))
                    request.waits = True
                    request.num_computed_tokens = len(cached) * BLOCK + tokens
                    self.side.allocated(request, self._tables(request), tokens)
                    continue
                request.blocks = request.blocks or cached
                request.num_computed_tokens = len(cached) * BLOCK + tokens
            self.waiting.remove(request)
            self.running.append(request)
        scheduled: dict[str, int] = {}
        for request in self.running:
            n = min(self.chunk, request.num_tokens - request.num_computed_tokens)
            if self.states:
                n = self._aligned(request, n)
            whole = -(-(request.num_computed_tokens + n) // BLOCK)
            request.blocks += self._take(max(0, whole - len(request.blocks)))
            if self.states and request.num_computed_tokens:
                self._retire(request, (request.num_computed_tokens - 1) // BLOCK)
            if self.states and whole > len(request.states):
                request.states += [0] * (whole - len(request.states) - 1) + self._take(1)
            scheduled[request.request_id] = n
        by_id = {r.request_id: r for r in self.running}
        preempted, self.preempted = self.preempted, []
        self.before_plan(scheduled)
        plan = self.side.plan(scheduled, lambda name: self._tables(by_id[name]), preempted)
        for worker in self.workers:
            worker.begin(plan)
            # The engine may write to the blocks of preempted requests from here on.
            assert not {r.job.request for r in worker._running.values()}.intersection(preempted)
        for request in self.running if self.states else ():
            if (at := request.num_computed_tokens) and not all(
                rank.has_state(request.states[(at - 1) // BLOCK], request.all_token_ids[:at]) for rank in self.ranks
            ):
                self.wrong.append(f"{request.request_id}: state after {at} tokens")
        if self.running:
            self._forward(scheduled)
        for request in self.running if self.states else ():
            end = request.num_computed_tokens + scheduled[request.request_id]
            for rank in self.ranks:
                rank.write_state(request.states[(end - 1) // BLOCK], request.all_token_ids[:end])
        loaded: set[str] = set()
        freed: set[str] = set()
        failed: set[int] = set()
        failed_requests: set[str] = set()
        report = Report()
        for rank in self.ranks:
            rank.worker.end()
            if not rank.held:
                rank.worker.poll()
            for names, by, done in ((rank.worker.take_loaded(), self.loaded_by, loaded), (rank.worker.take_freed(), self.freed_by, freed)):
                for name in names:
                    by[name] += 1
                    if by[name] == len(self.ranks):
                        del by[name]
                        done.add(name)
            failed |= rank.worker.take_failed()
            failed_requests |= rank.worker.take_failed_requests()
            report = report.merge(rank.worker.take_report() or Report())
        self.ends_of_reads.update(n for n, _, read in report.reads if isinstance(read, Stopped) or read.upto == read.part.stop)
        for request in list(self.running):
            if failed.intersection(request.blocks):
                request.num_computed_tokens = 0
                continue
            request.num_computed_tokens += scheduled[request.request_id]
            self._cache(request)
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids = [*request.all_token_ids, following(request.all_token_ids)]
                request.num_output_tokens += 1
                if request.done:
                    self._finish(request)
        for request in self.waiting:
            if request.waits and (failed.intersection(request.blocks) or request.request_id in failed_requests):
                request.num_computed_tokens = 0
        self.side.update(report)
        for name in loaded:
            if name in self.held:
                self._release(self.held.pop(name))
                continue
            (request,) = [r for r in self.waiting if r.request_id == name]
            request.waits = False
            if request.num_computed_tokens == 0:
                self._release(request)
            else:
                self._cache(request)
                if not self.states:
                    request.num_computed_tokens -= 1  # the last token is computed again, for the first output
        for name in freed:
            self._release(self.held.pop(name))

    def _forward(self, scheduled: dict[str, int]) -> None:
        garbage: set[str] = set()
        for layer in range(LAYERS):
            self.before_layer(layer)
            for worker in self.workers:
                worker.wait_for_layer(f"layer {layer}")
            for request in self.running:
                end = request.num_computed_tokens + scheduled[request.request_id]
                lost = [bool(worker._failed_blocks.intersection(request.blocks)) for worker in self.workers]
                if self.latent:
                    lost = [lost[0]] * len(lost)  # the other ranks receive from rank 0
                if request.request_id in garbage:
                    self._garble(request, end, layer)
                else:
                    self._compute(request, end, layer, lost)
                if any(lost):
                    garbage.add(request.request_id)
            for worker in self.workers:
                worker.save_layer(f"layer {layer}")


@dataclasses.dataclass
class Course:
    """A request as a gateway serves it: sent to both engines, and sent again after each new plan."""

    prompt: list[int]
    request: Any
    salt: str | None = None
    images: tuple[Any, ...] = ()
    computed: bool = False
    """The engine computes the whole prompt, as for its logprobs."""
    events: list[Event] = dataclasses.field(default_factory=list)
    prefill: tuple[Engine, Request] | None = None
    decode: tuple[Engine, Request] | None = None

    def kinds(self) -> list[EventKind]:
        return [e.kind for e in self.events]

    def event(self, kind: EventKind) -> Event:
        return next(e for e in self.events if e.kind == kind)

    @property
    def over(self) -> bool:
        return bool(self.events) and self.events[-1].kind in (EventKind.DONE, EventKind.FAILED)

    @property
    def tokens(self) -> list[int]:
        assert self.decode is not None
        assert self.decode[1].done
        return self.decode[1].all_token_ids[len(self.prompt) :]

    def withdraw(self) -> None:
        for sent in (self.prefill, self.decode):
            if sent is not None and not sent[1].done:
                sent[0].abort(sent[1].request_id)


class Cluster:
    """A gateway, and engines that take steps in turn."""

    def __init__(self, node: testing.Node, planner: testing.Planner, engines: list[Engine]) -> None:
        self.node = node
        self.planner = planner
        self.engines = {e.name: e for e in engines}
        self.windows = engines[0].windows
        self.states = engines[0].states
        self.store = Store(node.address)
        self.shards = [open_namespace(self.store, d) for worker in engines[0].workers for d in worker.definitions]
        self.ns = self.shards[0]
        self.gateway = Gateway(self.ns, planner.address)
        self.courses: dict[Any, Course] = {}
        self.send = True
        self.lose: set[Role] = set()  # requests to engines of these roles do not arrive

    def close(self) -> None:
        self.gateway.close()
        self.store.close()

    def step(self) -> None:
        for event in self.gateway.drain():
            course = self.courses[event.request]
            course.events.append(event)
            if event.kind in (EventKind.REPLANNED, EventKind.FAILED):
                course.withdraw()
            elif event.kind == EventKind.STARTED and self.send:
                self.start(course)
        for engine in self.engines.values():
            engine.step()

    def start(self, course: Course) -> None:
        """Send an attempt to its engines."""
        event = course.events[-1]
        assert event.kind == EventKind.STARTED
        params = {"penstock": {"attempt": event.attempt, "epoch": event.epoch}}
        pe, de = self.engines[event.prefill], self.engines[event.decode]
        extra: dict[str, Any] = {
            "cache_salt": course.salt, "mm_features": course.images, "skip_reading_prefix_cache": course.computed,
        }  # fmt: skip
        course.prefill = pe, Request(f"{event.attempt} at {pe.name}", list(course.prompt), params, 1, **extra)
        course.decode = de, Request(f"{event.attempt} at {de.name}", list(course.prompt), params, OUTPUT, **extra)
        for engine, request in (course.prefill, course.decode):
            if engine.role not in self.lose:
                engine.add(request)

    def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + BUSY
        while not condition():
            assert time.monotonic() < end, [c.events for c in self.courses.values()]
            self.step()

    def until_over(self, *courses: Course) -> None:
        self.until(lambda: all(course.over for course in courses))

    def submit(self, prompt: list[int], salt: str | None = None, images: tuple[Any, ...] = ()) -> Course:
        ids = self.ids(prompt, salt, images)
        request = self.gateway.submit(f"request {len(self.courses)}", ids=ids, prompt=len(prompt), output=OUTPUT)
        course = self.courses[request] = Course(prompt, request, salt, images)
        return course

    def ids(self, tokens: list[int], salt: str | None, images: tuple[Any, ...] = ()) -> Keys:
        """Return the ids of the salted chain as server/front computes them, and with images as vLLM's keys of the blocks determine them."""
        if images:
            chain = _adapter.Chain(self.ns, BLOCK)
            chain.extend(tokens, EXTRAS.of(Request("", tokens, None, OUTPUT, mm_features=images)))
            return Keys([bytes(chain.ids[i : i + 16]) for i in range(0, len(chain.ids), 16)])
        if salt is None:
            return self.ns.chain(tokens)
        first = self.ns.chain(tokens[:BLOCK], extra=VECTORS[salt][0].encode())
        if not first:
            return first
        return Keys([*first, *self.ns.chain(tokens[BLOCK:], parent=first[0], extra=VECTORS[salt][1].encode())])

    def serve(self, *prompts: list[int], salt: str | None = None) -> list[Course]:
        """Serve prompts concurrently until all have ended."""
        courses = [self.submit(prompt, salt) for prompt in prompts]
        self.until_over(*courses)
        self.idle()
        return courses

    def idle(self) -> None:
        self.until(lambda: not any(e.side.busy or e.side._turns or e.waiting or e.running for e in self.engines.values()))

    def stored(self, tokens: list[int], blocks: int, salt: str | None = None) -> None:
        """Wait until the first blocks of a sequence are in the node, in all shards."""
        ids = self.ids(tokens, salt)
        self.until(lambda: all(ns.match(ids).prefix >= blocks for ns in self.shards))
        assert [ns.match(ids).prefix for ns in self.shards] == [blocks] * len(self.shards)
        self.check_stored(tokens, salt)

    def check_stored(self, tokens: list[int], salt: str | None = None) -> None:
        """What the shards have of a sequence is right."""
        ids = self.ids(tokens, salt)
        heads = HEADS // len(self.shards)
        for shard, ns in enumerate(self.shards):
            blocks = ns.match(ids).prefix
            groups = GROUPS if self.windows else (tuple(range(LAYERS)),)
            pieces = [(b, g) for b in range(blocks) for g in range(len(groups)) if g == 0 or b >= blocks - -(-WINDOW // BLOCK)]
            values = [bytearray(len(groups[g]) * heads * BLOCK * HEAD) for _, g in pieces]
            end = [bytearray(STATE // len(self.shards))] if self.states and blocks else []
            if blocks:
                ns.jobs.get(list(ids)[:blocks], values + end, pieces=pieces + [(blocks - 1, 1)] * len(end)).wait()
            assert end == [state(tokens[: blocks * BLOCK], shard, len(self.shards))] * len(end)
            for (block, group), value in zip(pieces, values, strict=True):
                want = b"".join(
                    row(tokens[: token + 1], layer)[head * HEAD : (head + 1) * HEAD]
                    for layer in groups[group]
                    for head in range(shard * heads, (shard + 1) * heads)
                    for token in range(block * BLOCK, (block + 1) * BLOCK)
                )
                assert value == want, (shard, block, group)

    def check(self) -> None:
        """Check that no wrong byte was seen and that all blocks are free."""
        for engine in self.engines.values():
            assert engine.wrong == []
            assert sorted([*engine.free, *engine.cached.values()]) == list(range(1, BLOCKS))
            assert set(+engine.refs) == set(engine.cached.values())
            assert not engine.held
            assert not engine.loaded_by
            assert not engine.freed_by
            sent = len(engine.broadcasts.sent)
            assert [engine.broadcasts.received[rank] for rank in range(1, len(engine.ranks))] == [sent] * (len(engine.ranks) - 1)


def expected(prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(OUTPUT):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


LATENT = "latent"


@pytest.fixture(params=[(1, 1), (2, 2), (2, 2, LATENT)], ids=["1 rank", "2 ranks", "2 latent ranks"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    """Return a function that makes a cluster.

    The parameter is the number of ranks of its prefill and of its decode engines, and LATENT for latent KV.
    """
    with ExitStack() as stack:

        def cluster(prefill: int = 1, decode: int = 1, *, caching: bool = False, **options: Any) -> Cluster:
            node = stack.enter_context(testing.node())
            # A busy machine may leave the engines without a CPU for long: no group is lost for that, and no read given to the other side.
            patient = ["--schedule-group-timeout", "60s", "--schedule-patience", "120s"]
            planner = stack.enter_context(testing.planner(block_tokens=BLOCK, args=patient))
            of = {Role.PREFILL: request.param[0], Role.DECODE: request.param[1]}
            latent = LATENT in request.param
            options = {"shards": 0 if latent else max(request.param), "latent": latent, **options}

            def engine(name: str, role: Role) -> Engine:
                caches = caching and role == Role.DECODE
                return stack.enter_context(Engine(node, planner.address, name, role, ranks=of[role], prefix_cache=caches, **options))

            engines = [engine(f"p{i}", Role.PREFILL) for i in range(prefill)] + [engine(f"d{i}", Role.DECODE) for i in range(decode)]
            made = Cluster(node, planner, engines)
            stack.callback(made.close)
            return made

        yield cluster


any_ranks = pytest.mark.parametrize(
    "make",
    [(1, 1), (2, 2), (2, 1), (1, 2), (1, 1, LATENT), (2, 2, LATENT), (3, 1, LATENT), (1, 3, LATENT)],
    indirect=True,
    ids=["1P1D", "2P2D", "2P1D", "1P2D", "latent 1P1D", "latent 2P2D", "latent 3P1D", "latent 1P3D"],
)
latent_ranks = pytest.mark.parametrize(
    "make",
    [(2, 2, LATENT), (2, 1, LATENT), (1, 2, LATENT)],
    indirect=True,
    ids=["latent 2P2D", "latent 2P1D", "latent 1P2D"],
)
no_latent = pytest.mark.parametrize("make", [(1, 1), (2, 2), (2, 1), (1, 2)], indirect=True, ids=["1P1D", "2P2D", "2P1D", "1P2D"])
one_rank = pytest.mark.parametrize("make", [(1, 1)], indirect=True, ids=["1P1D"])
two_ranks = pytest.mark.parametrize("make", [(2, 2), (2, 1), (1, 2)], indirect=True, ids=["2P2D", "2P1D", "1P2D"])


@any_ranks
@pytest.mark.parametrize("chunk", [1000, 5])
def test_turns_of_a_session(make: Callable[..., Cluster], chunk: int) -> None:
    """Each turn has the tokens of an engine without the connector, and loads the blocks that earlier turns have stored,
    including decoded blocks."""
    check_turns(make(chunk=chunk))


def test_prefix_cache(make: Callable[..., Cluster]) -> None:
    """A decode engine with a prefix cache gets only the blocks that the cache does not have, and stores all new blocks."""
    c = make(caching=True)
    check_turns(c)
    d0 = c.engines["d0"]
    assert d0.counters["resident_tokens"] == d0.counters["hit_tokens"] > 0
    links = [worker._link for worker in d0.workers if worker._link is not None]
    received = sum(nic.bytes_in for link in links if link.value is not None for shard in link.value.shards for nic in shard.traffic.nics())
    # The blocks of the prompts that no turn before has stored, and 8 bytes of each layer for its checksum.
    computed = sum(-(-len(course.prompt) // BLOCK) for course in c.courses.values()) - d0.counters["hit_tokens"] // BLOCK
    assert received == computed * sum(ns.value_bytes + 8 * LAYERS for ns in c.shards)


def test_prefix_cache_after_a_failure(make: Callable[..., Cluster]) -> None:
    """The engine keeps the blocks of its prefix cache when the attempt of a request that uses them fails."""
    c = make(caching=True)
    prompt = list(range(40))
    c.serve(prompt)
    c.stored(prompt, 10)
    d0 = c.engines["d0"]
    cached = dict(d0.cached)
    course = c.submit([*prompt, 1])
    # Both engines have begun the attempt. Before that, an attempt whose request is aborted waits for another request.
    c.until(lambda: course.decode is not None and course.decode[1].waits and c.engines["p0"].side.busy)
    assert course.prefill is not None
    course.prefill[0].abort(course.prefill[1].request_id)
    c.until_over(course)
    c.idle()
    assert EventKind.REPLANNED in course.kinds()
    assert course.tokens == expected(course.prompt)
    assert cached.items() <= d0.cached.items()
    c.check()


def check_turns(c: Cluster) -> None:
    prompt = list(range(100, 121))
    stored = 0
    for turn in range(4):
        (course,) = c.serve(prompt)
        assert course.tokens == expected(prompt)
        assert course.event(EventKind.MATCHED).hit == stored * BLOCK
        assert EventKind.REPLANNED not in course.kinds()
        whole = prompt + course.tokens
        stored = (len(whole) - 1) // BLOCK  # the KV of the last token is never computed
        c.stored(whole, stored)
        prompt = [*whole, *range(1000 * turn, 1000 * turn + 7)]
    c.check()


def test_both_sides_read(make: Callable[..., Cluster]) -> None:
    """The machines of all engines read the prefixes of prompts, and each prompt is read by its own engines."""
    c = make(decode=2)
    prompt = list(range(80))
    c.serve(prompt)
    c.stored(prompt, 20)
    read: Counter[str] = Counter()
    for turn in range(4):
        for course in c.serve([*prompt, 1000 + turn], [*prompt, 2000 + turn]):
            assert course.tokens == expected(course.prompt)
            started = course.event(EventKind.STARTED)
            assert started.read_by_prefill + started.read_by_decode == len(prompt)
            read.update({started.prefill: started.read_by_prefill, started.decode: started.read_by_decode})
    assert set(read) == {"p0", "d0", "d1"}
    assert all(read.values()), read
    c.check()


def test_compute_nics(make: Callable[..., Cluster]) -> None:
    """The planner has the bytes of the compute NIC of each shard: the bytes that the engines have moved."""
    c = make()
    prompt = list(range(80))
    for one in (prompt, [*prompt, 1000]):
        c.serve(one)
        c.stored(one, 20)
    line = re.compile(r'penstock_planner_compute_nic_bytes_total\{direction="(in|out)",engine="([^"]*)",nic="([^"]*)"\} (\S+)')

    def shown() -> dict[tuple[str, str, str], int]:
        with urllib.request.urlopen(f"http://{c.planner.http}/metrics") as response:
            return {(d, engine, nic): int(float(n)) for d, engine, nic, n in line.findall(response.read().decode())}

    moved = {}
    for engine in c.engines.values():
        for worker in engine.workers:
            for shard in worker._link.value.shards if worker._link is not None and worker._link.value is not None else ():
                for nic in shard.traffic.nics():
                    moved["in", engine.name, nic.name] = nic.bytes_in
                    moved["out", engine.name, nic.name] = nic.bytes_out
    assert len(moved) == 2 * 2 * len(c.shards)  # engines, directions
    least = 2 * 20 * sum(ns.value_bytes for ns in c.shards)  # each block of both prompts goes from one side to the other
    received = sum(n for (direction, _, _), n in moved.items() if direction == "in")
    assert received >= least
    c.until(lambda: shown() == moved)


@any_ranks
def test_cache_salt(make: Callable[..., Cluster]) -> None:
    """A request finds the blocks of requests with the same salt, decoded blocks too. An engine fails an attempt whose salt differs from
    the gateway's."""
    c = make()
    salt, other = list(VECTORS)[:2]
    prompt = list(range(37))
    for turn, (by, hit) in enumerate(((salt, 0), (salt, 40), (other, 0), (None, 0))):
        (course,) = c.serve(prompt if by != salt else prompt + turn * expected(prompt), salt=by)
        assert course.event(EventKind.MATCHED).hit == hit
        assert course.tokens == expected(course.prompt)
        whole = course.prompt + course.tokens
        c.stored(whole, (len(whole) - 1) // BLOCK, by)
    (course,) = c.serve([1, 2, 3], salt=salt)  # its first block is decoded
    assert course.tokens == expected([1, 2, 3])
    c.stored(course.prompt + course.tokens, 2, salt)
    c.check()
    course = c.submit(prompt, salt)
    course.salt = other
    c.until_over(course)
    c.idle()
    assert course.kinds()[-1] == EventKind.FAILED
    c.check()


def test_images(make: Callable[..., Cluster]) -> None:
    """A gateway that has the hashes of images plans their requests. Blocks in front of an image are shared, others belong to the image."""
    c = make()
    prompt = list(range(37))
    one, other = ((image(name, 2 * BLOCK + 1, 4 * BLOCK + 1),) for name in "ab")
    for images, hit in ((one, 0), (other, 2 * BLOCK), (one, 36), (other, 36), ((), 2 * BLOCK)):
        course = c.submit(prompt, images=images)
        c.until_over(course)
        c.idle()
        assert course.event(EventKind.MATCHED).hit == hit
        assert course.tokens == expected(prompt)
        ids = c.ids(prompt, None, images)
        c.until(partial(lambda ids: all(ns.match(ids).prefix == len(ids) for ns in c.shards), ids))
    course = c.submit(prompt, images=one)
    course.images = other
    c.until_over(course)
    c.idle()
    assert course.kinds()[-1] == EventKind.FAILED
    c.check()


@any_ranks
def test_a_prompt_of_one_token(make: Callable[..., Cluster]) -> None:
    """The decode engine computes the only token. vLLM would forget a load of it, and ask for the load again."""
    c = make()
    for _ in range(2):
        (course,) = c.serve([7])
        assert course.kinds()[-1] == EventKind.DONE
        assert course.tokens == expected([7])
        c.stored(course.prompt + course.tokens, (len(course.prompt + course.tokens) - 1) // BLOCK)
    c.check()


@any_ranks
def test_a_request_that_computes_its_whole_prompt(make: Callable[..., Cluster]) -> None:
    """A request for the logprobs of its prompt has no use for KV of the prompt. The engines fail its attempts and compute it alone."""
    c = make()
    prompt = list(range(37))
    c.serve(prompt)
    c.stored(prompt + expected(prompt), 10)
    c.idle()
    loads = [e.side._counters["loads"] for e in c.engines.values()]
    course = c.submit(prompt)
    course.computed = True
    c.until_over(course)
    assert course.kinds()[-1] == EventKind.FAILED
    c.idle()
    assert [e.side._counters["loads"] for e in c.engines.values()] == loads
    (again,) = c.serve(prompt)
    assert again.tokens == expected(prompt)
    c.check()


@dataclasses.dataclass
class Lora:
    """The part of vLLM's LoRARequest that the connector uses."""

    lora_path: str
    lora_name: str = "a"
    lora_int_id: int = 1
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


def test_identity_of_an_adapter(tmp_path: Path) -> None:
    """The engine's answer to the gateway's question, and the salts of the adapter's blocks, are those that the gateway expects
    (server/front/salt_test.go). A request waits until the adapter's files are read, for a time."""
    vectors = json.loads((Path(__file__).parents[2] / "server" / "front" / "testdata" / "adapter_salts.json").read_text())
    for name, text in vectors[0]["files"].items():
        (tmp_path / name).write_text(text)
    may_read = threading.Event()

    def find(path: str) -> str:
        assert may_read.wait(BUSY)
        return path

    now = 0.0
    extras = Extras(keys, Adapters(find), tuple(vectors[0]["lora"]), timeout=10, clock=lambda: now)
    side = Scheduler(Options(), _adapter.Counters("x"), role=Role.PREFILL, extras=extras)

    def ask(path: Path, **fields: Any) -> Request:
        params = {"penstock": {"identify": True}}
        return Request("question", [0], params, 1, lora_request=Lora(str(path), **fields))

    question = ask(tmp_path)
    assert side.lookup(question, 0) == (None, False)
    planned = Request("planned", [0], {"penstock": {"attempt": "a", "epoch": 1}}, 1, lora_request=Lora(str(tmp_path)))
    assert side.lookup(planned, 0) == (None, False)
    side.finished(planned)
    may_read.set()
    while side.lookup(question, 0)[0] is None:
        pass
    question.num_output_tokens = 1
    assert side.identity(question) == {"penstock": {"adapter": vectors[0]["identity"]}}
    assert not side.finished(question)
    assert not extras._waiting

    for vector in vectors:
        ns: Any = Chained()
        request = Request("r", list(range(4 * BLOCK)), None, 1, cache_salt=vector["salt"] or None, lora_request=Lora(str(tmp_path)))
        while not extras.ready(request):
            pass
        _adapter.Chain(ns, BLOCK).extend(request.all_token_ids, extras.of(request))
        assert ns.extras == [vector["first"].encode(), vector["second"].encode(), b"", b""]

    # Other requests, one that has ended before its first token, and an adapter without files get no answer.
    assert side.identity(planned) is None
    assert side.identity(ask(tmp_path)) is None
    missing = ask(tmp_path / "missing", lora_int_id=2)
    while side.lookup(missing, 0)[0] is None:
        pass
    missing.num_output_tokens = 1
    assert side.identity(missing) is None
    assert side._counters["unnamed"] == 1
    side.close()


class Chained:
    """A namespace that records the extras of blocks."""

    def __init__(self) -> None:
        self.extras: list[bytes] = []

    def chain(self, tokens: list[int], *, parent: bytes | None, extra: bytes) -> Keys:
        self.extras += [extra, *[b""] * (len(tokens) // BLOCK - 1)]
        return Keys([bytes(16)] * (len(tokens) // BLOCK))


def test_cache_salt_vectors() -> None:
    """The connector's salts are those that the gateway computes (server/front/salt_test.go)."""
    assert len(VECTORS) >= 7
    for salt, (first, second) in VECTORS.items():
        ns: Any = Chained()
        request = Request("r", list(range(4 * BLOCK)), None, OUTPUT, cache_salt=salt)
        _adapter.Chain(ns, BLOCK).extend(request.all_token_ids, EXTRAS.of(request))
        assert ns.extras == [first.encode(), second.encode(), b"", b""], salt


def test_tls_between_engines(make: Callable[..., Cluster], tmp_path: Path) -> None:
    """Engines whose compute NICs have TLS serve a session. An engine has TLS only if it has all three options."""
    files = {f"listen_{name}": str(path) for name, path in certificate(tmp_path, name="engine").items()}
    c = make(**files)
    prompt = list(range(37))
    for turn in range(2):
        (course,) = c.serve(prompt)
        assert course.tokens == expected(prompt)
        assert course.event(EventKind.MATCHED).hit == (0, 36)[turn]
        c.stored(prompt, 9)
    for engine in c.engines.values():
        for worker in engine.workers:
            assert all(d.member.address.startswith(b"tls://127.0.0.1:") for d in worker.definitions)
    c.check()
    del files["listen_key_file"]
    with pytest.raises(errors.InvalidError, match="key_file"):
        make(**files)


def test_requests_at_once(make: Callable[..., Cluster]) -> None:
    """Requests share engines, steps and prefixes, in chunks."""
    c = make(prefill=2, chunk=7)
    base = list(range(40))
    c.serve(base)
    prompts = [base[: 5 * k] + [500 + k] * (3 + k) for k in range(8)]
    for course in c.serve(*prompts):
        assert course.tokens == expected(course.prompt)
    c.check()


def test_no_hit_of_a_whole_prompt(make: Callable[..., Cluster]) -> None:
    """A prompt that is stored to its last token has a token to compute."""
    c = make()
    prompt = list(range(24))
    c.serve(prompt)
    c.stored(prompt, 6)
    (course,) = c.serve(prompt)
    assert course.tokens == expected(prompt)
    assert course.event(EventKind.MATCHED).hit == 20
    c.check()


@pytest.mark.parametrize(
    ("make", "windows"),
    [((1, 1), False), ((2, 2), False), ((2, 2, LATENT), False), ((2, 1), True)],
    indirect=["make"],
    ids=["1 rank", "2 ranks", "2 latent ranks", "windows"],
)
def test_preempted_prefill(make: Callable[..., Cluster], windows: bool) -> None:
    """The blocks of a preempted request are reused at once: its attempt ends before that, and another attempt serves the
    request."""
    c = make(chunk=5, windows=windows)
    prompt = list(range(37))
    course = c.submit(prompt)
    c.until(lambda: course.prefill is not None and 5 <= course.prefill[1].num_computed_tokens < 30)
    assert course.prefill is not None
    pe, request = course.prefill
    pe.preempt(request)
    c.until_over(course)
    c.idle()
    assert course.tokens == expected(prompt)
    assert EventKind.REPLANNED in course.kinds()
    assert pe.counters["attempts_failed"] == 1
    c.check()


@pytest.mark.parametrize("kind", [ActionKind.END, ActionKind.RECOMPUTE])
def test_orders_of_the_step_that_loads(make: Callable[..., Cluster], kind: ActionKind) -> None:
    """The planner ends an attempt, or has cached blocks computed, when the engine counts them as loaded and has not begun the step."""
    c = make()
    prompt = list(range(60))
    c.serve(prompt)
    c.stored(prompt, 15)
    course, pe, _ = planned(c, [*prompt, *range(500, 520)])
    name = attempt_of(course)
    c.start(course)
    assert course.prefill is not None
    request = course.prefill[1]

    def order(scheduled: dict[str, int]) -> None:
        if request.request_id in scheduled:
            assert request.num_computed_tokens == 60
            attempt = pe.side._turns[name].attempt
            with pe.side._lock:
                pe.side._take(Action(kind, attempt, Part(2, 15) if kind == ActionKind.RECOMPUTE else None))
            pe.before_plan = lambda scheduled: None

    pe.before_plan = order
    c.until_over(course)
    c.idle()
    assert course.tokens == expected(course.prompt)
    assert course.kinds().count(EventKind.REPLANNED) == 1
    c.stored(course.prompt, 20)
    c.check()


def test_cancelled_requests(make: Callable[..., Cluster]) -> None:
    """A cancelled request leaves no block and no attempt, at each stage of the request."""
    c = make(chunk=5)
    prompt = list(range(37))

    def computing(course: Course) -> bool:
        return course.prefill is not None and course.prefill[1].num_computed_tokens >= 10

    def decoding(course: Course) -> bool:
        return course.decode is not None and course.decode[1].num_output_tokens >= 2

    def started(course: Course) -> bool:
        return EventKind.STARTED in course.kinds()

    for when in (started, computing, decoding):
        course = c.submit([*prompt, len(c.courses)])
        c.until(partial(when, course))
        course.request.cancel()
        c.until_over(course)
        assert course.kinds()[-1] == EventKind.FAILED
        c.idle()
        c.check()

    # The planner has started it, and the requests never arrive at the engines.
    c.send = False
    course = c.submit(prompt)
    c.until(lambda: EventKind.STARTED in course.kinds())
    course.request.cancel()
    c.until_over(course)
    c.idle()
    c.check()


@pytest.mark.parametrize("lost", [{Role.PREFILL}, {Role.DECODE}, {Role.PREFILL, Role.DECODE}], ids=["prefill", "decode", "both"])
def test_request_that_does_not_arrive(make: Callable[..., Cluster], lost: set[Role]) -> None:
    """The planner plans a request again when one of its engines has not got it in time. The other engine ends its part."""
    c = make(request_timeout=0.2)
    prompt = list(range(37))
    c.lose = lost
    course = c.submit(prompt)
    c.until(lambda: EventKind.STARTED in course.kinds())
    c.lose = set()
    c.until_over(course)
    c.idle()
    assert course.tokens == expected(prompt)
    assert course.kinds().count(EventKind.REPLANNED) >= 1
    assert sum(e.counters["attempts_failed"] for e in c.engines.values() if e.role in lost) >= 1
    c.stored(prompt, 9)
    c.check()


@pytest.mark.parametrize("make", [(1, 1)], indirect=True, ids=["1 rank"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_request_in_the_engines_queue(make: Callable[..., Cluster], role: Role) -> None:
    """A request that an engine has put in its queue keeps its attempt. A request that leaves the queue does not."""
    c = make()
    prompt = list(range(37))
    c.lose = {role}
    course = c.submit(prompt)
    c.until(lambda: EventKind.STARTED in course.kinds())
    sent = course.prefill if role == Role.PREFILL else course.decode
    assert sent is not None
    engine, request = sent
    c.until(lambda: engine.side._turns)

    def pass_by() -> None:
        engine.late += BUSY + 1
        engine.side.expire()

    engine.side.arrived(request)
    again = dataclasses.replace(request, request_id="sent again")
    engine.side.arrived(again)
    pass_by()
    engine.side.finished(again)
    pass_by()
    assert len(engine.side._turns) == 1
    engine.side.finished(request)
    engine.side.arrived(request)
    pass_by()
    assert len(engine.side._turns) == 1
    engine.side.finished(request)
    assert len(engine.side._turns) == 1
    c.lose = set()
    pass_by()
    assert not engine.side._turns
    c.until_over(course)
    c.idle()
    assert course.tokens == expected(prompt)
    assert course.kinds().count(EventKind.REPLANNED) == 1
    c.check()


def test_lost_engine(make: Callable[..., Cluster]) -> None:
    """A prefill engine ends during a prompt. The other one serves it."""
    c = make(prefill=2, chunk=5)
    prompt = list(range(37))
    course = c.submit(prompt)
    c.until(lambda: course.prefill is not None and course.prefill[1].num_computed_tokens >= 10)
    assert course.prefill is not None
    lost = course.prefill[0]
    del c.engines[lost.name]
    lost.__exit__()
    c.until_over(course)
    c.idle()
    assert course.tokens == expected(prompt)
    assert course.prefill[0] is not lost
    c.check()


def test_other_weights(make: Callable[..., Cluster]) -> None:
    """An attempt with weights that an engine does not have is refused, and nothing is stored under them."""
    c = make()
    prompt = list(range(37))
    c.ns.bump()  # the engines keep the earlier epoch
    course = c.submit(prompt)
    c.until_over(course)
    c.idle()
    assert course.kinds()[-1] == EventKind.FAILED
    assert c.ns.match(c.ns.chain(prompt)).prefix == 0
    for engine in c.engines.values():
        for worker in engine.workers:
            worker.bump(c.ns.epoch)
        engine.step()
    (course,) = c.serve(prompt)
    assert course.tokens == expected(prompt)
    c.check()


def test_reset(make: Callable[..., Cluster]) -> None:
    """An engine whose cache is reset ends its attempts, and stores nothing until new_weights sets its epoch."""
    c = make(chunk=5)
    prompt = list(range(37))
    course = c.submit(prompt)
    c.until(lambda: course.prefill is not None and course.prefill[1].num_computed_tokens >= 10)
    for engine in c.engines.values():
        engine.side.reset()
    c.until_over(course)
    c.idle()
    assert course.kinds()[-1] == EventKind.FAILED
    assert c.ns.match(c.ns.chain(prompt)).prefix == 0
    epoch = c.ns.bump()
    for engine in c.engines.values():
        for worker in engine.workers:
            worker.bump(epoch)
        engine.step()
    (course,) = c.serve(prompt)
    assert course.tokens == expected(prompt)
    c.check()


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (None, None),
        ({"penstock": {"attempt": "unknown", "epoch": 1}}, "unavailable"),
        ({"penstock": {"attempt": 3}}, "unnamed"),
        ({"penstock": "x"}, "unnamed"),
        ({"other": 1}, None),
    ],
)
def test_requests_without_an_attempt(make: Callable[..., Cluster], params: dict[str, Any] | None, kind: str | None) -> None:
    """An engine computes such requests alone."""
    c = make(start_timeout=0.01)
    for engine in c.engines.values():
        request = Request("r", list(range(21)), params, OUTPUT)
        engine.add(request)
        while not request.done:
            c.step()
        assert request.all_token_ids[21:] == expected(list(range(21)))
        if kind is not None:
            assert engine.counters[kind] == 1
    c.check()


def planned(c: Cluster, prompt: list[int]) -> tuple[Course, Engine, Engine]:
    """Return a request whose engines are chosen and do not have it, and these engines."""
    c.send = False
    course = c.submit(prompt)
    c.until(lambda: EventKind.STARTED in course.kinds())
    c.send = True
    started = course.event(EventKind.STARTED)
    return course, c.engines[started.prefill], c.engines[started.decode]


def hold(engine: Engine, *ranks: int) -> None:
    """Let nothing come that the transfers of ranks report, and all come of the others."""
    for i, rank in enumerate(engine.ranks):
        rank.held = i in ranks


def attempt_of(course: Course) -> str:
    return [e for e in course.events if e.kind == EventKind.STARTED][-1].attempt


def decode_reads_first(c: Cluster, course: Course, pe: Engine, de: Engine) -> None:
    """Serve a request. A read of the decode engine that is under way when the prefill engine begins to compute would fail the attempt."""
    hold(pe, *range(len(pe.ranks)))
    c.start(course)
    reads = len(c.shards) if course.event(EventKind.STARTED).read_by_decode else 0
    c.until(lambda: de.ends_of_reads[attempt_of(course)] == reads)
    hold(pe)
    c.until_over(course)
    c.idle()


@two_ranks
@pytest.mark.parametrize(("chunk", "first"), [(1000, {1: 2}), (5, {1: 17}), (5, {0: 11, 1: 4}), (1000, {0: 3, 1: 18})])
def test_shards_that_lack_blocks(make: Callable[..., Cluster], chunk: int, first: dict[int, int]) -> None:
    """The prefix of a request is what all shards have, also when they lack different blocks. What they lack is stored again."""
    c = make(chunk=chunk)
    prompt = list(range(90))
    c.serve(prompt)
    c.stored(prompt, 22)
    again = [*prompt[:80], *range(500, 507)]
    course, pe, de = planned(c, again)
    assert course.event(EventKind.MATCHED).hit == 80
    for shard, block in first.items():
        c.shards[shard].delete(list(c.ns.chain(prompt))[block : block + 1])
    decode_reads_first(c, course, pe, de)
    assert course.tokens == expected(again)
    assert EventKind.REPLANNED not in course.kinds()
    assert course.prefill is not None
    assert pe.loaded_tokens[course.prefill[1].request_id] == min(first.values()) * BLOCK
    c.stored(again, 21)
    c.check()


@two_ranks
def test_slow_rank(make: Callable[..., Cluster]) -> None:
    """A request waits for its slowest rank, on each side, and the planner's view of its reads too."""
    c = make()
    prompt = list(range(90))
    c.serve(prompt)
    c.stored(prompt, 22)
    course, pe, de = planned(c, [*prompt, 500])
    name = attempt_of(course)
    for engine in (pe, de):
        hold(engine, *range(1, len(engine.ranks)))
    c.start(course)
    assert course.prefill is not None
    assert course.decode is not None
    prefill, decode = course.prefill[1], course.decode[1]
    if len(pe.ranks) > 1:
        c.until(lambda: name in pe.side._turns and bool(pe.side._turns[name].loaded))
        for _ in range(20):
            c.step()
        assert set(pe.side._turns[name].loaded) == {0}
        assert prefill in pe.waiting
        hold(pe)
    if len(de.ranks) > 1:
        c.until(lambda: de.loaded_by[decode.request_id])
        for _ in range(20):
            c.step()
        assert decode.waits
        hold(de)
    c.until_over(course)
    c.idle()
    assert course.tokens == expected(course.prompt)
    assert EventKind.REPLANNED not in course.kinds()
    c.check()


def end_shard(worker: Worker, attempt: str) -> None:
    """End the transfer of an attempt in the last shard of a worker, as its time limit would."""
    running = worker._running[attempt]
    shard = max(running.handles)
    running.handles[shard].cancel()
    assert worker._link is not None
    assert worker._link.value is not None
    while shard in running.left:
        worker._collect(worker._link.value.shards[-1].traffic.wait())


def lose_layer(c: Cluster, layer: int, rank: int) -> None:
    """Serve a request of which a rank of the prefill engine does not load a layer. Decode gets nothing of it, and it is planned again."""
    prompt = list(range(60))
    c.serve(prompt)
    c.stored(prompt, 15)
    course, pe, de = planned(c, [*prompt, *range(500, 520)])
    name = attempt_of(course)

    def fail(computed: int) -> None:
        if computed == layer:
            end_shard(pe.workers[rank], name)

    pe.before_layer = fail
    c.start(course)
    assert course.prefill is not None
    request = course.prefill[1]
    c.until(lambda: request in pe.running)
    pe.before_layer = lambda layer: None
    # In these steps the decode engine receives the blocks that prefill has sent.
    for _ in range(20):
        de.step()
    assert not any(r.ready for worker in de.workers for r in worker._running.values())
    c.until_over(course)
    c.idle()
    assert course.tokens == expected(course.prompt)
    assert EventKind.REPLANNED in course.kinds()
    assert sum(e.counters["attempts_failed"] for e in (pe, de)) >= 1
    c.stored(course.prompt, 20)
    c.check()


@two_ranks
@pytest.mark.parametrize(("chunk", "layer"), [(1000, 0), (5, 1), (5, LAYERS - 1)])
def test_rank_that_loads_no_layer(make: Callable[..., Cluster], chunk: int, layer: int) -> None:
    """A layer that one rank has not loaded makes garbage of the layers behind it on all ranks. None of it is used or stored."""
    lose_layer(make(chunk=chunk), layer, -1)


@two_ranks
@pytest.mark.parametrize("states", [False, True])
def test_rank_that_fails(make: Callable[..., Cluster], states: bool) -> None:
    """A transfer that fails on one rank of either side ends the attempt in all ranks, and the request is served by another one."""
    c = make(chunk=5, states=states)
    prompt = list(range(60))
    c.serve(prompt)
    c.stored(prompt, 15)
    for turn, failing in enumerate(("prefill before it is loaded", "prefill in a later chunk", "decode")):
        course, pe, de = planned(c, [*prompt, *range(500 + turn, 540 + turn)])
        name = attempt_of(course)
        engine = de if failing == "decode" else pe
        c.start(course)
        assert course.prefill is not None
        request = course.prefill[1]
        c.until(lambda: name in engine.workers[-1]._running)  # noqa: B023
        if failing == "prefill in a later chunk":
            c.until(lambda: request.num_computed_tokens >= len(prompt) + 5)  # noqa: B023
        end_shard(engine.workers[-1], name)
        c.until_over(course)
        c.idle()
        assert course.tokens == expected(course.prompt), failing
        assert course.kinds().count(EventKind.REPLANNED) == 1, failing
        c.stored(course.prompt, len(course.prompt) // BLOCK)
        c.check()


@pytest.mark.parametrize("make", [(1, 1)], indirect=True)
def test_engines_of_other_shards(make: Callable[..., Cluster], caplog: pytest.LogCaptureFixture) -> None:
    """Engines whose shards differ do not serve a request together, and the log names the option."""
    c = make()
    node, planner = c.node, c.planner
    with Engine(node, planner.address, "p of 2", Role.PREFILL, ranks=2) as pe:
        lost = c.engines.pop("p0")
        lost.__exit__()
        c.engines["p of 2"] = pe
        course = c.submit(list(range(21)))
        c.until_over(course)
        assert course.kinds()[-1] == EventKind.FAILED
        c.idle()
    # The engine that gets its order first refuses.
    refusals = ("engine d0 stores a block in 1 shards, and this one in 2", "engine p of 2 stores a block in 2 shards, and this one in 1")
    assert any(f"{text}: set the option shards" in caplog.text for text in refusals)


@two_ranks
def test_epochs_of_shards(make: Callable[..., Cluster]) -> None:
    """An engine takes attempts when all its ranks have the weights."""
    c = make()
    epoch = c.ns.bump()
    for engine in c.engines.values():
        for i, worker in enumerate(engine.workers):
            assert engine.side._epoch == (1 if i == 0 else 0)
            worker.bump(epoch)
            engine.step()
        assert engine.side._epoch == epoch
    (course,) = c.serve(list(range(21)))
    assert course.event(EventKind.MATCHED).epoch == epoch
    c.check()


@latent_ranks
def test_latent_ranks(make: Callable[..., Cluster]) -> None:
    """Latent KV is read, sent and stored by rank 0 alone, in one namespace for engines of any number of ranks."""
    c = make()
    prompt = list(range(90))
    c.serve(prompt)
    c.stored(prompt, 22)
    name = c.ns.name
    assert name.endswith("/tp1.0")
    for engine in c.engines.values():
        assert [len(worker.definitions) for worker in engine.workers] == [1] + [0] * (len(engine.workers) - 1)
        assert engine.workers[0].definitions[0].name == name
        assert engine.counters["loads"] == 1
        saved = OUTPUT // BLOCK if engine.role == Role.DECODE else 0
        assert engine.counters["saved_blocks"] == saved
    (course,) = c.serve([*prompt, 500])
    assert course.tokens == expected(course.prompt)
    event = course.event(EventKind.STARTED)
    assert event.read_by_prefill + event.read_by_decode == 88
    c.check()


@latent_ranks
@pytest.mark.parametrize(("chunk", "layer"), [(1000, 0), (5, 1), (5, LAYERS - 1)])
def test_latent_layer_that_is_not_loaded(make: Callable[..., Cluster], chunk: int, layer: int) -> None:
    """If rank 0 has not loaded a layer, all ranks compute the prompt again. Nothing that they computed from garbage is stored."""
    lose_layer(make(chunk=chunk), layer, 0)


@latent_ranks
@pytest.mark.parametrize("when", ["before it is received", "when it is received"])
def test_latent_decode_that_fails(make: Callable[..., Cluster], when: str) -> None:
    """A transfer of a decode engine that fails ends the attempt in all ranks. A prompt that has been received reaches all of them."""
    c = make(chunk=5)
    prompt = list(range(60))
    c.serve(prompt)
    c.stored(prompt, 15)
    course, _, de = planned(c, [*prompt, *range(500, 540)])
    name = attempt_of(course)
    c.start(course)
    assert course.decode is not None
    request = course.decode[1]
    received = when == "when it is received"
    if received:
        # The prompt is ready, and the transfer has not ended, because storage waits for a part of it.
        c.until(lambda: name in de.workers[0]._running and de.workers[0]._running[name].ready)
    else:
        c.until(lambda: name in de.workers[0]._running)
    end_shard(de.workers[0], name)
    c.until_over(course)
    c.idle()
    assert course.tokens == expected(course.prompt)
    if not received:
        assert course.kinds().count(EventKind.REPLANNED) == 1
        assert request.num_computed_tokens == 0 or request.aborted
    c.check()


@latent_ranks
def test_epoch_of_latent_ranks(make: Callable[..., Cluster]) -> None:
    """All ranks return the epoch that rank 0 has begun, also if it is the next one."""
    c = make()
    for engine, version, epoch in zip(c.engines.values(), (0, 2), (2, 2), strict=True):
        assert [worker.bump(version) for worker in engine.workers] == [epoch] * len(engine.workers)
        engine.step()
        assert engine.side._epoch == epoch
    (course,) = c.serve(list(range(21)))
    assert course.event(EventKind.MATCHED).epoch == 2
    c.node.stop()
    for engine in c.engines.values():
        for worker in engine.workers:
            worker._options = dataclasses.replace(worker._options, connect_timeout=0.01)
            with pytest.raises(errors.Error):
                worker.bump(0)
    c.check()


@pytest.mark.parametrize(("make", "chunk"), [((1, 1), 1000), ((2, 1), 5), ((2, 2), 5)], indirect=["make"], ids=["1P1D", "2P1D", "2P2D"])
def test_turns_of_a_session_with_windows(make: Callable[..., Cluster], chunk: int) -> None:
    """Layers with a window are loaded from the window at the end of the cached prefix on, and stored with all their blocks."""
    check_turns(make(chunk=chunk, windows=True))


@no_latent
@pytest.mark.parametrize("windows", [False, True])
def test_heads_apart(make: Callable[..., Cluster], windows: bool) -> None:
    """The heads of a layer lie apart in the engines' memory, also of an engine that has two shards."""
    check_turns(make(chunk=5, windows=windows, apart=True))


@two_ranks
@pytest.mark.parametrize(("chunk", "layer"), [(1000, 0), (5, LAYERS - 1)])
def test_rank_that_loads_no_layer_of_heads_apart(make: Callable[..., Cluster], chunk: int, layer: int) -> None:
    """As test_rank_that_loads_no_layer. Each rank keeps all fragments of the last layer until all ranks have taken the step."""
    lose_layer(make(chunk=chunk, apart=True), layer, -1)


@pytest.mark.parametrize("make", [(1, 1), (2, 2)], indirect=True, ids=["1P1D", "2P2D"])
def test_windows_that_lack_a_block(make: Callable[..., Cluster]) -> None:
    """If a cached block is missing, the model computes the whole prompt, because the window in front of that block was not read."""
    c = make(chunk=5, windows=True)
    prompt = list(range(90))
    c.serve(prompt)
    c.stored(prompt, 22)
    again = [*prompt[:80], *range(500, 507)]
    course, pe, de = planned(c, again)
    assert course.event(EventKind.MATCHED).hit == 80
    c.shards[-1].delete(list(c.ns.chain(prompt))[17:18])
    decode_reads_first(c, course, pe, de)
    assert course.tokens == expected(again)
    assert EventKind.REPLANNED not in course.kinds()
    assert course.prefill is not None
    assert pe.loaded_tokens[course.prefill[1].request_id] == 0
    c.stored(again, 21)
    c.check()


@no_latent
@pytest.mark.parametrize("chunk", [1000, 9, 5])
def test_turns_of_a_session_with_state(make: Callable[..., Cluster], chunk: int) -> None:
    """A turn finds the state at the end of the last block that the turn before has filled."""
    check_turns(make(chunk=chunk, states=True))


@one_rank
@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 9 * BLOCK - 1])
def test_lengths_with_state(make: Callable[..., Cluster], length: int) -> None:
    """Prompts that end before, at and behind the end of a block, each served three times: the second and the third time all of its full
    blocks before the last token are cached."""
    c = make(states=True)
    prompt = list(range(length))
    for hit in (0, (length - 1) // BLOCK, (length - 1) // BLOCK):
        (course,) = c.serve(prompt)
        assert course.tokens == expected(prompt)
        assert course.event(EventKind.MATCHED).hit == hit * BLOCK
        assert EventKind.REPLANNED not in course.kinds()
        c.stored(prompt + course.tokens, (length + OUTPUT - 1) // BLOCK)
    c.check()


@one_rank
def test_fork_with_state(make: Callable[..., Cluster]) -> None:
    """A prompt that leaves another one between two states finds the first of them."""
    c = make(states=True)
    prompt = list(range(41))
    c.serve(prompt)
    whole = prompt + expected(prompt)
    c.stored(whole, 11)
    for fork, hit in ((whole[:43], 40), (whole[:39], 0), ([*whole[:44], 1], 44)):
        (course,) = c.serve([*fork, 999])
        assert course.event(EventKind.MATCHED).hit == hit
        assert course.tokens == expected(course.prompt)
    c.check()


@no_latent
@pytest.mark.parametrize("chunk", [1000, 5])
def test_prompts_with_state_at_once(make: Callable[..., Cluster], chunk: int) -> None:
    """Several prompts are computed and loaded at once, each with its own state."""
    c = make(chunk=chunk, decode=2, states=True)
    prompts = [list(range(100 * i, 100 * i + 20 + 3 * i)) for i in range(4)]
    for course in c.serve(*prompts):
        assert course.tokens == expected(course.prompt)
    wholes = [prompt + expected(prompt) for prompt in prompts]
    for whole in wholes:
        c.stored(whole, (len(whole) - 1) // BLOCK)
    for course in c.serve(*([*whole, 999] for whole in wholes)):
        assert course.event(EventKind.MATCHED).hit == (len(course.prompt) - 2) // BLOCK * BLOCK
        assert course.tokens == expected(course.prompt)
        assert EventKind.REPLANNED not in course.kinds()
    c.check()


@no_latent
def test_state_that_lacks_a_block(make: Callable[..., Cluster]) -> None:
    """If a cached block is missing, the model computes the whole prompt, because the state in front of that block was not read."""
    c = make(chunk=5, states=True)
    prompt = list(range(81))
    c.serve(prompt)
    c.stored([*prompt, *expected(prompt)], 21)
    again = [*prompt[:80], *range(500, 507)]
    course, pe, de = planned(c, again)
    assert course.event(EventKind.MATCHED).hit == 80
    c.shards[-1].delete(list(c.ns.chain(prompt))[17:18])
    decode_reads_first(c, course, pe, de)
    assert course.tokens == expected(again)
    assert EventKind.REPLANNED not in course.kinds()
    assert course.prefill is not None
    assert pe.loaded_tokens[course.prefill[1].request_id] == 0
    c.check()


@no_latent
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_loads_of_state_that_fail(make: Callable[..., Cluster], role: Role, how: str) -> None:
    """A request that waits for its load is aborted, or its transfer is cancelled. The planner plans it again, and no block is lost."""
    c = make(states=True)
    prompt = list(range(81))
    c.serve(prompt)
    c.stored([*prompt, *expected(prompt)], 21)
    course = c.submit([*prompt[:80], *range(500, 507)])
    engine = c.engines["p0" if role == Role.PREFILL else "d0"]

    def waits() -> Request | None:
        sent = course.prefill if role == Role.PREFILL else course.decode
        return sent[1] if sent is not None and sent[1].waits else None

    if role == Role.PREFILL:
        c.until(lambda: any(len(turn.loaded) == len(c.shards) for turn in engine.side._turns.values()))
        engine.ranks[-1].held = True  # the load does not end before the fault
    c.until(waits)
    request = waits()
    assert request is not None
    if how == "abort":
        engine.abort(request.request_id)
    else:
        for running in engine.workers[-1]._running.values():
            running.cancel()
    engine.ranks[-1].held = False
    c.until_over(course)
    c.idle()
    assert EventKind.REPLANNED in course.kinds()
    assert course.tokens == expected(course.prompt)
    c.check()


@pytest.mark.parametrize(("windows", "recomputed", "first"), [(False, None, 8), (False, 5, 5), (True, None, 8), (True, 5, 0), (True, 8, 8)])
def test_first_block_with_windows(windows: bool, recomputed: int | None, first: int) -> None:
    """If the planner has an engine with windows compute a cached block that was loaded, the engine computes the whole prefix."""
    side = Scheduler(Options(), _adapter.Counters("x"), role=Role.PREFILL, extras=EXTRAS)
    side._shards, side._whole = 1, windows
    attempt: Any = SimpleNamespace(hit=8)
    turn = _Turn(attempt, loaded={0: 8}, recomputed=recomputed)
    assert side._first(turn) == first


@pytest.mark.parametrize(
    ("groups", "pools", "why"),
    [
        ([64], 1, "every layer has a window of another kind than sliding attention, or windows of two sizes"),
        ([0, 64], 2, "the engine has a KV cache group for each kind of layer; .* start it without --no-disable-hybrid-kv-cache-manager"),
        ([0], 2, "the engine has a KV cache group for each kind of layer"),
    ],
)
def test_windows_of_an_engine(groups: list[int], pools: int, why: str) -> None:
    """An engine that frees blocks of a running request does not start, and the error names the reason or the setting."""
    layers = [LayerGroup(window, [Layer(f"layer {i}", 0, PAGE, PAGE, min(i, pools - 1))]) for i, window in enumerate(groups)]
    facts = {"layers": [], "specs": ["FullAttentionSpec"]}
    layout = Layout(layers, pools, BLOCKS, BLOCK, [(0, PAGE * BLOCKS, None)], facts)
    worker = Worker(Options(), _adapter.Counters("x"), role=Role.PREFILL, broadcast=lambda spans: None)
    with pytest.raises(errors.InvalidError, match=why):
        worker.open(layout, {"model": "m"}, 0, 1)


def test_latent_shards() -> None:
    """Latent KV is one shard, so an engine with another number of them does not start, and the error names the option."""
    with testing.node() as node, pytest.raises(errors.InvalidError, match="option 'shards' is 2: the model's KV is latent"):
        Engine(node, "", "p", Role.PREFILL, ranks=2, latent=True, shards=2)


class Reports:
    """An attempt that records the reports of its reads."""

    def __init__(self) -> None:
        self.name = "a"
        self.made: list[tuple[Any, ...]] = []

    def progress(self, part: tuple[int, int], upto: int, read: int) -> None:
        self.made.append((upto, read))

    def stopped(self, part: tuple[int, int], upto: int, *, gone: bool = False) -> None:
        self.made.append((upto, "gone" if gone else "stopped"))


@pytest.mark.parametrize(
    ("reads", "reports"),
    [
        # Each read is (shard, upto, bytes), or (shard, upto, whether it is gone) for one that has stopped.
        ([(0, 5, 100), (1, 8, 200), (0, 10, 400), (1, 10, 400)], [(2, 50), (5, 150), (8, 300), (10, 400)]),
        ([(0, 10, 400), (1, 4, 100), (1, 4, False)], [(2, 200), (4, 250), (4, "stopped")]),
        ([(0, 7, False), (1, 4, True)], [(2, 0), (4, "gone")]),
        ([(0, 7, True), (1, 4, False)], [(2, 0), (4, "stopped")]),
        ([(0, 4, False), (1, 4, True)], [(2, 0), (4, "gone")]),
        ([(0, 2, True), (1, 10, 400)], [(2, 0), (2, "gone")]),
    ],
)
def test_reads_of_shards(reads: list[tuple[int, int, int | bool]], reports: list[tuple[Any, ...]]) -> None:
    """A part is read as far as all shards have read it, and its end is that of the last one: the planner gets one for each read."""
    side = Scheduler(Options(), _adapter.Counters("x"), role=Role.PREFILL, extras=EXTRAS)
    side._shards = 2
    attempt: Any = Reports()
    turn = _Turn(attempt)
    part = Part(2, 10)
    for shard, upto, what in reads:
        side._read(turn, shard, Stopped(part, upto, what) if isinstance(what, bool) else Progress(part, upto, what))
    assert attempt.made == reports
    assert not turn.reads


def test_request_before_its_order() -> None:
    """A request that arrives before the planner's order does not count as late, and neither does one that has ended when its
    transfers go on."""
    now = 0.0
    side = Scheduler(Options(), _adapter.Counters("x"), role=Role.PREFILL, extras=EXTRAS, clock=lambda: now)
    request = Request("r", [1], {"penstock": {"attempt": "a", "epoch": 1}}, OUTPUT)
    side.arrived(request)
    attempt: Any = Reports()
    side._take(Action(ActionKind.START, attempt))
    now = Options.request_timeout + 1
    side.expire()
    assert side._turns["a"].attempt is attempt
    side._turns["a"].request = "r"
    side.finished(request)
    now *= 2
    side.expire()
    assert side._turns["a"].attempt is attempt


@pytest.mark.parametrize(("over", "cancelled", "failed"), [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_attempt_that_the_planner_ends(over: bool, cancelled: bool, failed: int) -> None:
    """The decode engine may complete the request before the prefill engine has the end of its job. The planner then ends the attempt there,
    and a transfer that this cancels is no failure."""
    counters = _adapter.Counters("x")
    side = Scheduler(Options(), counters, role=Role.PREFILL, extras=EXTRAS)
    side._shards = 2
    done: list[str | None] = []
    attempt: Any = SimpleNamespace(name="a", done=lambda failure, *, intact: done.append(failure))
    side._take(Action(ActionKind.START, attempt))
    side._turns["a"].job, side._running["a"] = True, _Running("request")
    if over:
        side._take(Action(ActionKind.END, attempt))
        assert side.plan({}, lambda name: []).cancels == ["a"]
    side.update(Report(ended={"a": {0: Ended("", 0), 1: Ended("why", 0, cancelled)}}))
    assert done == ["why"]
    assert counters["attempts_failed"] == counters["load_failures"] == failed


def test_members_of_shards() -> None:
    """An engine has one address and one token for the planner, and the other side gets those of each shard."""
    shards = [(b"10.0.0.1:7000", b"a" * 32), (b"10.0.0.1:7001", b"b" * 32), (b"[::1]:80", b"c" * 32)]
    shards += [(b"tls://" + address, token) for address, token in shards]
    for n in range(1, 7):
        definitions: list[Any] = [Shard(Member("e", 20 - i, *shard)) for i, shard in enumerate(shards[:n])]
        member = join_members(definitions)
        assert split_peer(member.address, member.token) == tuple(shards[:n])
        assert member.device_blocks == 21 - n
    assert join_members([Shard(Member("e", 9, *shards[0]))]) == Member("e", 9, *shards[0])  # type: ignore[list-item]


@dataclasses.dataclass
class Shard:
    """Of a Definition what join_members uses."""

    member: Member


TOKENS_OUTSIDE = "tokens outside"


@pytest.mark.parametrize(
    ("shape", "heads", "spec", "shards"),
    [
        ([3, BLOCK, HEAD], 3, "FullAttentionSpec", 2),
        ([1, BLOCK, HEAD], 1, "FullAttentionSpec", 2),
        ([2, BLOCK, HEAD], 4, "FullAttentionSpec", 2),
        ([BLOCK, 2, HEAD], 2, "FullAttentionSpec", 2),
        ([2, BLOCK, HEAD], 2, TOKENS_OUTSIDE, 2),
        ([2, BLOCK * HEAD], 2, "FullAttentionSpec", 2),
        ([2, BLOCK, HEAD], 2, "MLAAttentionSpec", 2),
    ],
)
def test_pages_that_are_not_cut(shape: list[int], heads: int, spec: str, shards: int) -> None:
    """An engine whose pages are not heads one after the other, or too few heads, does not start with several shards on a rank."""
    layers = [Layer("layer 0", 0, 256, 256, 0)]
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if spec == TOKENS_OUTSIDE:
        spec, strides = "FullAttentionSpec", [HEAD, 2 * HEAD, 1]
    facts = {"layers": [["layer 0", 0, shape, strides, "torch.uint8"]], "specs": [spec]}
    layout = Layout([LayerGroup(0, layers)], 1, BLOCKS, BLOCK, [(0, 256 * BLOCKS, None)], facts)
    with pytest.raises(errors.InvalidError, match=f"layer 0: pages of shape .* cannot be cut into {shards} shards"):
        split(layout, shards, heads)


@pytest.mark.parametrize(("rows", "shape"), [(0, [1, 1, STATE]), (STATE_ROWS, [1, 1, 2 * 7])], ids=["no channels", "7 bytes"])
def test_states_that_are_not_cut(rows: int, shape: list[int]) -> None:
    """An engine with recurrent state that is no matrix of channels, or with too few channels, does not start with several shards on a
    rank."""
    groups = [LayerGroup(0, [Layer("layer 0", 0, 256, 32, 0)]), LayerGroup(0, [Layer("conv", 0, 256, shape[-1], 1)], True, rows=rows)]
    facts = [["layer 0", 0, [2, BLOCK, HEAD], [BLOCK * HEAD, HEAD, 1], "torch.uint8"], ["conv", "GDN", shape, [0, 0, 1], "torch.int8"]]
    memory = [(0, 256 * BLOCKS, None)]
    layout = Layout(groups, 2, BLOCKS, BLOCK, memory, {"layers": facts, "specs": ["FullAttentionSpec", "MambaSpec"]})
    with pytest.raises(errors.InvalidError, match=r"layer conv: its recurrent state \(GDN, .* cannot be cut into 2 shards"):
        split(rows_apart(layout), 2, 2)


def test_steps_of_ranks() -> None:
    """The last layer of a step leaves when each rank has reported the step, in whatever order the reports come."""
    side = Scheduler(Options(), _adapter.Counters("x"), role=Role.PREFILL, extras=EXTRAS)
    side._ranks, side._shards = 2, 2
    side._running["a"] = _Running("request")
    for number in (1, 2):
        side._steps[number] = _Taken(Release("a", number))
    for ranks, released in (({1: {0}}, []), ({1: {0}, 2: {0}}, []), ({2: {1}}, [2]), ({1: {1}}, [1])):
        side.update(Report(taken=ranks))
        assert [r.computed for r in side.plan({}, lambda name: []).releases] == released
    side._steps[3] = _Taken(Release("a", 3), {0})
    side.update(Report(ended={"a": {0: Ended("it failed", 0), 1: Ended("", 0)}}))
    side.update(Report(taken={3: {1}}))  # of a job that has ended
    assert side.plan({}, lambda name: []).releases == []

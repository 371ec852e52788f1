"""PenstockDualPath without vLLM: prefill and decode engines on a real node and a real planner. python/engines has the
tests with the engine."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock import Event, EventKind, Gateway, Role, Store, _adapter, testing
from penstock.vllm._layout import Layer, LayerGroup, Layout
from penstock.vllm._pd_plan import EVENTS, Options
from penstock.vllm._pd_scheduler import Scheduler
from penstock.vllm._pd_worker import Worker
from penstock.vllm._worker import open_namespace

BLOCK = 4
ROW = 8  # bytes of a token in a layer
PAGE = BLOCK * ROW
LAYERS = 3
BLOCKS = 64
OUTPUT = 6
BUSY = 120.0  # seconds; only a failure reaches the limit
DOC = Path(__file__).parents[2] / "docs" / "dualpath.md"


def test_the_page_has_all_options_and_events() -> None:
    page = DOC.read_text()
    for name in [*(f.name for f in dataclasses.fields(Options)), *EVENTS]:
        assert f"`{name}`" in page, name


def row(tokens: list[int], layer: int) -> bytes:
    """Return the KV of the last token in a layer, which depends on all tokens."""
    return hashlib.blake2b(repr((tokens, layer)).encode(), digest_size=ROW).digest()


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
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None
    blocks: list[int] = dataclasses.field(default_factory=list)
    waits: bool = False  # for an asynchronous load
    aborted: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def done(self) -> bool:
        return self.aborted or self.num_output_tokens == self.output


class Engine:
    """The calls of vLLM to a connector, on a model whose KV is a hash of the tokens.

    Each step computes at most ``chunk`` tokens of each request. Before it computes a token it compares the KV of all
    earlier tokens.
    """

    def __init__(self, node: testing.Node, planner: str, name: str, role: Role, *, chunk: int = 1000, **options: Any) -> None:
        self.name = name
        self.role = role
        self.chunk = chunk
        self.free = list(range(1, BLOCKS))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.held: dict[str, Request] = {}  # finished requests whose blocks the connector still holds
        self.wrong: list[str] = []
        self.loaded_tokens: dict[str, int] = {}
        self.preempted: list[str] = []
        self.memory = ctypes.create_string_buffer(LAYERS * BLOCKS * PAGE)
        base = ctypes.addressof(self.memory)
        # All layers of a block are adjacent.
        layers = [Layer(f"layer {i}", base + i * PAGE, LAYERS * PAGE, PAGE, 0) for i in range(LAYERS)]
        memory = [(base, len(self.memory), self.memory)]
        layout = Layout([LayerGroup(0, layers)], 1, BLOCKS, BLOCK, memory, {"layers": [["", "", "", "", "torch.uint8"]]})
        given: dict[str, Any] = {
            "namespace": "dual", "buffer_mib": 8, "connect_timeout": BUSY, "start_timeout": BUSY, "job_timeout": BUSY,
            "layer_timeout": BUSY, "append_timeout": BUSY, **options,
        }  # fmt: skip
        o = Options(servers=node.address, planner=planner, engine=name, machine=f"machine of {name}", **given)
        self.counters = _adapter.Counters(name)
        self.worker = Worker(o, self.counters, role=role)
        self.worker.open(layout, {"model": "m"}, 0, 1)
        assert self.worker.definition is not None
        self.side = Scheduler(o, self.counters, role=role)
        self.side.attach(self.worker.definition)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.side.close()
        self.worker.close()  # a second call does nothing

    def abort(self, request_id: str) -> None:
        for request in [*self.waiting, *self.running]:
            if request.request_id == request_id:
                request.aborted = True
                self._finish(request)

    def _take(self, n: int) -> list[int]:
        taken, self.free = self.free[:n], self.free[n:]
        assert len(taken) == n, "the engine has no block left"
        return taken

    def _at(self, request: Request, token: int, layer: int) -> int:
        return (request.blocks[token // BLOCK] * LAYERS + layer) * PAGE + token % BLOCK * ROW

    def _compute(self, request: Request, end: int, layer: int) -> None:
        for token in range(end):
            at = self._at(request, token, layer)
            want = row(request.all_token_ids[: token + 1], layer)
            if token >= request.num_computed_tokens:
                ctypes.memmove(ctypes.addressof(self.memory) + at, want, ROW)
            elif self.memory.raw[at : at + ROW] != want:
                self.wrong.append(f"{request.request_id}: token {token} of layer {layer}")

    def _finish(self, request: Request) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        if self.side.finished(request) or request.waits:
            self.held[request.request_id] = request
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        # A job that still uses these blocks reads or overwrites these bytes, and a check fails.
        for block in request.blocks:
            ctypes.memset(ctypes.addressof(self.memory) + block * LAYERS * PAGE, 0xCC, LAYERS * PAGE)
        self.free += request.blocks
        request.blocks = []

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
                tokens, later = self.side.lookup(request)
                if tokens is None:
                    continue
                self.loaded_tokens[request.request_id] = tokens
                if later:
                    request.blocks = self._take(whole)
                    request.waits = True
                    request.num_computed_tokens = tokens
                    self.side.allocated(request, request.blocks)
                    continue
                request.num_computed_tokens = tokens
            self.waiting.remove(request)
            self.running.append(request)
        scheduled: dict[str, int] = {}
        for request in self.running:
            n = min(self.chunk, request.num_tokens - request.num_computed_tokens)
            need = -(-(request.num_computed_tokens + n) // BLOCK) - len(request.blocks)
            request.blocks += self._take(max(0, need))
            scheduled[request.request_id] = n
        by_id = {r.request_id: r for r in self.running}
        preempted, self.preempted = self.preempted, []
        plan = self.side.plan(scheduled, lambda name: by_id[name].blocks, preempted)
        self.worker.begin(plan)
        # The engine may write to the blocks of preempted requests from here on.
        assert not {r.job.request for r in self.worker._running.values()}.intersection(preempted)
        if self.running:
            for layer in range(LAYERS):
                self.worker.wait_for_layer(f"layer {layer}")
                if not self.worker._failed_blocks:  # otherwise the model computes from invalid KV, and the step is reverted
                    for request in self.running:
                        self._compute(request, request.num_computed_tokens + scheduled[request.request_id], layer)
                self.worker.save_layer(f"layer {layer}")
        self.worker.end()
        self.worker.poll()
        loaded, freed, failed, report = (
            self.worker.take_loaded(),
            self.worker.take_freed(),
            self.worker.take_failed(),
            self.worker.take_report(),
        )
        for request in list(self.running):
            if failed.intersection(request.blocks):
                request.num_computed_tokens = 0
                continue
            request.num_computed_tokens += scheduled[request.request_id]
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids = [*request.all_token_ids, following(request.all_token_ids)]
                request.num_output_tokens += 1
                if request.done:
                    self._finish(request)
        if report is not None:
            self.side.update(report)
        for name in loaded:
            if name in self.held:
                self._release(self.held.pop(name))
                continue
            (request,) = [r for r in self.waiting if r.request_id == name]
            request.waits = False
            if failed.intersection(request.blocks):
                self._release(request)
                request.num_computed_tokens = 0
            else:
                request.num_computed_tokens -= 1  # the last token is computed again, for the first output
        for name in freed:
            self._release(self.held.pop(name))


@dataclasses.dataclass
class Course:
    """A request as a gateway serves it: sent to both engines, and sent again after each new plan."""

    prompt: list[int]
    request: Any
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
        self.engines = {e.name: e for e in engines}
        self.store = Store(node.address)
        definition = engines[0].worker.definition
        assert definition is not None
        self.ns = open_namespace(self.store, definition)
        self.gateway = Gateway(self.ns, planner.address)
        self.courses: dict[Any, Course] = {}
        self.send = True

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
                params = {"penstock": {"attempt": event.attempt, "epoch": event.epoch}}
                pe, de = self.engines[event.prefill], self.engines[event.decode]
                course.prefill = pe, Request(f"{event.attempt} at {pe.name}", list(course.prompt), params, 1)
                course.decode = de, Request(f"{event.attempt} at {de.name}", list(course.prompt), params, OUTPUT)
                for engine, request in (course.prefill, course.decode):
                    engine.waiting.append(request)
        for engine in self.engines.values():
            engine.step()

    def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + BUSY
        while not condition():
            assert time.monotonic() < end, [c.events for c in self.courses.values()]
            self.step()

    def until_over(self, *courses: Course) -> None:
        self.until(lambda: all(course.over for course in courses))

    def submit(self, prompt: list[int]) -> Course:
        request = self.gateway.submit(f"request {len(self.courses)}", tokens=prompt, output=OUTPUT)
        course = self.courses[request] = Course(prompt, request)
        return course

    def serve(self, *prompts: list[int]) -> list[Course]:
        """Serve prompts concurrently until all have ended."""
        courses = [self.submit(prompt) for prompt in prompts]
        self.until_over(*courses)
        self.idle()
        return courses

    def idle(self) -> None:
        self.until(lambda: not any(e.side.busy or e.side._turns or e.waiting or e.running for e in self.engines.values()))

    def stored(self, tokens: list[int], blocks: int) -> None:
        """Wait until the first blocks of a sequence are in the node."""
        ids = self.ns.chain(tokens)
        self.until(lambda: self.ns.match(ids).prefix >= blocks)
        assert self.ns.match(ids).prefix == blocks

    def check(self) -> None:
        """Check that no wrong byte was seen and that all blocks are free."""
        for engine in self.engines.values():
            assert engine.wrong == []
            assert sorted(engine.free) == list(range(1, BLOCKS))
            assert not engine.held


def expected(prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(OUTPUT):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


@pytest.fixture
def make() -> Iterator[Callable[..., Cluster]]:
    with ExitStack() as stack:

        def cluster(prefill: int = 1, decode: int = 1, **options: Any) -> Cluster:
            node = stack.enter_context(testing.node())
            planner = stack.enter_context(testing.planner(block_tokens=BLOCK))
            engines = [stack.enter_context(Engine(node, planner.address, f"p{i}", Role.PREFILL, **options)) for i in range(prefill)]
            engines += [stack.enter_context(Engine(node, planner.address, f"d{i}", Role.DECODE, **options)) for i in range(decode)]
            made = Cluster(node, planner, engines)
            stack.callback(made.close)
            return made

        yield cluster


@pytest.mark.parametrize("chunk", [1000, 5])
def test_turns_of_a_session(make: Callable[..., Cluster], chunk: int) -> None:
    """Each turn has the tokens of an engine without the connector, and loads the blocks that earlier turns have stored,
    including decoded blocks."""
    c = make(chunk=chunk)
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


def test_preempted_prefill(make: Callable[..., Cluster]) -> None:
    """The blocks of a preempted request are reused at once: its attempt ends before that, and another attempt serves the
    request."""
    c = make(chunk=5)
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
        engine.worker.bump(c.ns.epoch)
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
        engine.worker.bump(epoch)
        engine.step()
    (course,) = c.serve(prompt)
    assert course.tokens == expected(prompt)
    c.check()


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (None, None),
        ({"penstock": {"attempt": "nobody's", "epoch": 1}}, "unavailable"),
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
        engine.waiting.append(request)
        while not request.done:
            c.step()
        assert request.all_token_ids[21:] == expected(list(range(21)))
        if kind is not None:
            assert engine.counters[kind] == 1
    c.check()

"""Tests of leaders and gateways, with a real planner and a real storage node."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import MakeNamespace, Run

from penstock import (
    Action,
    ActionKind,
    Attempt,
    AuthError,
    BusyError,
    CanceledError,
    ClosedError,
    Event,
    EventKind,
    Gateway,
    InvalidError,
    Leader,
    Member,
    Namespace,
    NotFoundError,
    Part,
    RefusedError,
    Request,
    Role,
    Store,
    _cluster,
    testing,
)

BLOCK = 16
PROMPT = list(range(10 * BLOCK + 1))
WAIT = 60  # the time limit of a wait, in seconds; only a defect reaches it


@pytest.fixture(scope="module")
def shared() -> Iterator[testing.Planner]:
    """The planner of the tests that do not stop it. Its groups have left when a test ends."""
    with testing.planner(block_tokens=BLOCK) as p:
        yield p


class Side:
    """A leader of one engine, and its actions one after another."""

    def __init__(self, ns: Namespace, planner: str, role: Role, number: int = 0) -> None:
        self.name = f"{role.name.lower()}-{number}"
        member = Member(self.name, device_blocks=100, address=self.name.encode(), token=b"\0\1")
        self.leader = Leader(ns, planner, group=self.name, node=f"machine of {self.name}", role=role, members=[member])
        self.waiting: list[Action] = []

    def next(self, kind: ActionKind) -> Attempt:
        if not self.waiting:
            self.waiting = self.leader.wait(WAIT)
            assert self.waiting, f"{self.name}: no action within {WAIT} s; want {kind!r}"
        action = self.waiting.pop(0)
        assert action.kind == kind
        return action.attempt


class Cluster:
    """A namespace, a prefill and a decode engine, and a gateway."""

    def __init__(self, ns: Namespace, planner: str) -> None:
        self.ns = ns
        self.prefill = Side(ns, planner, Role.PREFILL)
        self.decode = Side(ns, planner, Role.DECODE)
        self.gateway = Gateway(ns, planner)
        self.events: list[Event] = []

    def start(self) -> list[Attempt]:
        return [side.next(ActionKind.START) for side in (self.prefill, self.decode)]

    def until(self, request: Request, kind: EventKind) -> Event:
        """Return the next event of that kind. The events before it are dropped."""
        while True:
            if not self.events:
                self.events = self.gateway.wait(WAIT)
                assert self.events, f"no event within {WAIT} s; want {kind!r}"
            event = self.events.pop(0)
            assert event.request is request
            if event.kind == kind:
                return event
            assert event.kind not in (EventKind.DONE, EventKind.FAILED), event

    def close(self) -> None:
        for part in (self.gateway, self.prefill.leader, self.decode.leader):
            part.close()


@pytest.fixture
def ns(make: MakeNamespace) -> Namespace:
    return make(block_tokens=BLOCK, ids=True)


@pytest.fixture
def cluster(ns: Namespace, shared: testing.Planner) -> Iterator[Cluster]:
    with contextlib.closing(Cluster(ns, shared.address)) as c:
        yield c


def test_a_request(cluster: Cluster) -> None:
    ns = cluster.ns
    ids = ns.chain(PROMPT)
    assert ns.put(ids[:8], [bytes(ns.value_bytes) for _ in range(8)]).ok == 8
    request = cluster.gateway.submit("r", PROMPT, output=5, extra={"n": [1, 2]})
    matched = cluster.until(request, EventKind.MATCHED)
    assert (matched.hit, matched.epoch) == (8 * BLOCK, 1)
    started = cluster.until(request, EventKind.STARTED)
    assert (started.prefill, started.decode, started.epoch) == ("prefill-0", "decode-0", 1)
    assert started.read_by_prefill + started.read_by_decode == 8 * BLOCK
    attempts = cluster.start()
    read = 0
    for a, other in zip(attempts, reversed(attempts), strict=True):
        assert (a.id, a.namespace, a.prompt_tokens, a.output_tokens, a.hit, a.extra) == ("r", ns.name, len(PROMPT), 5, 8, {"n": [1, 2]})
        assert (a.peer_engine, a.peer_address, a.peer_token) == (other.engine, other.engine.encode(), b"\0\1")
        assert a.name == other.name == started.attempt
        assert a.ids == ids
        for part in a.parts:
            into = [bytearray(ns.value_bytes) for _ in range(part.start, part.stop)]
            assert ns.get(a.ids[: part.stop], into, first=part.start, epoch=a.epoch).ok == len(into)
            a.progress(part, part.stop, len(into) * ns.value_bytes)
            read += len(into)
    assert read == 8
    attempts[0].done()
    attempts[1].passed()
    attempts[1].done()
    cluster.until(request, EventKind.DONE)
    for report in (attempts[0].done, attempts[0].passed, request.cancel):
        report()  # no effect, and no error


def test_cancel(cluster: Cluster) -> None:
    request = cluster.gateway.submit("r", PROMPT)
    attempts = cluster.start()
    request.cancel()
    assert isinstance(cluster.until(request, EventKind.FAILED).error, CanceledError)
    for side, attempt in zip((cluster.prefill, cluster.decode), attempts, strict=True):
        assert side.next(ActionKind.END) is attempt
        attempt.done("given up")


def test_a_failure_is_planned_again(cluster: Cluster) -> None:
    request = cluster.gateway.submit("r", PROMPT)
    prefill, decode = cluster.start()
    prefill.done(MemoryError("no pages"))
    assert cluster.decode.next(ActionKind.END) is decode
    decode.done("given up")
    assert cluster.until(request, EventKind.REPLANNED).reason
    for attempt in cluster.start():
        attempt.done()
    cluster.until(request, EventKind.DONE)


def test_a_part_that_storage_does_not_have(cluster: Cluster) -> None:
    ns = cluster.ns
    ns.put(ns.chain(PROMPT)[:8], [bytes(ns.value_bytes) for _ in range(8)])
    request = cluster.gateway.submit("r", PROMPT)
    prefill, decode = cluster.start()
    for a in (prefill, decode):
        for part in a.parts:
            a.stopped(part, part.start, gone=True)
    parts: list[Part] = []
    while sum(p.stop - p.start for p in parts) < 8:
        for action in cluster.prefill.leader.wait(WAIT):
            if action.kind == ActionKind.RECOMPUTE:
                assert isinstance(action.part, Part)
                parts.append(action.part)
    prefill.done()
    decode.done()
    cluster.until(request, EventKind.DONE)


def test_the_planner_is_killed_during_a_request(ns: Namespace) -> None:
    with testing.planner(block_tokens=BLOCK) as p, contextlib.closing(Cluster(ns, p.address)) as cluster:
        request = cluster.gateway.submit("r", PROMPT)
        attempts = cluster.start()
        p.kill()
        assert cluster.until(request, EventKind.WAITING).reason
        p.start()
        cluster.until(request, EventKind.ACCEPTED)
        # A report between two sessions is lost, and the request is then planned again. So each engine accepts every START.
        done = threading.Event()

        def engine(side: Side, attempt: Attempt) -> None:
            attempt.done()
            while not done.is_set():
                for action in side.leader.wait(0.1):
                    action.attempt.done()

        threads = [threading.Thread(target=engine, args=pair) for pair in zip((cluster.prefill, cluster.decode), attempts, strict=True)]
        for thread in threads:
            thread.start()
        cluster.until(request, EventKind.DONE)
        done.set()
        for thread in threads:
            thread.join()


ENGINE = """
import sys
from penstock import Leader, Member, Role, Store
node, planner, namespace, name = sys.argv[1:]
with Store(node) as store:
    ns = store.namespace(namespace, block_tokens=16, layers=2, token_bytes=64, ids=True)
    with Leader(ns, planner, group=name, node=name, role=Role.PREFILL, members=[Member(name, device_blocks=100)]) as leader:
        print("open", flush=True)
        while True:
            for action in leader.wait():
                print(action.kind.name, action.attempt.id, flush=True)
"""


def test_a_leader_that_is_killed(ns: Namespace, node: testing.Node, shared: testing.Planner) -> None:
    """Its request is planned again, and another engine takes it. Without another engine the request waits until its deadline."""
    decode = Side(ns, shared.address, Role.DECODE)
    command = [sys.executable, "-c", ENGINE, node.address, shared.address, ns.name, "prefill-killed"]
    with contextlib.closing(decode.leader), Gateway(ns, shared.address) as gateway:
        request = gateway.submit("killed", PROMPT)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdout is not None
            assert [engine.stdout.readline().strip() for _ in range(2)] == ["open", "START killed"]
            first = decode.next(ActionKind.START)
            engine.send_signal(signal.SIGKILL)
        assert decode.next(ActionKind.END) is first
        first.done("given up")
        other = Side(ns, shared.address, Role.PREFILL, 1)
        with contextlib.closing(other.leader):
            for side in (other, decode):
                side.next(ActionKind.START).done()
            kinds: list[EventKind] = []
            while EventKind.DONE not in kinds:
                events = gateway.wait(WAIT)
                assert events
                assert all(e.request is request for e in events)
                kinds += [e.kind for e in events]
            assert EventKind.REPLANNED in kinds
        late = gateway.submit("late", PROMPT, deadline=0.1)
        last = None
        while last is None or last.kind != EventKind.FAILED:
            last = gateway.wait(WAIT)[-1]
        assert last.request is late
        assert isinstance(last.error, RefusedError)


def test_asyncio(cluster: Cluster) -> None:
    """Engines and a front end with many requests in one event loop."""

    prefilled: collections.defaultdict[str, asyncio.Event] = collections.defaultdict(asyncio.Event)

    async def engine(side: Side) -> int:
        served = 0
        async for action in side.leader:
            assert action.kind == ActionKind.START
            served += 1
            if side is cluster.prefill:
                prefilled[action.attempt.id].set()
            await prefilled[action.attempt.id].wait()  # a request ends with its decode engine
            action.attempt.done()
        return served

    async def serve(i: int) -> list[EventKind]:
        return [event.kind async for event in cluster.gateway.serve(f"r{i}", PROMPT, output=i)]

    async def main() -> None:
        engines = [asyncio.ensure_future(engine(side)) for side in (cluster.prefill, cluster.decode)]
        for kinds in await asyncio.gather(*(serve(i) for i in range(20))):
            assert kinds[0] == EventKind.MATCHED
            assert kinds[-1] == EventKind.DONE
        for side in (cluster.prefill, cluster.decode):
            await asyncio.get_running_loop().run_in_executor(None, side.leader.close)
        assert [await e for e in engines] == [20, 20]
        assert cluster.gateway.drain() == []

    asyncio.run(main())


def test_asyncio_cancel_and_close(cluster: Cluster) -> None:
    async def events_of(id: str, deadline: float | None = None) -> list[EventKind]:
        return [event.kind async for event in cluster.gateway.serve(id, PROMPT, deadline=deadline)]

    async def main() -> None:
        task = asyncio.ensure_future(events_of("cancelled"))
        loop = asyncio.get_running_loop()
        attempts = await loop.run_in_executor(None, cluster.start)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for side, attempt in zip((cluster.prefill, cluster.decode), attempts, strict=True):
            assert await loop.run_in_executor(None, side.next, ActionKind.END) is attempt
            attempt.done("given up")
        with pytest.raises(InvalidError, match="JSON"):
            await cluster.gateway.serve("r", PROMPT, extra=object()).__anext__()
        for side in (cluster.prefill, cluster.decode):
            await loop.run_in_executor(None, side.leader.close)
        with pytest.raises(RefusedError):
            await events_of("late", deadline=0.05)
        closed = asyncio.ensure_future(events_of("closed"))
        await asyncio.sleep(0)  # the task runs up to its first event
        await loop.run_in_executor(None, cluster.gateway.close)
        with pytest.raises(ClosedError):
            await closed

    asyncio.run(main())


def test_closing_wakes_waiters(ns: Namespace, shared: testing.Planner) -> None:
    """Closing the leader, or its store, ends a wait in another thread."""
    for close_store in (False, True):
        with Store(ns._store._servers) as store:
            mine = store.namespace(ns.name, block_tokens=BLOCK, layers=2, token_bytes=64, ids=True)
            side = Side(mine, shared.address, Role.PREFILL)
            ended: list[BaseException] = []
            waits = threading.Event()

            def wait(side: Side = side, ended: list[BaseException] = ended, waits: threading.Event = waits) -> None:
                waits.set()
                try:
                    side.leader.wait(WAIT)
                except ClosedError as e:
                    ended.append(e)

            thread = threading.Thread(target=wait)
            thread.start()
            waits.wait()
            (store if close_store else side.leader).close()
            thread.join()
            assert len(ended) == 1
            assert side.leader.closed
            with pytest.raises(ClosedError):
                side.leader.drain()
            side.leader.close()


def test_the_descriptor_in_another_event_loop(cluster: Cluster) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(cluster.prefill.leader, selectors.EVENT_READ)
        selector.register(cluster.decode.leader, selectors.EVENT_READ)
        request = cluster.gateway.submit("r", PROMPT)
        attempts: dict[str, Attempt] = {}
        while len(attempts) < 2:
            ready = selector.select(WAIT)
            assert ready
            for key, _ in ready:
                leader: Any = key.fileobj
                for action in leader.drain():
                    assert action.kind == ActionKind.START
                    attempts[action.attempt.engine] = action.attempt
    for engine in ("prefill-0", "decode-0"):  # a request ends with its decode engine
        attempts[engine].done()
    cluster.until(request, EventKind.DONE)


def test_members(cluster: Cluster) -> None:
    leader = cluster.prefill.leader
    with pytest.raises(NotFoundError, match="another"):
        leader.remove("another")
    with pytest.raises(InvalidError, match="is a member"):
        leader.add(Member("prefill-0"))
    request = cluster.gateway.submit("r", PROMPT)
    first, second = cluster.start()
    leader.remove("prefill-0")
    assert cluster.prefill.next(ActionKind.END) is first
    assert cluster.decode.next(ActionKind.END) is second
    first.done("removed")
    second.done("given up")
    leader.add(Member("prefill-0"))
    for attempt in cluster.start():
        attempt.done()
    cluster.until(request, EventKind.DONE)


def test_bad_input(ns: Namespace, make: MakeNamespace, cluster: Cluster, shared: testing.Planner) -> None:
    def leader(planner: str = shared.address, **change: Any) -> None:
        Leader(ns, planner, **{"group": "g", "node": "n", "role": Role.DECODE, "members": [Member("e", 10)], **change})

    options: dict[str, dict[str, Any]] = {
        "no port": {"planner": "no port"},
        "group": {"group": ""},
        "zero character": {"group": "a\0b"},
        "DeviceBlocks": {"members": [Member("e")]},
        "twice": {"members": [Member("e", 1), Member("e", 1)]},
        "256": {"members": [Member("e", 1, b"a" * 256)]},
        "device_blocks": {"members": [Member("e", -1)]},
        "role": {"role": 3},
        "/no/such": {"ca_file": "/no/such"},
        "read_rate": {"read_rate": -1},
    }
    for word, change in options.items():
        with pytest.raises(InvalidError, match=word):
            leader(**change)
    with pytest.raises(TypeError, match="address"):
        leader(members=[Member("e", 1, "text")])  # type: ignore[arg-type]
    gateway = cluster.gateway
    wrong: dict[str, dict[str, Any]] = {
        "ID": {"id": ""},
        "tokens": {"tokens": [-1]},
        r"2\*\*32-1": {"tokens": [2**32]},
        "0 tokens": {"tokens": []},
        "give one or the other": {"tokens": PROMPT, "prompt": 3},
        "ids": {"prompt": 161, "ids": ns.chain(PROMPT)[:9]},
        "16 for each": {"prompt": 16, "ids": [b"short"]},
        "JSON": {"tokens": PROMPT, "extra": {1, 2}},
        "deadline": {"tokens": PROMPT, "deadline": 0},
        "holds": {"tokens": PROMPT, "resident": {"decode-0": 1000}},
    }
    for word, arguments in wrong.items():
        with pytest.raises(InvalidError, match=word):
            gateway.submit(**{"id": "r", **arguments})
    with pytest.raises(InvalidError, match="flat"):
        Gateway(make(flat=True), shared.address)
    with Gateway(ns, shared.address, requests_max=1) as one:
        one.submit("one", PROMPT)
        with pytest.raises(BusyError, match="requests_max"):
            one.submit("two", PROMPT)
        attempts = cluster.start()
    for side, attempt in zip((cluster.prefill, cluster.decode), attempts, strict=True):
        with pytest.raises(InvalidError, match="part"):
            attempt.progress((0, 1), 1, 0)
        with pytest.raises(InvalidError, match="intact"):
            attempt.done("failed", intact=1)
        side.next(ActionKind.END)
        attempt.done("given up")
    with pytest.raises(ClosedError):
        one.submit("three", PROMPT)


def test_an_interrupted_drain_loses_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: list[str] = []

    class Interrupting(Attempt):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if len(interrupted) < 2:
                interrupted.append(self.engine)
                raise KeyboardInterrupt

    monkeypatch.setattr(_cluster, "Attempt", Interrupting)
    request = cluster.gateway.submit("r", PROMPT)
    for side in (cluster.prefill, cluster.decode):
        with pytest.raises(KeyboardInterrupt):
            side.next(ActionKind.START)
    for attempt in cluster.start():
        attempt.done()
    assert interrupted == ["prefill-0", "decode-0"]
    cluster.until(request, EventKind.DONE)


def test_extra_that_python_cannot_decode(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an attempt fails, and later actions are taken. The text is valid JSON, which a gateway in Go accepts."""
    sides = (cluster.prefill, cluster.decode)
    extras = {"digits": "1" * 5000, "depth": "[" * 9000 + "]" * 9000}
    with contextlib.suppress(RecursionError):
        json.loads(extras["depth"])
        del extras["depth"]  # this Python decodes it
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", lambda extra: extra)
        for name, extra in extras.items():
            request = cluster.gateway.submit(name, PROMPT, extra=extra)
            while all(event.kind != EventKind.REPLANNED for event in cluster.gateway.wait(0.05)):
                for side in sides:
                    assert side.leader.wait(0.05) == []
            request.cancel()
            cluster.until(request, EventKind.FAILED)
    request = cluster.gateway.submit("later", PROMPT)
    attempts: list[Attempt] = []
    while len(attempts) < len(sides):
        for side in sides:
            attempts += [action.attempt for action in side.leader.wait(0.05)]
    for attempt in attempts:
        assert attempt.id == "later"
        attempt.done()
    cluster.until(request, EventKind.DONE)


def test_a_wrong_token(ns: Namespace) -> None:
    with testing.planner(block_tokens=BLOCK, token="the token of the planner") as p:
        with Gateway(ns, p.address, token="another token, of a client") as gateway:
            gateway.submit("r", PROMPT)
            events: list[Event] = []
            while not events or events[-1].kind != EventKind.FAILED:
                events += gateway.wait(WAIT)
            assert isinstance(events[-1].error, AuthError)
        logged = threading.Event()
        handler = logging.Handler()
        handler.emit = lambda record: logged.set() if "session with the planner" in record.getMessage() else None  # type: ignore[method-assign]
        logging.getLogger("penstock").addHandler(handler)
        try:
            with Leader(
                ns, p.address, group="wrong", node="n", role=Role.PREFILL, members=[Member("e")], token="another token, of a client"
            ):
                assert logged.wait(WAIT)
        finally:
            logging.getLogger("penstock").removeHandler(handler)
        with Gateway(ns, p.address, token="the token of the planner") as gateway:
            request = gateway.submit("r", PROMPT)
            kinds: list[EventKind] = []
            while EventKind.ACCEPTED not in kinds:
                kinds += [e.kind for e in gateway.wait(WAIT)]
            request.cancel()


def test_a_forked_child(run: Run, shared: testing.Planner) -> None:
    out = run(
        f"""
import os, sys, warnings
from penstock import ForkedError, Gateway, Leader, Member, Role
warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork in a process with threads
store = penstock.Store(NODE)
ns = store.namespace("forked", block_tokens=16, layers=2, token_bytes=64)
leader = Leader(ns, {shared.address!r}, group="g", node="n", role=Role.PREFILL, members=[Member("forked")])
gateway = Gateway(ns, {shared.address!r})
child = os.fork()
if child == 0:
    calls = [leader.drain, leader.wait, leader.fileno, gateway.drain]
    calls += [lambda: gateway.submit("r", [1]), lambda: leader.add(Member("b"))]
    for call in calls:
        try:
            call()
        except ForkedError:
            pass
        else:
            sys.exit(3)
    leader.close(); gateway.close(); store.close()
    del leader, gateway, ns, store
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert leader.drain() == gateway.drain() == []
leader.close(); gateway.close(); store.close()
print("the parent works")
"""
    )
    assert out == "the parent works\n"


def test_a_process_that_ends_without_closing(run: Run, shared: testing.Planner) -> None:
    run(
        f"""
import asyncio
from penstock import Gateway
store = penstock.Store(NODE)
gateway = Gateway(store.namespace("ends", block_tokens=16, layers=2, token_bytes=64), {shared.address!r})
gateway.submit("left open", [1])
async def main():
    async for event in gateway.serve("left open too", [1]):
        break
asyncio.run(main())
"""
    )

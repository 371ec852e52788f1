"""Tests of traffic managers: two engines in this process, over a real storage node."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeNamespace, Run, certificate

from penstock import (
    ActionKind,
    AuthError,
    BusyError,
    CanceledError,
    ClosedError,
    DecodeJob,
    EventKind,
    Gateway,
    InvalidError,
    Keys,
    Leader,
    Namespace,
    NotFoundError,
    Part,
    Pointers,
    PrefillJob,
    Role,
    Store,
    TimedOutError,
    Traffic,
    TransferEvent,
    TransferKind,
    UnavailableError,
    testing,
)

BLOCK, LAYERS, PAGES = 16, 2, 32
WAIT = 60  # the time limit of a wait, in seconds; only a defect reaches it
LAST = (TransferKind.FINISHED, TransferKind.FAILED)


class Side:
    """An engine: a Traffic, its device memory, in which the pages of a layer are contiguous, and its events."""

    def __init__(self, ns: Namespace, **options: Any) -> None:
        self.layer_bytes = ns.value_bytes // LAYERS
        self.memory = bytearray(ns.value_bytes * PAGES)
        bases = [layer * self.layer_bytes * PAGES for layer in range(LAYERS)]
        self.traffic = Traffic(ns, self.memory, bases, pages=PAGES, **{"buffer_bytes": 2 << 20, **options})
        self.waiting: list[TransferEvent] = []

    def page(self, layer: int, page: int) -> memoryview:
        start = (layer * PAGES + page) * self.layer_bytes
        return memoryview(self.memory)[start : start + self.layer_bytes]

    def block(self, page: int) -> bytes:
        return b"".join(bytes(self.page(layer, page)) for layer in range(LAYERS))

    def until(self, job: PrefillJob | DecodeJob, *kinds: TransferKind) -> TransferEvent:
        """Return the next event of a job of one of the kinds, except PROGRESS. It drops the events of other jobs."""
        while True:
            if not self.waiting:
                self.waiting = self.traffic.wait(WAIT)
                assert self.waiting, f"no event of {job} within {WAIT} s; want {kinds}"
            event = self.waiting.pop(0)
            if event.job is job and (event.kind != TransferKind.PROGRESS or TransferKind.PROGRESS in kinds):
                assert event.kind in kinds, event
                return event


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, ns: Namespace, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> None:
        self.ns = ns
        self.prefill, self.decode = Side(ns, **(prefill or {})), Side(ns, **(decode or {}))

    def begin(
        self, name: str, ids: Keys | list[bytes], blocks: int, hit: int = 0, split: int = 0, first: int = 0, persist: bool = True
    ) -> tuple[PrefillJob, DecodeJob]:
        """Begin both sides. Prefill reads the blocks before split, decode the others. Decode's pages begin with first."""
        peer = self.prefill.traffic
        d = self.decode.traffic.decode(
            name,
            ids,
            blocks=blocks,
            hit=hit,
            parts=[(split, hit)] if split < hit else [],
            pages=range(first, first + blocks),
            peer_address=peer.address,
            peer_token=peer.token,
            timeout=WAIT,
            persist=persist,
        )
        p = peer.prefill(name, ids, blocks=blocks, hit=hit, parts=[(0, split)] if split else [], timeout=WAIT)
        return p, d

    def close(self) -> None:
        self.prefill.traffic.close()
        self.decode.traffic.close()


def play(side: Side, p: PrefillJob | DecodeJob, values: list[bytes], pages: list[int]) -> None:
    """Compute the model's part: check the hit, and write the other blocks with the bytes of values."""
    assert isinstance(p, PrefillJob)
    first = side.until(p, TransferKind.LOADED).first_miss
    assert first == p.hit
    p.add_pages(pages)
    n = side.layer_bytes
    for layer in range(LAYERS):
        p.layer(layer, WAIT)
        for b, page in enumerate(pages):
            part = values[b][layer * n : (layer + 1) * n]
            if b < first:
                assert side.page(layer, page) == part
            else:
                side.page(layer, page)[:] = part
        p.computed(layer)
    p.finish()


def tokens(number: int, blocks: int) -> list[int]:
    return [number, *range(1, blocks * BLOCK)]


def values_of(ns: Namespace, number: int, blocks: int) -> list[bytes]:
    rng = random.Random(number)
    return [rng.randbytes(ns.value_bytes) for _ in range(blocks)]


@pytest.fixture
def ns(make: MakeNamespace) -> Namespace:
    return make(block_tokens=BLOCK, layers=LAYERS, ids=True)


@pytest.fixture
def pair(ns: Namespace) -> Iterator[Pair]:
    p = Pair(ns)
    yield p
    p.close()


def test_two_turns(pair: Pair) -> None:
    """A prompt is computed and stored. The next turn reads it on both sides, and appends to it."""
    ns, ids, values = pair.ns, pair.ns.chain(tokens(1, 9)), values_of(pair.ns, 1, 9)
    for turn, (blocks, hit, split) in enumerate(((5, 0, 0), (9, 5, 3))):
        p, d = pair.begin(f"turn {turn}", ids[: blocks - turn], blocks, hit, split)
        if turn:
            event = pair.decode.until(d, TransferKind.PROGRESS)
            assert event.part == Part(3, 5)
            assert 3 <= event.upto <= 5
            assert event.read <= 2 * ns.value_bytes
        pages = list(range(PAGES - 1, PAGES - 1 - blocks, -1))
        play(pair.prefill, p, values[:blocks], pages)
        pair.prefill.until(p, TransferKind.FINISHED)
        pair.decode.until(d, TransferKind.READY)
        assert [pair.decode.block(b) for b in range(blocks)] == values[:blocks]
        d.finish()
        pair.decode.until(d, TransferKind.FINISHED)
        stored = [bytearray(ns.value_bytes) for _ in range(blocks - turn)]
        assert ns.get(ids[: len(stored)], stored).ok == len(stored)
        assert stored == values[: len(stored)]
    for call in (p.finish, p.cut, d.cancel, lambda: p.add_pages([1]), lambda: d.read((0, 1))):
        call()  # no effect, and no error
    with pytest.raises(ClosedError):
        p.layer(0)
    pair.decode.traffic.append("turn 1", ids, 8, timeout=WAIT)
    pair.decode.traffic.settle(ids[8], WAIT)
    assert ns.match(ids).prefix == 9
    last = [bytearray(ns.value_bytes)]
    assert ns.get(ids, last, first=8).ok == 1
    assert last == [values[8]]


class Wire:
    """A TCP relay to a port of this host, which records the bytes in both directions."""

    def __init__(self, port: int, to: int) -> None:
        self.seen = bytearray()
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", port))
        self._threads = [threading.Thread(target=self._accept)]
        self._sockets: list[socket.socket] = []
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [here, there]
                for source, target in ((here, there), (there, here)):
                    self._threads.append(threading.Thread(target=self._relay, args=(source, target)))
                    self._threads[-1].start()

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for s in self._sockets:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for s in self._sockets:
            s.close()


def ports() -> list[int]:
    """Return two free ports."""
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        return [a.getsockname()[1], b.getsockname()[1]]


def test_tls(ns: Namespace, tmp_path: Path) -> None:
    """With TLS the KV between two engines is not on the wire in plaintext. Without TLS it is."""
    prefill = certificate(tmp_path, name="prefill")
    decode = certificate(tmp_path, name="decode", of=prefill)
    for i, options in enumerate(((None, None), (prefill, decode))):
        port, relay = ports()
        mine: dict[str, Any] = {"listen": f"127.0.0.1:{port}", "advertise": f"127.0.0.1:{relay}", **(options[0] or {})}
        pair, wire = Pair(ns, mine, options[1]), Wire(relay, port)
        assert pair.prefill.traffic.address.startswith(b"tls://") == bool(i)
        values, ids = values_of(ns, i, 5), ns.chain(tokens(i, 5))
        p, d = pair.begin("r", ids, 5)
        play(pair.prefill, p, values, list(range(5)))
        pair.prefill.until(p, TransferKind.FINISHED)
        pair.decode.until(d, TransferKind.READY)
        assert [pair.decode.block(b) for b in range(5)] == values
        d.finish()
        pair.decode.until(d, TransferKind.FINISHED)
        pair.close()
        wire.close()
        assert len(wire.seen) > 5 * ns.value_bytes
        assert [value[:64] in wire.seen for value in values] == [not i] * 5


def test_tls_refuses(ns: Namespace, tmp_path: Path) -> None:
    """An engine without TLS, or without a certificate of the CA, gets no KV."""
    good = certificate(tmp_path, name="good")
    other = {**certificate(tmp_path, name="other"), "ca_file": good["ca_file"]}
    for prefill, decode, error, text in (
        (good, None, AuthError, "requires TLS"),
        (None, good, AuthError, "has no TLS"),
        (good, other, UnavailableError, "unknown certificate authority"),
        (other, good, AuthError, "unknown authority"),
    ):
        pair = Pair(ns, prefill, decode)
        _, d = pair.begin("r", ns.chain(tokens(3, 2)), 2)
        event = pair.decode.until(d, TransferKind.FAILED)
        assert isinstance(event.error, error)
        assert text in str(event.error)
        pair.close()
    with pytest.raises(InvalidError, match="key_file"):
        Side(ns, ca_file=good["ca_file"], cert_file=good["cert_file"])


def test_chunks(pair: Pair) -> None:
    """A prompt that is computed in chunks, whose pages are added with the chunks, and that is not stored."""
    values, ids = values_of(pair.ns, 2, 6), pair.ns.chain(tokens(2, 6))
    p, d = pair.begin("chunks", ids, 6, persist=False)
    pair.prefill.until(p, TransferKind.LOADED)
    n = pair.prefill.layer_bytes
    for start, end in ((0, 2), (2, 5), (5, 6)):
        p.add_pages(range(start, end))
        for layer in range(LAYERS):
            p.layer(layer)
            for b in range(start, end):
                pair.prefill.page(layer, b)[:] = values[b][layer * n : (layer + 1) * n]
            p.computed(layer, end)
    p.finish()
    pair.prefill.until(p, TransferKind.FINISHED)
    pair.decode.until(d, TransferKind.READY)
    assert [pair.decode.block(b) for b in range(6)] == values
    d.finish()
    pair.decode.until(d, TransferKind.FINISHED)
    assert pair.ns.match(ids).prefix == 0


def test_many_requests_at_once(pair: Pair) -> None:
    """The requests share the session of the two engines, and each ends or fails independently."""
    jobs = []
    for i in range(8):
        jobs.append(pair.begin(f"r{i}", pair.ns.chain(tokens(100 + i, 3)), 3, first=3 * i))
    ends: dict[str, TransferEvent] = {}

    def engine(side: Side, of: int) -> None:
        left = len(jobs)
        while left:
            for event in side.traffic.wait(WAIT):
                job, i = event.job, int(event.job.request[1:])
                if event.kind == TransferKind.LOADED:
                    assert isinstance(job, PrefillJob)
                    if i == 3:
                        job.cancel()
                        continue
                    job.add_pages(range(3 * i, 3 * i + 3))
                    n = side.layer_bytes
                    for layer in range(LAYERS):
                        for b, value in enumerate(values_of(pair.ns, i, 3)):
                            side.page(layer, 3 * i + b)[:] = value[layer * n : (layer + 1) * n]
                        job.computed(layer)
                    job.finish()
                elif event.kind == TransferKind.READY:
                    assert [side.block(3 * i + b) for b in range(3)] == values_of(pair.ns, i, 3)
                    job.finish()
                elif event.kind in LAST:
                    assert f"{of} {job.request}" not in ends
                    ends[f"{of} {job.request}"] = event
                    left -= 1

    threads = [threading.Thread(target=engine, args=(side, of)) for of, side in enumerate((pair.prefill, pair.decode))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 2 * len(jobs)
    assert sorted(name for name, e in ends.items() if e.kind == TransferKind.FAILED) == ["0 r3", "1 r3"]
    assert isinstance(ends["0 r3"].error, CanceledError)


def test_a_block_that_storage_does_not_have(pair: Pair) -> None:
    """The reads stop, and the model computes the blocks."""
    ns = pair.ns
    ids, values = ns.chain(tokens(3, 4)), values_of(ns, 3, 4)
    assert ns.put(ids[:2], values[:2]).ok == 2
    p, d = pair.begin("r", ids, 4, hit=4, split=1)
    event = pair.decode.until(d, TransferKind.STOPPED)
    assert (event.part, event.upto, event.gone) == (Part(1, 4), 2, True)
    assert event.reason
    p.recompute((2, 4))
    assert pair.prefill.until(p, TransferKind.LOADED).first_miss == 2
    p.add_pages(range(4))
    n = pair.prefill.layer_bytes
    for layer in range(LAYERS):
        p.layer(layer)
        for b in (2, 3):
            pair.prefill.page(layer, b)[:] = values[b][layer * n : (layer + 1) * n]
        p.computed(layer)
    p.finish()
    pair.prefill.until(p, TransferKind.FINISHED)
    pair.decode.until(d, TransferKind.READY)
    assert [pair.decode.block(b) for b in range(4)] == values
    d.finish()
    pair.decode.until(d, TransferKind.FINISHED)
    assert ns.match(ids).prefix == 4


def test_ends(pair: Pair) -> None:
    """Cancel on either side, a time limit, an engine that does not answer, and one that is closed."""
    ids = pair.ns.chain(tokens(4, 2))
    for side in range(2):
        jobs = pair.begin(f"cancelled {side}", ids, 2)
        pair.prefill.until(jobs[0], TransferKind.LOADED)  # the two sides are connected
        jobs[side].cancel()
        for event in (pair.prefill.until(jobs[0], TransferKind.FAILED), pair.decode.until(jobs[1], TransferKind.FAILED)):
            assert isinstance(event.error, CanceledError)
            assert event.intact == 0
    late = pair.prefill.traffic.prefill("late", ids, blocks=2, timeout=0.05)
    with pytest.raises(CanceledError, match="late"):
        late.layer(0)
    assert isinstance(pair.prefill.until(late, TransferKind.FAILED).error, TimedOutError)
    waits = pair.prefill.traffic.prefill("waits", ids, blocks=2)
    with pytest.raises(TimedOutError):
        waits.layer(0, timeout=0.05)
    waits.cancel()
    peer = pair.prefill.traffic
    alone = pair.decode.traffic.decode("r", ids, blocks=2, pages=[0, 1], peer_address=b"127.0.0.1:1", peer_token=peer.token, timeout=WAIT)
    assert isinstance(pair.decode.until(alone, TransferKind.FAILED).error, UnavailableError)
    _, d = pair.begin("closed", ids, 2)
    pair.prefill.until(pair.prefill.traffic.prefill("other", ids, blocks=2, timeout=0.01), TransferKind.FAILED)
    peer.close()
    assert pair.decode.until(d, TransferKind.FAILED).error is not None


def test_a_whole_cluster(ns: Namespace) -> None:
    """Traffic managers perform a planner's orders: the second request finds the blocks of the first one."""
    prompt, values = tokens(5, 6), values_of(ns, 5, 6)
    with testing.planner(block_tokens=BLOCK) as planner:
        sides = {"prefill": Side(ns), "decode": Side(ns)}
        leaders = {
            name: Leader(ns, planner.address, group=name, node=name, role=role, members=[side.traffic.member(name, device_blocks=PAGES)])
            for (name, side), role in zip(sides.items(), (Role.PREFILL, Role.DECODE), strict=True)
        }
        gateway = Gateway(ns, planner.address)
        for turn, blocks in enumerate((4, 6)):
            request = gateway.submit(f"turn {turn}", prompt[: blocks * BLOCK])
            attempts = {}
            for name in sides:
                [action] = leaders[name].wait(WAIT)
                assert action.kind == ActionKind.START
                attempts[name] = action.attempt
            a, b = attempts["prefill"], attempts["decode"]
            assert a.hit == (0, 4)[turn]
            p = sides["prefill"].traffic.prefill(a.name, a.ids, blocks=blocks, hit=a.hit, parts=a.parts, epoch=a.epoch, timeout=WAIT)
            d = sides["decode"].traffic.decode(
                b.name,
                b.ids,
                blocks=blocks,
                pages=range(blocks),
                hit=b.hit,
                parts=b.parts,
                epoch=b.epoch,
                timeout=WAIT,
                peer_address=b.peer_address,
                peer_token=b.peer_token,
            )
            events: list[TransferEvent] = []
            while not events or events[-1].kind not in LAST:
                for event in sides["prefill"].traffic.wait(WAIT):
                    events.append(event)
                    if event.kind == TransferKind.LOADED:  # PROGRESS may follow it
                        sides["prefill"].waiting = [event]
                        play(sides["prefill"], p, values[:blocks], list(range(blocks)))
            assert events[-1].kind == TransferKind.FINISHED
            for event in events:
                if event.part is not None:
                    a.progress(event.part, event.upto, event.read)
            a.done()
            sides["decode"].until(d, TransferKind.READY)
            assert [sides["decode"].block(page) for page in range(blocks)] == values[:blocks]
            d.finish()
            sides["decode"].until(d, TransferKind.FINISHED)
            b.done()
            kinds: list[EventKind] = []
            while EventKind.DONE not in kinds:
                kinds += [e.kind for e in gateway.wait(WAIT) if e.request is request]
        gateway.close()
        [sent], [received] = sides["prefill"].traffic.nics(), sides["decode"].traffic.nics()
        assert received.bytes_in >= 5 * ns.value_bytes  # decode has read the rest of the second prompt
        assert sent.bytes_out >= received.bytes_in
        for name, side in sides.items():
            leaders[name].report_nics(name, side.traffic.nics())
            leaders[name].report_nics(name, [])
            with pytest.raises(NotFoundError, match="another"):
                leaders[name].report_nics("another", side.traffic.nics())
            with pytest.raises(InvalidError, match="65 NICs"):
                leaders[name].report_nics(name, 65 * side.traffic.nics())
            with pytest.raises(InvalidError, match="bytes_in"):
                leaders[name].report_nics(name, [sent._replace(bytes_in=-1)])
            leaders[name].close()
            side.traffic.close()


def test_asyncio(pair: Pair) -> None:
    values = values_of(pair.ns, 6, 3)

    async def prefill() -> list[TransferKind]:
        kinds = []
        async for event in pair.prefill.traffic:
            kinds.append(event.kind)
            if event.kind == TransferKind.LOADED:
                pair.prefill.waiting = [event]
                await asyncio.get_running_loop().run_in_executor(None, play, pair.prefill, event.job, values, [0, 1, 2])
            elif event.kind in LAST:
                break
        return kinds

    async def decode() -> list[TransferKind]:
        kinds = []
        async for event in pair.decode.traffic:
            kinds.append(event.kind)
            if event.kind == TransferKind.READY:
                event.job.finish()
            elif event.kind in LAST:
                break
        return kinds

    async def main() -> None:
        pair.begin("r", pair.ns.chain(tokens(6, 3)), 3)
        kinds = await asyncio.gather(prefill(), decode())
        assert kinds[0] == [TransferKind.LOADED, TransferKind.FINISHED]
        assert kinds[1] == [TransferKind.READY, TransferKind.FINISHED]

    asyncio.run(main())
    assert [pair.decode.block(b) for b in range(3)] == values


def test_closing_wakes_waiters(ns: Namespace) -> None:
    """Closing the traffic manager, or its store, ends a wait and a layer in other threads."""
    for close_store in (False, True):
        with Store(ns._store._servers) as store:
            mine = store.namespace(ns.name, block_tokens=BLOCK, layers=LAYERS, token_bytes=64, ids=True)
            side = Side(mine)
            job = side.traffic.prefill("r", [], blocks=1)
            raised: list[BaseException] = []
            waits = threading.Barrier(3)

            def wait(call: Any, raised: list[BaseException] = raised, waits: threading.Barrier = waits) -> None:
                waits.wait()
                try:
                    call()
                except (ClosedError, CanceledError) as e:
                    raised.append(e)

            threads = [threading.Thread(target=wait, args=(call,)) for call in (lambda job=job: job.layer(0), side.traffic.wait)]
            for thread in threads:
                thread.start()
            waits.wait()
            (store if close_store else side.traffic).close()
            for thread in threads:
                thread.join()
            assert len(raised) == 2
            assert side.traffic.closed
            with pytest.raises(ClosedError):
                side.traffic.settle(bytes(16))
            side.traffic.close()
            side.memory.clear()  # its export has ended


def test_memory(ns: Namespace) -> None:
    """Device memory is not moved while the Traffic is open, and may be an address."""
    side = Side(ns)
    with pytest.raises(BufferError):
        side.memory.clear()
    side.traffic.close()
    side.memory.clear()
    memory = (ctypes.c_uint8 * (4 * ns.value_bytes))()
    pointers = Pointers([ctypes.addressof(memory)], [len(memory)], keep=memory)
    token = b"16 bytes at least"
    # All layers of a page are adjacent.
    with Traffic(ns, pointers, [0, ns.value_bytes // 2], stride=ns.value_bytes, pages=4, buffer_bytes=1, token=token) as traffic:
        assert traffic.token == token
        member = traffic.member("m", device_blocks=4, prompt_blocks=3)
        assert (member.name, member.device_blocks, member.prompt_blocks) == ("m", 4, 3)
        assert (member.address, member.token) == (traffic.address, token)
        assert (member.block_bytes, member.sums_bytes) == (ns.value_bytes, 8 * LAYERS)
        assert member.buffer_bytes > 0
        assert member.request_bytes > 0
        ctypes.memmove(memory, bytes(range(256)) * (len(memory) // 256), len(memory))
        ids = ns.chain(tokens(7, 1))
        traffic.append("r", ids, 3)
        traffic.settle(ids[0])
        into = [bytearray(ns.value_bytes)]
        assert ns.get(ids, into).ok == 1
        assert into[0] == bytes(memory)[3 * ns.value_bytes :]


def test_bad_input(pair: Pair, make: MakeNamespace) -> None:
    ns = pair.ns
    memory = bytearray(PAGES * ns.value_bytes)

    def opened(of: Namespace = ns, memory: Any = memory, bases: Any = (0, PAGES * ns.value_bytes // LAYERS), **change: Any) -> None:
        Traffic(of, memory, bases, **{"buffer_bytes": 1 << 20, **change})

    options: dict[str, dict[str, Any]] = {
        "BufferBytes": {"buffer_bytes": 0},
        "buffer_bytes": {"buffer_bytes": -1},
        "a layer": {"bases": []},
        "overlap": {"bases": [0, 0]},
        "bases": {"bases": [-1]},
        "device pages": {"pages": PAGES + 1},
        "every 1 bytes": {"stride": 1},
        "contiguous": {"memory": bytes(8)},
        "one": {"memory": Pointers([1, 2], [1, 1])},
        "token": {"token": b"short"},
        "300 bytes": {"token": bytes(300)},
        "no port": {"listen": "no port"},
        "verify: 'never'": {"verify": "never"},
        "verify: 'one-in-1'": {"verify": "one-in-1"},
        "zero character": {"listen": "a\0b"},
        "flat": {"of": make(flat=True, ids=True)},
        "not block ids": {"of": make()},
    }
    for word, change in options.items():
        with pytest.raises(InvalidError, match=word):
            opened(**change)
    with pytest.raises(TypeError):
        opened(memory=3)
    memory.clear()  # it is not exported after an error
    ids = ns.chain(tokens(8, 4))
    job: dict[str, Any] = {"request": "r", "ids": ids, "blocks": 4, "hit": 2, "pages": range(4)}
    wrong: dict[str, dict[str, Any]] = {
        "without a request": {"request": ""},
        "zero character": {"request": "a\0b"},
        "name of 1025": {"request": "n" * 1025},
        "prompt of 0 blocks": {"blocks": 0},
        "cached blocks": {"hit": 5},
        "block ids": {"ids": ids[:1]},
        "16 for each": {"ids": [b"short"]},
        "part": {"parts": [(0, 3)]},
        "pages": {"pages": range(5)},
        "page 32": {"pages": [0, 1, 2, PAGES]},
        "pages: ": {"pages": [-1]},
        "the buffer has": {"blocks": 8192, "hit": 8192, "ids": [bytes(16)] * 8192, "pages": [0] * 8192, "parts": [(0, 8192)]},
        "timeout": {"timeout": 0},
    }
    peer: dict[str, Any] = {"peer_address": pair.prefill.traffic.address, "peer_token": pair.prefill.traffic.token}
    for word, change in wrong.items():
        with pytest.raises(InvalidError, match=word):
            pair.prefill.traffic.prefill(**{**job, **change})
        with pytest.raises(InvalidError, match=word):
            pair.decode.traffic.decode(**{**job, **peer, **change})
    for word, change in {"address": {"peer_address": b""}, "token": {"peer_token": b"short"}}.items():
        with pytest.raises(InvalidError, match=word):
            pair.decode.traffic.decode(**{**job, **peer, **change})
    p = pair.prefill.traffic.prefill("r", ids, blocks=4, hit=2)
    with pytest.raises(InvalidError, match="under way"):
        pair.prefill.traffic.prefill("r", ids, blocks=4, hit=2)
    calls: dict[str, Any] = {
        r"\[1, 3\)": lambda: p.read((1, 3)),
        r"\[2, 4\)": lambda: p.recompute((2, 4)),
        "5 device pages": lambda: p.add_pages(range(5)),
        "page 32": lambda: p.add_pages([PAGES]),
        "layer 2 of 2": lambda: p.computed(2),
        "layer 3 of 2": lambda: p.layer(3),
        "block 5 of 4": lambda: p.computed(0, 5),
        "has device pages of 0": lambda: p.computed(0),
        "16": lambda: pair.prefill.traffic.settle(b"short"),
        "ids": lambda: pair.prefill.traffic.append("r", [], 0),
        "page 33": lambda: pair.prefill.traffic.append("r", ids, PAGES + 1),
    }
    for word, call in calls.items():
        with pytest.raises(InvalidError, match=word):
            call()
    p.cancel()
    pair.prefill.until(p, TransferKind.FAILED)
    one = Side(ns, transfers_max=1)
    one.traffic.prefill("one", [], blocks=1)
    with pytest.raises(BusyError, match="transfers_max"):
        one.traffic.prefill("two", [], blocks=1)
    one.traffic.close()
    with pytest.raises(ClosedError):
        one.traffic.prefill("three", [], blocks=1)


def test_a_forked_child(run: Run) -> None:
    out = run(
        """
import os, sys, warnings
from penstock import ForkedError, Traffic
warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork in a process with threads
store = penstock.Store(NODE)
ns = store.namespace("forked.traffic", block_tokens=16, layers=1, token_bytes=64, ids=True)
memory = bytearray(4 * ns.value_bytes)
traffic = Traffic(ns, memory, [0], buffer_bytes=1 << 20)
job = traffic.prefill("r", [], blocks=1)
child = os.fork()
if child == 0:
    calls = [traffic.drain, traffic.wait, traffic.fileno, job.cut, job.finish, lambda: job.layer(0), lambda: job.add_pages([0])]
    calls += [lambda: traffic.prefill("s", [], blocks=1), lambda: traffic.settle(bytes(16)), lambda: traffic.append("r", [bytes(16)], 0)]
    for call in calls:
        try:
            call()
        except ForkedError:
            pass
        else:
            sys.exit(3)
    traffic.close(); store.close()
    del traffic, job, ns, store
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
job.cancel()
[event] = traffic.wait()
assert event.job is job and event.error is not None
traffic.close(); store.close()
print("the parent works")
"""
    )
    assert out == "the parent works\n"


def test_a_process_that_ends_without_closing(run: Run) -> None:
    run(
        """
from penstock import Traffic
store = penstock.Store(NODE)
ns = store.namespace("ends.traffic", block_tokens=16, layers=1, token_bytes=64, ids=True)
traffic = Traffic(ns, bytearray(4 * ns.value_bytes), [0], buffer_bytes=1 << 20)
job = traffic.prefill("left open", [], blocks=1)
"""
    )

"""The contract of LMCache's native_plugin adapter: on the client alone, and under LMCache's own wrapper of it."""

from __future__ import annotations

import collections
import ctypes
import gc
import inspect
import itertools
import os
import select
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from harness.faults import damage

from penstock import InvalidError, Store
from penstock import testing as penstock_testing
from penstock.lmcache import PenstockL2

# Only what hangs takes so long.
TIMEOUT = 60

Completion = tuple[int, bool, str, list[bool]]
Make = Callable[..., PenstockL2]


@pytest.fixture
def make(node: penstock_testing.Node) -> Iterator[Make]:
    """Makes clients on the node, and closes them."""
    clients = []

    def of(**adapter_params: Any) -> PenstockL2:
        client = PenstockL2(**{"servers": node.address, "retry_interval": 0.1, **adapter_params})
        clients.append(client)
        return client

    yield of
    for client in clients:
        client.close()


def readable(fd: int, timeout: float = 0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def collect(client: PenstockL2, *numbers: int) -> list[Completion]:
    """Wait for the completions of these operations and return them in this order. No other may come."""
    found: dict[int, Completion] = {}
    while len(found) < len(numbers):
        assert readable(client.event_fd(), TIMEOUT), f"of {numbers} only {sorted(found)} completed"
        for completion in client.drain_completions():
            number, ok, error, done = completion
            assert type(number) is int
            assert type(ok) is bool
            assert type(error) is str
            assert all(type(bit) is bool for bit in done)
            assert number in numbers
            assert number not in found
            found[number] = completion
    return [found[number] for number in numbers]


def outcome(client: PenstockL2, number: int) -> tuple[bool, list[bool]]:
    """Wait for one operation and return whether it succeeded, and its bools."""
    [(_, ok, error, done)] = collect(client, number)
    assert ok is not bool(error)
    return ok, done


def content(seed: int, length: int) -> bytearray:
    """Bytes that differ for each seed, and between the layers of a value."""
    period = bytes((seed * 31 + i * (7 + seed // 251)) % 251 for i in range(251))
    return bytearray((period * (length // 251 + 1))[:length])


def views(values: Sequence[Any]) -> list[memoryview]:
    return [memoryview(value) for value in values]


# -- the client alone


def test_lengths(make: Make) -> None:
    """One batch has objects of several lengths, and each operation has its exact list."""
    client = make()
    keys = [f"model@00000001@0@{i:x}" for i in range(5)]
    values = [content(i, length) for i, length in enumerate((4096, 8192, 4096, 3 << 20, 7))]
    assert outcome(client, client.submit_batch_exists(keys)) == (True, [False] * 5)
    assert outcome(client, client.submit_batch_set(keys[:4], views(values[:4]))) == (True, [True] * 4)
    assert outcome(client, client.submit_batch_set(keys, views(values))) == (True, [True] * 5)  # four are stored already
    assert outcome(client, client.submit_batch_exists([*keys, "other"])) == (True, [True] * 5 + [False])
    rooms = [bytearray(len(value)) for value in values]
    assert outcome(client, client.submit_batch_get(keys, views(rooms))) == (True, [True] * 5)
    assert rooms == values
    assert outcome(client, client.submit_batch_delete([keys[1], "other", keys[4]])) == (True, [True, False, True])
    assert outcome(client, client.submit_batch_exists(keys)) == (True, [True, False, True, True, False])


def test_part_of_a_batch(make: Make) -> None:
    """A get that finds some keys reports these, and leaves the memory of the others alone."""
    client = make()
    outcome(client, client.submit_batch_set(["a", "c"], views([content(1, 4096), content(3, 4096)])))
    rooms = [bytearray(b"\xee" * 4096) for _ in range(4)]
    number = client.submit_batch_get(["a", "b", "c", "d"], views(rooms))
    [(_, ok, error, done)] = collect(client, number)
    assert (ok, done) == (False, [True, False, True, False])
    assert error == "MISS (2 of 4 keys)"
    assert rooms[0] == content(1, 4096)
    assert rooms[2] == content(3, 4096)
    assert rooms[1] == rooms[3] == b"\xee" * 4096


def test_another_length_than_stored(make: Make) -> None:
    """A padded length is another length: a miss, never a short read."""
    client = make()
    outcome(client, client.submit_batch_set(["a", "p"], views([content(1, 5000), content(2, 8192)])))
    room = bytearray(b"\xee" * 8192)
    assert outcome(client, client.submit_batch_get(["a"], views([room]))) == (False, [False])
    assert outcome(client, client.submit_batch_get(["a"], views([bytearray(4096)]))) == (False, [False])
    assert room == b"\xee" * 8192
    assert outcome(client, client.submit_batch_set(["a"], views([content(3, 8192)]))) == (True, [True])
    assert outcome(client, client.submit_batch_get(["a"], views([room]))) == (True, [True])
    assert room == content(3, 8192)
    # Both are one key to a deletion.
    assert outcome(client, client.submit_batch_delete(["a"])) == (True, [True])
    assert outcome(client, client.submit_batch_get(["a"], views([bytearray(5000)]))) == (False, [False])


def test_numbers_and_lists(make: Make) -> None:
    """Numbers are unlike each other over all kinds of operations, and each operation has a list, the empty one too."""
    client = make()
    rounds = [
        (
            client.submit_batch_set([f"k{i}"], views([content(i, 4096)])),
            client.submit_batch_exists([f"k{i}"]),
            client.submit_batch_get([f"k{i}"], views([bytearray(4096)])),
            client.submit_batch_delete([f"k{i}"]),
            client.submit_batch_exists([]),
            client.submit_batch_set([], []),
        )
        for i in range(20)
    ]
    numbers = [number for numbers in rounds for number in numbers]
    assert len(set(numbers)) == len(numbers)
    for (_, _, _, done), length in zip(collect(client, *numbers), itertools.cycle([1, 1, 1, 1, 0, 0]), strict=False):
        assert len(done) == length


def test_nothing_to_drain(make: Make) -> None:
    client = make()
    assert client.drain_completions() == []
    assert not readable(client.event_fd())
    outcome(client, client.submit_batch_exists(["a"]))
    client.drain_completions()
    assert not readable(client.event_fd())
    assert client.drain_completions() == []


def test_two_clients_have_their_own_completions(make: Make) -> None:
    one, two = make(), make()
    assert one.event_fd() != two.event_fd()
    number = one.submit_batch_set(["a"], views([content(1, 4096)]))
    assert readable(one.event_fd(), TIMEOUT)
    assert two.drain_completions() == []
    collect(one, number)
    # The other one finds a length that it has not seen, also where it has looked before.
    assert outcome(two, two.submit_batch_exists(["a"])) == (True, [True])
    outcome(one, one.submit_batch_set(["b"], views([content(2, 5000)])))
    assert outcome(two, two.submit_batch_exists(["a", "b"])) == (True, [True, True])
    room = bytearray(5000)
    assert outcome(two, two.submit_batch_get(["b"], views([room]))) == (True, [True])
    assert room == content(2, 5000)


def test_lookups_at_once_of_a_new_length(make: Make) -> None:
    """Each lookup finds a length that another process has stored, also when a lookup beside it has just found the length."""
    one, two = make(), make()
    outcome(two, two.submit_batch_exists(["a"]))
    for length in range(4096, 4096 + 20):
        key = f"key {length}"
        outcome(one, one.submit_batch_set([key], views([content(1, length)])))
        numbers: list[int] = []
        found: dict[int, list[bool]] = {}
        while len(found) < 64:  # some are submitted before the length is found, and answered after that
            if len(numbers) < 64:
                numbers.append(two.submit_batch_exists([key]))
            found.update({number: done for number, _, _, done in two.drain_completions()})
        assert found == {number: [True] for number in numbers}


def test_keys(make: Make) -> None:
    """Keys are opaque: the forms of all releases, salted and not, any characters, up to 256 bytes."""
    client = make()
    forms = ["m/x@00010001@abcd", "m/x@00010001@abcd@salt", "m/x@00010001@0@abcd", "m/x@00010001@0@abcd@salt"]
    odd = ["é" * 128, "a b\n\t\0", "x" * 256]
    keys = forms + odd
    values = [content(i, 4096) for i in range(len(keys))]
    assert outcome(client, client.submit_batch_set(keys, views(values))) == (True, [True] * len(keys))
    rooms = [bytearray(4096) for _ in keys]
    assert outcome(client, client.submit_batch_get(keys, views(rooms))) == (True, [True] * len(keys))
    assert rooms == values


def test_keys_too_long(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Such a key is refused by itself, counted each time, and reported once in the log."""
    client = make()
    keys = ["good", "x" * 257, "é" * 129, ""]
    values = [content(i, 4096) for i in range(4)]
    [(_, ok, error, done)] = collect(client, client.submit_batch_set(keys, views(values)))
    assert (ok, done) == (False, [True, False, False, False])
    assert "a key of 257 bytes; want 1 to 256 (1 of 4 keys)" in error
    assert outcome(client, client.submit_batch_exists(keys)) == (True, [True, False, False, False])
    assert outcome(client, client.submit_batch_get(keys, views(bytearray(4096) for _ in keys)))[1] == [True, False, False, False]  # type: ignore[arg-type]
    assert outcome(client, client.submit_batch_delete(keys)) == (True, [True, False, False, False])
    assert client.counters["keys_refused"] == 12
    assert len([m for m in caplog.messages if "want 1 to 256" in m]) == 1


@pytest.mark.parametrize(
    ("bufs", "error"),
    [
        ([], "0 buffers for 1 keys"),
        ([b"read-only"], "writable"),
        ([bytearray(0)], "MISS"),
        ([None], "NoneType"),
    ],
)
def test_bad_buffers(make: Make, bufs: list[Any], error: str) -> None:
    """What LMCache should not pass is a failure of the operation: an exception under its lock would end its thread."""
    client = make()
    outcome(client, client.submit_batch_set(["a"], views([content(1, 9)])))
    [(_, ok, text, done)] = collect(client, client.submit_batch_get(["a"], bufs))
    assert (ok, done) == (False, [False])
    assert error in text


def test_bad_keys(make: Make) -> None:
    client = make()
    [(_, ok, _, done)] = collect(client, client.submit_batch_exists([None, "a"]))  # type: ignore[list-item]
    assert (ok, done) == (False, [False, False])


def test_types_are_not_made_per_call(make: Make) -> None:
    """ctypes keeps each array type for ever, so a transfer must not make one of its length."""
    client = make()

    def arrays() -> int:
        return len(ctypes.Array.__subclasses__())

    outcome(client, client.submit_batch_set(["first"], views([content(0, 64)])))
    before = arrays()
    values = [content(i, 64 + i) for i in range(20)]
    outcome(client, client.submit_batch_set([f"k{i}" for i in range(20)], views(values)))
    assert arrays() == before


def test_submit_never_waits(make: Make, node: penstock_testing.Node) -> None:
    """While the node is stopped each submit returns, before its operation is complete; and the memory is held."""
    client = make(timeout=29)
    outcome(client, client.submit_batch_set(["a"], views([content(1, 4096)])))
    room = (ctypes.c_ubyte * 4096)()
    held = weakref.ref(room)
    node.pause()
    numbers = [
        client.submit_batch_get(["a"], [memoryview(room)]),
        client.submit_batch_set(["b"], views([content(2, 4096)])),
        client.submit_batch_set(["c"], views([content(2, 5000)])),  # a new length, whose namespace is made first
        client.submit_batch_exists(["a"]),
        client.submit_batch_delete(["d"]),
    ]
    assert client.drain_completions() == []
    del room
    gc.collect()
    assert held() is not None
    node.resume()
    assert [done for _, _, _, done in collect(client, *numbers)] == [[True], [True], [True], [True], [False]]
    gc.collect()
    assert held() is None


def test_each_completion_once(make: Make) -> None:
    """Many threads submit while several drain, as after a fork of LMCache's threads: each operation completes once."""
    client = make()
    submitted: list[int] = []
    drained: list[int] = []
    wrong: list[str] = []
    want = 8 * 25
    done = threading.Event()
    lock = threading.Lock()

    def submit(thread: int) -> None:
        for i in range(25):
            key, value = f"{thread}/{i}", content(thread * 25 + i, 4096 + 16 * (i % 3))
            if i % 3 == 0:
                number = client.submit_batch_set([key], views([value]))
            elif i % 3 == 1:
                number = client.submit_batch_exists([key])
            else:
                number = client.submit_batch_get([key, "x" * 300], views([bytearray(4096), bytearray(1)]))
            with lock:
                submitted.append(number)

    def drain() -> None:
        while not done.is_set():
            if not readable(client.event_fd(), TIMEOUT):
                wrong.append("no completion")
                done.set()
            batch = [completion[0] for completion in client.drain_completions()]
            with lock:
                drained.extend(batch)
                if len(drained) >= want:
                    done.set()
                    os.eventfd_write(client._wake, 1)  # for the other thread

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(8)] + [threading.Thread(target=drain) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert collections.Counter(drained) == collections.Counter(submitted)


def test_close_with_operations_under_way(make: Make, node: penstock_testing.Node) -> None:
    """When close returns no buffer is touched or held, and each running operation has failed once."""
    client = make()
    outcome(client, client.submit_batch_set(["a"], views([content(1, 4096)])))
    rooms = [(ctypes.c_ubyte * 4096)() for _ in range(4)]
    held = [weakref.ref(room) for room in rooms]
    node.pause()
    numbers = [client.submit_batch_get(["a"], [memoryview(room)]) for room in rooms[:3]]
    numbers.append(client.submit_batch_set(["n"], [memoryview(rooms[3])]))
    numbers.append(client.submit_batch_set(["l"], views([content(1, 5001)])))  # still with the worker
    numbers.append(client.submit_batch_exists(["a"]))
    others = [threading.Thread(target=client.close) for _ in range(3)]
    for thread in others:
        thread.start()
    client.close()
    for thread in others:
        thread.join()
    completions = client.drain_completions()
    assert sorted(number for number, _, _, _ in completions) == sorted(numbers)
    assert all((ok, done) == (False, [False]) for _, ok, _, done in completions)
    assert client.drain_completions() == []
    for room in rooms:
        ctypes.memset(room, 0xEE, 4096)
    node.resume()
    with Store(node.address) as other:  # a whole exchange with the node, after which late bytes would have come
        other.namespace("after", block_tokens=1, layers=1, token_bytes=8).match(["k"])
    assert all(bytes(room) == b"\xee" * 4096 for room in rooms)
    del rooms, room
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
    client.close()
    with pytest.raises(Exception, match="the adapter is closed"):
        client.submit_batch_exists(["a"])


def test_close_while_the_first_lookup_waits(make: Make, node: penstock_testing.Node) -> None:
    node.pause()
    client = make(connect_timeout=0.2)
    number = client.submit_batch_exists(["a"])
    client.close()
    assert [(n, ok) for n, ok, _, _ in client.drain_completions()] == [(number, False)]
    node.resume()


def test_restart_of_the_process_and_the_node(make: Make, node: penstock_testing.Node) -> None:
    """Another client finds what the first one stored, lengths included, after the node was started again."""
    first = make()
    values = [content(1, 4096), content(2, 100_000)]
    outcome(first, first.submit_batch_set(["a", "b"], views(values)))
    first.close()
    node.stop()
    node.start()
    second = make()
    assert outcome(second, second.submit_batch_exists(["a", "b", "c"])) == (True, [True, True, False])
    rooms = [bytearray(4096), bytearray(100_000)]
    assert outcome(second, second.submit_batch_get(["a", "b"], views(rooms))) == (True, [True, True])
    assert rooms == values
    # A deletion may be the first thing that a process does.
    third = make()
    assert outcome(third, third.submit_batch_delete(["b", "c"])) == (True, [True, False])


def test_namespace_parts_objects(make: Make) -> None:
    one, two = make(namespace="lmcache/bf16"), make(namespace="lmcache/fp8")
    outcome(one, one.submit_batch_set(["a"], views([content(1, 4096)])))
    assert outcome(two, two.submit_batch_exists(["a"])) == (True, [False])


def test_more_lengths_than_a_namespace_takes(make: Make) -> None:
    client = make()
    for length in range(100, 164):
        outcome(client, client.submit_batch_set([f"{length}"], views([content(1, length)])))
    [(_, ok, error, _)] = collect(client, client.submit_batch_set(["more"], views([content(1, 164)])))
    assert not ok
    assert "objects of 164 bytes" in error
    assert "64 other lengths" in error
    other = make()
    keys = [str(length) for length in range(100, 165)]
    assert outcome(other, other.submit_batch_exists(keys)) == (True, [True] * 64 + [False])


# -- faults of the node


def until(attempt: Callable[[], tuple[bool, list[bool]]]) -> None:
    """Repeat an operation until all its keys are a success: the library leaves a node that failed alone for retry_interval."""
    for _ in range(100_000):
        ok, done = attempt()
        if ok and all(done):
            return
    raise AssertionError("the operation still fails")


def test_node_killed(make: Make, node: penstock_testing.Node, caplog: pytest.LogCaptureFixture) -> None:
    client = make()
    outcome(client, client.submit_batch_set(["a"], views([content(1, 4096)])))
    node.kill()
    room = bytearray(b"\xee" * 4096)
    for _ in range(3):
        assert outcome(client, client.submit_batch_get(["a"], views([room])))[1] == [False]
        assert outcome(client, client.submit_batch_exists(["a"]))[1] == [False]
        assert outcome(client, client.submit_batch_set(["b"], views([content(2, 4096)]))) == (False, [False])
        assert outcome(client, client.submit_batch_set(["c"], views([content(2, 77)]))) == (False, [False])
        assert outcome(client, client.submit_batch_delete(["a"]))[1] == [False]
    assert room == b"\xee" * 4096
    assert client.counters["get_down"] == 3
    assert len([m for m in caplog.messages if "the node does not answer" in m]) == 1
    node.start()
    # Objects that the node had not written are lost with it, so the object is stored again.
    until(lambda: outcome(client, client.submit_batch_set(["a"], views([content(1, 4096)]))))
    until(lambda: outcome(client, client.submit_batch_exists(["a"])))
    assert outcome(client, client.submit_batch_get(["a"], views([room]))) == (True, [True])
    assert room == content(1, 4096)


def test_node_down_at_the_start(make: Make, node: penstock_testing.Node) -> None:
    node.kill()
    client = make()
    assert outcome(client, client.submit_batch_exists(["a"])) == (False, [False])
    assert outcome(client, client.submit_batch_get(["a"], views([bytearray(4096)]))) == (False, [False])
    node.start()
    until(lambda: outcome(client, client.submit_batch_set(["a"], views([content(1, 4096)]))))
    until(lambda: outcome(client, client.submit_batch_exists(["a"])))


def test_node_stopped(make: Make, node: penstock_testing.Node) -> None:
    """Each operation ends while the node is stopped, those behind the worker too; afterwards all is as before."""
    client = make(timeout=1)
    outcome(client, client.submit_batch_set(["a"], views([content(1, 4096)])))
    node.pause()
    room = bytearray(b"\xee" * 4096)
    numbers = [client.submit_batch_get(["a"], views([room])), client.submit_batch_exists(["a"])]
    numbers += [client.submit_batch_set([f"n{i}"], views([content(2, 5000 + i)])) for i in range(20)]
    assert not any(any(done) for _, _, _, done in collect(client, *numbers))
    assert room == b"\xee" * 4096
    node.resume()
    until(lambda: outcome(client, client.submit_batch_exists(["a"])))
    assert outcome(client, client.submit_batch_get(["a"], views([room]))) == (True, [True])
    assert room == content(1, 4096)


def test_damaged_disk(make: Make, node: penstock_testing.Node) -> None:
    """A bit flipped in every page: no object is delivered with other bytes than those that were stored."""
    client = make()
    keys = [f"k{i}" for i in range(32)]
    values = [content(i, 64 << 10) for i in range(32)]
    outcome(client, client.submit_batch_set(keys, views(values)))
    client.close()
    node.stop()
    damage(node)
    node.start()
    client = make()
    collect(client, client.submit_batch_exists(keys))
    rooms = [bytearray(64 << 10) for _ in keys]
    # The records of the lengths are damaged too, so the length is made known first.
    outcome(client, client.submit_batch_set(["other"], views([content(99, 64 << 10)])))
    done = outcome(client, client.submit_batch_get(keys, views(rooms)))[1]
    assert not any(done)
    assert client.counters["get_lost"] + client.counters["get_miss"] == 32
    # What was lost is stored again.
    assert outcome(client, client.submit_batch_set(keys, views(values)))[1] == [True] * 32
    assert outcome(client, client.submit_batch_get(keys, views(rooms))) == (True, [True] * 32)
    assert rooms == values


def test_full_node_evicts() -> None:
    """LMCache does not evict objects of earlier processes, so the node evicts them. Objects that are found have the right bytes."""
    with penstock_testing.node(capacity="64MiB") as node:
        client = PenstockL2(servers=node.address)
        total = 160
        for i in range(total):
            outcome(client, client.submit_batch_set([f"k{i}"], views([content(i, 1 << 20)])))
        keys = [f"k{i}" for i in range(total)]
        found = outcome(client, client.submit_batch_exists(keys))[1]
        assert 0 < sum(found) < 64
        for key in itertools.compress(keys, found):
            room = bytearray(1 << 20)
            if outcome(client, client.submit_batch_get([key], views([room])))[0]:
                assert room == content(int(key[1:]), 1 << 20)
        # The lookup has kept the record of the length, so another process finds the objects that were not evicted since.
        other = PenstockL2(servers=node.address)
        again = outcome(other, other.submit_batch_exists(keys))[1]
        assert any(again)
        assert not any(now and not before for now, before in zip(again, found, strict=True))
        other.close()
        client.close()


def test_new_weights(make: Make, node: penstock_testing.Node) -> None:
    """After a bump of the epoch nothing of the old weights is found; a client of the old epoch stores nothing either."""
    client = make()
    outcome(client, client.submit_batch_set(["a"], views([content(1, 4096)])))
    with Store(node.address) as store:
        name = f"{client._prefix}/4096"
        store.namespace(name, block_tokens=1, layers=1, token_bytes=4096, flat=True).bump()
    room = bytearray(4096)
    assert outcome(client, client.submit_batch_exists(["a"]))[1] == [False]
    assert outcome(client, client.submit_batch_get(["a"], views([room]))) == (False, [False])
    assert outcome(client, client.submit_batch_set(["a"], views([content(1, 4096)]))) == (False, [False])
    fresh = make()
    assert outcome(fresh, fresh.submit_batch_exists(["a"])) == (True, [False])
    assert outcome(fresh, fresh.submit_batch_set(["a"], views([content(2, 4096)]))) == (True, [True])
    assert outcome(fresh, fresh.submit_batch_get(["a"], views([room]))) == (True, [True])
    assert room == content(2, 4096)


# -- configuration


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"servers": "127.0.0.1:1", "server": "x"}, "server"),
        ({}, "servers"),
        ({"servers": "127.0.0.1:1", "timeout": 30}, "timeout is 30.0 s"),
        ({"servers": "127.0.0.1:1", "timeout": "soon"}, "timeout"),
        ({"servers": "127.0.0.1:1", "namespace": 3}, "namespace"),
    ],
)
def test_bad_parameters(params: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidError, match=f"adapter_params.*{error}"):
        PenstockL2(**params)


# -- LMCache's own wrapper

lmcache_only = pytest.mark.filterwarnings("ignore")  # those of LMCache's imports

SURFACE = {
    "__init__": "(self, native_client: Any, max_capacity_gb: float = 0, type_name: str = '', extra_status: dict[str, Any] | None = None,"
    " pad_buffers_to_alignment: bool = False) -> None",
    "submit_store_task": "(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId",
    "submit_lookup_and_lock_task": "(self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]) -> L2TaskId",
    "submit_load_task": "(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId",
    "delete": "(self, keys: list[ObjectKey]) -> None",
    "close": "(self) -> None",
}


class Wrapped:
    """A client under LMCache's wrapper, with LMCache's keys and memory objects."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    @staticmethod
    def keys(*hashes: int, salt: str = "") -> list[Any]:
        from lmcache.v1.distributed.api import ObjectKey

        return [ObjectKey(chunk_hash=n.to_bytes(32, "big"), model_name="org/model", kv_rank=1 << 24, cache_salt=salt) for n in hashes]

    @staticmethod
    def objects(contents: Sequence[bytearray], slot: int = 0) -> list[Any]:
        """Return memory objects; with a slot they are padded to it."""
        import torch
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        made = []
        for data in contents:
            raw = torch.full((max(len(data), slot),), 0xEE, dtype=torch.uint8)
            raw[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
            form = MemoryObjMetadata(
                shape=torch.Size([len(data)]), dtype=torch.uint8, address=0, phy_size=len(raw), fmt=MemoryFormat.KV_2LTD, ref_count=1
            )
            made.append(TensorMemoryObj(raw_data=raw, metadata=form, parent_allocator=None))
        return made

    def _answer(self, fd: int, query: Callable[[], Any]) -> Any:
        while (answer := query()) is None:
            assert readable(fd, TIMEOUT), "LMCache got no completion"
            os.eventfd_read(fd)
        return answer

    def store(self, keys: list[Any], objects: list[Any]) -> int:
        """Return how many bytes LMCache counts, or -1 if it takes the operation as failed."""
        task = self.adapter.submit_store_task(keys, objects)
        return int(self._answer(self.adapter.get_store_event_fd(), lambda: self.adapter.pop_completed_store_tasks().get(task)))

    def lookup(self, keys: list[Any]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        found = self._answer(self.adapter.get_lookup_and_lock_event_fd(), lambda: self.adapter.query_lookup_and_lock_result(task))
        return [found.test(i) for i in range(len(keys))]

    def load(self, keys: list[Any], objects: list[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        loaded = self._answer(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))
        return [loaded.test(i) for i in range(len(keys))]

    @property
    def healthy(self) -> bool:
        """Whether the thread that takes completions lives."""
        return bool(self.adapter.report_status()["is_healthy"])


def native_plugin(address: str, **more: Any) -> Any:
    """Make an adapter as ``lmcache server --l2-adapter`` does."""
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter import NativePluginL2AdapterConfig

    params = {"servers": address, "retry_interval": 0.1, "timeout": 1, **more}
    spec = {"type": "native_plugin", "module_path": "penstock.lmcache", "class_name": "PenstockL2", "adapter_params": params}
    return create_l2_adapter(NativePluginL2AdapterConfig.from_dict(spec))


@pytest.fixture
def wrapped(node: penstock_testing.Node) -> Iterator[Wrapped]:
    adapter = native_plugin(node.address)
    yield Wrapped(adapter)
    adapter.close()
    adapter._client.close()


@lmcache_only
def test_surface_of_the_installed_release() -> None:
    """The wrapper's signatures, and each call that it makes to a client, bound to ours."""
    from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter

    found = {name: str(inspect.signature(getattr(NativeConnectorL2Adapter, name))) for name in SURFACE}
    assert {k: v.replace("'", "") for k, v in found.items()} == {k: v.replace("'", "") for k, v in SURFACE.items()}

    class Recorder:
        def __init__(self) -> None:
            self.fd = os.eventfd(0)
            self.called: set[str] = set()

        def __getattr__(self, name: str) -> Any:
            signature = inspect.signature(getattr(PenstockL2, name))

            def call(*args: Any, **kwargs: Any) -> Any:
                signature.bind(self, *args, **kwargs)
                self.called.add(name)
                if name == "drain_completions":
                    os.eventfd_read(self.fd)
                    return [(7, True, "", [True])]
                if name.startswith("submit"):
                    os.eventfd_write(self.fd, 1)
                return {"event_fd": self.fd, "close": None}.get(name, 7)

            return call

    recorder = Recorder()
    adapter = Wrapped(NativeConnectorL2Adapter(recorder))
    key, value = adapter.keys(1), adapter.objects([content(1, 64)])
    assert adapter.store(key, value) == 64
    assert adapter.lookup(key) == [True]
    assert adapter.load(key, value) == [True]
    adapter.adapter.delete(key)
    adapter.adapter.close()
    os.close(recorder.fd)
    assert recorder.called == {name for name, f in vars(PenstockL2).items() if inspect.isfunction(f) and not name.startswith("_")}


@lmcache_only
def test_wrapped(wrapped: Wrapped) -> None:
    """Store, look up, load in part, delete, with salts, and what LMCache counts of it."""
    keys = wrapped.keys(1, 2, 3)
    salted = wrapped.keys(1, salt="tenant-b")
    values = [content(i, 70_000) for i in range(3)]
    assert wrapped.store(keys, wrapped.objects(values)) == 3 * 70_000
    assert wrapped.lookup(wrapped.keys(3, 4, 1) + salted) == [True, False, True, False]
    rooms = wrapped.objects([bytearray(70_000) for _ in range(3)])
    assert wrapped.load(wrapped.keys(3, 4, 1), rooms) == [True, False, True]
    assert [bytes(room.byte_array) for room in rooms] == [values[2], bytes(70_000), values[0]]
    assert wrapped.store(keys, wrapped.objects(values)) == 0
    wrapped.adapter.delete(wrapped.keys(2, 9))
    assert wrapped.lookup(keys) == [True, False, True]
    assert wrapped.adapter.get_usage().total_bytes_used == 2 * 70_000
    assert wrapped.healthy


@lmcache_only
def test_wrapped_padding(node: penstock_testing.Node) -> None:
    """With pad_buffers_to_alignment the length is that of the slot, whose end is undefined."""
    from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter

    client = PenstockL2(servers=node.address)
    wrapped = Wrapped(NativeConnectorL2Adapter(client, pad_buffers_to_alignment=True))
    keys, values = wrapped.keys(1, 2), [content(1, 5000), content(2, 8192)]
    assert wrapped.store(keys, wrapped.objects(values, slot=8192)) == 2 * 8192
    # Another writer has the same objects, with other bytes behind their end.
    others = wrapped.objects(values, slot=8192)
    others[0].raw_data[5000:] = 0x11
    assert wrapped.store(keys, others) == 0
    rooms = wrapped.objects([bytearray(5000), bytearray(8192)], slot=8192)
    assert wrapped.load(keys, rooms) == [True, True]
    assert [bytes(room.byte_array) for room in rooms] == values
    wrapped.adapter.close()


@lmcache_only
def test_wrapped_faults(node: penstock_testing.Node) -> None:
    """The node is stopped, killed, damaged and started again: results by key, never wrong bytes, and the thread lives."""
    wrapped = Wrapped(native_plugin(node.address))
    keys = wrapped.keys(*range(8))
    values = [content(i, 64 << 10) for i in range(8)]
    assert wrapped.store(keys, wrapped.objects(values)) == 8 * (64 << 10)

    def rooms() -> list[Any]:
        return wrapped.objects([bytearray(64 << 10) for _ in keys])

    def nothing() -> None:
        assert wrapped.store(wrapped.keys(99), wrapped.objects(values[:1])) == -1
        assert wrapped.lookup(keys) == [False] * 8
        assert wrapped.load(keys, rooms()) == [False] * 8
        assert wrapped.healthy

    node.pause()
    nothing()
    node.resume()
    until(lambda: (True, wrapped.lookup(keys)))
    loaded = rooms()
    assert wrapped.load(keys, loaded) == [True] * 8
    assert [bytes(room.byte_array) for room in loaded] == values

    node.stop()
    nothing()
    node.start()
    until(lambda: (True, wrapped.lookup(keys)))
    loaded = rooms()
    assert wrapped.load(keys, loaded) == [True] * 8
    assert [bytes(room.byte_array) for room in loaded] == values

    node.stop()
    damage(node)
    node.start()
    until(lambda: (wrapped.store(wrapped.keys(100), wrapped.objects([content(9, 64 << 10)])) >= 0, []))
    assert wrapped.load(keys, rooms()) == [False] * 8
    node.kill()
    nothing()
    node.start()
    # A damaged object is stored already, until a load finds the damage.
    loaded = rooms()
    until(lambda: (wrapped.store(keys, wrapped.objects(values)) >= 0, wrapped.load(keys, loaded)))
    assert [bytes(room.byte_array) for room in loaded] == values
    wrapped.adapter.close()


@lmcache_only
def test_wrapped_bad_parameters(node: penstock_testing.Node) -> None:
    with pytest.raises(InvalidError, match=r"adapter_params.*sever"):
        native_plugin(node.address, sever="x")

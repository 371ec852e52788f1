"""Tests of invalid arguments. Each raises a clear error, and the store still works afterwards."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeNamespace, value
from harness.faults import node_of_another_version

import penstock
from penstock import (
    AuthError,
    ClosedError,
    Error,
    Group,
    GroupKind,
    InvalidError,
    MismatchError,
    Namespace,
    Pointers,
    Store,
    UnregisteredError,
    VersionError,
    testing,
)


def test_a_namespace_of_another_definition(store: Store, ns: Namespace) -> None:
    same: dict[str, Any] = {"block_tokens": 4, "layers": 2, "token_bytes": 64}
    assert store.namespace(ns.name, **same).name == ns.name
    for other in (
        {"layers": 4},
        {"token_bytes": 32},
        {"block_tokens": 8},
        {"flat": True},
        {"dtype": "fp8"},
        {"layout": "tp2"},
        {"salt": b"s"},
        {"tenant": "t"},
    ):
        with pytest.raises(MismatchError, match=ns.name):
            store.namespace(ns.name, **{**same, **other})


@pytest.mark.parametrize(
    ("kind", "definition"),
    [
        (InvalidError, {"name": "with space"}),
        (InvalidError, {"name": ""}),
        (InvalidError, {"name": "a\0b"}),
        (InvalidError, {"name": "a\udc80"}),
        (InvalidError, {"layers": 0}),
        (InvalidError, {"layers": -1}),
        (InvalidError, {"layers": 2**32 + 1}),
        (InvalidError, {"layers": None}),
        (InvalidError, {"salt": bytes(65)}),
        (InvalidError, {"groups": [Group(GroupKind.FULL, 1, 1)]}),
        (InvalidError, {"layers": None, "token_bytes": None, "groups": []}),
        (InvalidError, {"dtype": "x" * 65}),
        (TypeError, {"name": 3}),
        (TypeError, {"layers": 1.5}),
        (TypeError, {"layers": "2"}),
    ],
)
def test_invalid_definitions(store: Store, kind: type[Exception], definition: dict[str, Any]) -> None:
    name = definition.pop("name", "bad/definition")
    with pytest.raises(kind):
        store.namespace(name, **{"block_tokens": 4, "layers": 2, "token_bytes": 64, **definition})


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (TypeError, None),
        (TypeError, "one key"),
        (TypeError, b"one key"),
        (TypeError, [None]),
        (TypeError, [1]),
        (InvalidError, [""]),
        (InvalidError, ["x" * 257]),
        (InvalidError, ["a", "\udc80"]),
    ],
)
def test_invalid_keys(ns: Namespace, kind: type[Exception], keys: Any) -> None:
    with pytest.raises(kind):
        ns.match(keys)
    with pytest.raises(kind):
        ns.exists(keys)


def test_the_longest_key(ns: Namespace) -> None:
    assert ns.put(["k" * 256], [value(ns, 0)]).ok == 1
    assert ns.match(["k" * 256]).prefix == 1


def test_invalid_values(ns: Namespace) -> None:
    size = ns.value_bytes
    cases: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "values", None),
        (TypeError, "NoneType", [None]),
        (TypeError, "int", [7]),
        (TypeError, "str", ["x" * size]),
        (InvalidError, "writable", [bytes(size)]),
        (InvalidError, "writable", [memoryview(bytes(size))]),
        (InvalidError, "contiguous", [memoryview(bytearray(2 * size))[::2]]),
        (InvalidError, "2 values for 1 keys", [bytearray(size), bytearray(size)]),
        (InvalidError, "0 values for 1 keys", []),
        (InvalidError, "bytes", [bytearray(size - 1)]),
        (InvalidError, "bytes", [bytearray(size + 1)]),
        (InvalidError, "bytes", [bytearray()]),
        (InvalidError, "fragment", [[]]),
        (InvalidError, "layer", [[bytearray(size - 3), bytearray(3)]]),
    ]
    for kind, text, into in cases:
        with pytest.raises(kind, match=text):
            ns.get(["a"], into)
    with mmap.mmap(-1, size, prot=mmap.PROT_READ) as readonly, pytest.raises(InvalidError, match="writable"):
        ns.get(["a"], [readonly])
    assert ns.put(["a"], [value(ns, 0)]).ok == 1, "the store does not work after the errors"


def test_values_that_are_references_to_objects(make: MakeNamespace) -> None:
    """A get into an array of Python objects would overwrite references, and a put would store them."""
    ns = make(flat=True)
    objects = (ctypes.py_object * (ns.value_bytes // ctypes.sizeof(ctypes.py_object)))()
    with pytest.raises(InvalidError, match="references to Python objects"):
        ns.get(["a"], [objects])
    with pytest.raises(InvalidError, match="references to Python objects"):
        ns.put(["a"], [memoryview(objects).toreadonly()])

    class Pair(ctypes.Structure):
        _fields_ = [("O", ctypes.c_uint32), ("other", ctypes.c_uint32)]

    pairs = (Pair * (ns.value_bytes // ctypes.sizeof(Pair)))()
    assert ns.put(["a"], [pairs]).ok == 1, "a field with the name O is no reference"
    assert ns.get(["a"], [pairs]).ok == 1


def test_fragments_of_a_get_may_not_overlap(ns: Namespace) -> None:
    ns.put(["a", "b"], [value(ns, 0), value(ns, 1)])
    into = bytearray(ns.value_bytes)
    with pytest.raises(InvalidError):
        ns.get(["a", "b"], [into, into])


def test_invalid_pointers() -> None:
    for arguments in ([[1], [1, 2]], [[-1], [1]], [[2**64], [1]], [["x"], [1]]):
        with pytest.raises(InvalidError):
            Pointers(*arguments)
    for fragments in (0, 2, [1, 1], [3, 0], [-1, 4]):
        with pytest.raises(InvalidError):
            Pointers([1, 2, 3], [1, 1, 1], fragments=fragments)


def test_other_arguments_that_cannot_be(ns: Namespace) -> None:
    for arguments in (
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": 1e9},
        {"lease": 0},
        {"epoch": -1},
        {"epoch": 2**64},
        {"timeout": float("nan")},
    ):
        with pytest.raises(InvalidError):
            ns.match(["a"], **arguments)
    for first in (-1, 2, 2**32):
        with pytest.raises(InvalidError):
            ns.get(["a"], [bytearray(ns.value_bytes)], first=first)
    for pieces in ([(1, 0)], [(0, 1)], [(-1, 0)], [(0, 256)]):
        with pytest.raises(InvalidError):
            ns.get(["a"], [bytearray(ns.value_bytes)], pieces=pieces)


def test_invalid_servers() -> None:
    with pytest.raises(TypeError):
        Store(None)  # type: ignore[arg-type]
    bad: tuple[str | list[str], ...] = ("", [], "no port", "a:1,a:1", "a\0:1")
    for servers in bad:
        with pytest.raises(InvalidError):
            Store(servers)
    with pytest.raises(InvalidError):
        Store("127.0.0.1:1", timeout=-1)
    with pytest.raises(Error, match="absent"):
        Store("127.0.0.1:1", token_file="/absent")


def test_memory_that_is_not_registered(node: testing.Node, ns: Namespace) -> None:
    with Store(node.address, any_memory=False) as strict:
        mine = strict.namespace(ns.name, block_tokens=4, layers=2, token_bytes=64)
        memory = bytearray(2 * ns.value_bytes)
        halves = memoryview(memory)[: ns.value_bytes], memoryview(memory)[ns.value_bytes :]
        with pytest.raises(UnregisteredError):
            mine.put(["a"], [halves[0]])
        with strict.register(memory):
            assert mine.put(["a"], [halves[0]]).ok == 1
            assert mine.get(["a"], [halves[1]]).ok == 1
            with pytest.raises(InvalidError):
                strict.register(halves[0])  # overlaps with memory
        with pytest.raises(UnregisteredError):
            mine.get(["a"], [halves[1]])
        with pytest.raises(InvalidError, match="writable"):
            strict.register(bytes(10))


def test_a_closed_store(node: testing.Node) -> None:
    store = Store(node.address)
    ns = store.namespace("closed", block_tokens=4, layers=2, token_bytes=64)
    ns.put(["a"], [value(ns, 0)])
    lease = ns.match(["a"], lease=30).lease
    memory = bytearray(10)
    registered = store.register(memory)
    assert lease is not None
    store.close()
    store.close()
    assert store.closed
    for call in (
        lambda: ns.match(["a"]),
        lambda: ns.match([]),
        lambda: ns.get(["a"], [bytearray(ns.value_bytes)]),
        lambda: ns.jobs.exists(["a"]),
        lambda: ns.epoch,
        lambda: ns.bump(),
        lambda: ns.key_ids(["a"]),
        lambda: ns.chain([1]),
        lambda: lease.renew(1),
        lambda: store.namespace("x", block_tokens=4, layers=2, token_bytes=64),
        lambda: store.register(bytearray(1)),
        store.drain,
        store.fileno,
        store.stats,
        store.__enter__,
    ):
        with pytest.raises(ClosedError):
            call()
    lease.release()
    registered.close()
    memory.append(1)  # memory is no longer exported


def test_the_wrong_token(tmp_path: Path) -> None:
    token = "0123456789abcdef"
    with testing.node(token=token) as n:
        for wrong in (None, "x" * 16):
            with pytest.raises(AuthError):
                Store(n.address, token=wrong)
        with Store(n.address, token=token) as store:
            store.namespace("a", block_tokens=4, layers=2, token_bytes=64)
        file = tmp_path / "token"
        file.write_text(token)
        with Store(n.address, token_file=file) as store:
            store.namespace("a", block_tokens=4, layers=2, token_bytes=64)


def test_a_node_of_another_version(node: testing.Node) -> None:
    with node_of_another_version() as other:
        with pytest.raises(VersionError, match=r"speaks version 4 .* this side version 3: .* run the same release"):
            Store(other.address)
        with Store([node.address, other.address]) as store:
            ns = store.namespace("versions", block_tokens=4, layers=2, token_bytes=64, flat=True)
            keys = [str(i) for i in range(32)]
            put = ns.put(keys, [value(ns, i) for i in range(32)])
            assert {penstock.KeyResult.OK, penstock.KeyResult.DOWN} == {*map(penstock.KeyResult, put.codes)}, put.codes


def test_a_node_that_is_down() -> None:
    with testing.node() as n, Store(n.address, dead_for=0.1) as store:
        ns = store.namespace("a", block_tokens=4, layers=2, token_bytes=64)
        ns.put(["a"], [value(ns, 0)])
        n.kill()
        assert ns.match(["a"]).cut == penstock.Cut.DOWN
        into = [bytearray(ns.value_bytes)]
        assert ns.get(["a"], into)[0] in (penstock.KeyResult.DOWN, penstock.KeyResult.MISS)
        with pytest.raises(penstock.UnavailableError):
            ns.bump()
        n.start()
        while ns.put(["b"], [value(ns, 1)]).ok != 1:
            pass  # until the client connects to the node again
        assert ns.get(["b"], into).ok == 1


def test_a_store_without_any_node() -> None:
    with Store("127.0.0.1:1") as store, pytest.raises(penstock.UnavailableError):
        store.namespace("a", block_tokens=4, layers=2, token_bytes=64)


def test_a_namespace_is_of_its_store(make: MakeNamespace) -> None:
    assert make().name != make().name

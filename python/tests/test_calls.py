"""Tests of the calls against a real node."""

from __future__ import annotations

import subprocess
from array import array

import pytest
from conftest import TIMEOUT, MakeNamespace, value

from penstock import Cut, Group, GroupKind, InvalidError, KeyResult, Keys, MismatchError, Namespace, NotFoundError, Pointers, Store
from penstock._program import program
from penstock.testing import Node


def test_put_match_get(ns: Namespace) -> None:
    keys = Keys(["a", b"b", "c"])
    put = ns.put(keys, [value(ns, i) for i in range(3)])
    assert (put.ok, put.prefix, list(put.codes)) == (3, 3, [KeyResult.OK] * 3)
    match = ns.match([*keys, b"d"])
    assert (match.prefix, match.cut, match.bytes) == (3, Cut.ABSENT, 3 * ns.value_bytes)
    into = [bytearray(ns.value_bytes) for _ in keys]
    got = ns.get(keys, into)
    assert got.done() == [True] * 3
    assert got.bytes == 3 * ns.value_bytes
    assert got.cut == Cut.COMPLETE
    assert into == [bytearray(value(ns, i)) for i in range(3)]


def test_what_is_stored_already_is_not_sent(ns: Namespace) -> None:
    ns.put(["a"], [value(ns, 1)])
    again = ns.put(["a", "b"], [value(ns, 1), value(ns, 2)])
    assert [again[0], again[1]] == [KeyResult.EXISTS, KeyResult.OK]
    assert again.done() == [True, True]
    assert again.bytes == ns.value_bytes


def test_first_moves_the_end_of_a_chain(ns: Namespace) -> None:
    keys = ["a", "b", "c"]
    assert ns.put(keys[:1], [value(ns, 0)]).ok == 1
    assert ns.put(keys, [value(ns, 1), value(ns, 2)], first=1).prefix == 3
    into = [bytearray(ns.value_bytes)]
    assert ns.get(keys, into, first=2).prefix == 3
    assert into[0] == value(ns, 2)


def test_values_of_several_fragments(ns: Namespace) -> None:
    whole = value(ns, 5)
    half = len(whole) // 2  # the size of a layer
    assert ns.put(["a"], [(whole[:half], bytearray(whole[half:]))]).ok == 1
    k, v = bytearray(half), array("B", bytes(half))
    assert ns.get(["a"], [[k, v]]).ok == 1
    assert bytes(k) + v.tobytes() == whole


def test_layers_of_values(ns: Namespace) -> None:
    whole = [value(ns, i) for i in range(2)]
    half = ns.value_bytes // 2  # the size of a layer
    assert ns.put(["a", "b"], whole).ok == 2
    into = [bytearray(half) for _ in whole]
    got = ns.get(["a", "b"], into, layers=(1, 1))
    assert (got.ok, got.bytes) == (2, 2 * half)
    assert into == [w[half:] for w in whole]
    for layers, text in {(0, 0): "at least 1", (1, 2): "2 layers from layer 1; group 0 has 2", (0, 2): "2 layers have"}.items():
        with pytest.raises(InvalidError, match=text):
            ns.get(["a", "b"], into, layers=layers)


def test_values_by_address(ns: Namespace) -> None:
    memory = array("B", value(ns, 1) + value(ns, 2))
    start, size = memory.buffer_info()[0], ns.value_bytes
    assert ns.put(["a", "b"], Pointers([start, start + size], [size, size], keep=memory)).ok == 2
    into = array("B", bytes(2 * size))
    start, half = into.buffer_info()[0], size // 2
    places = Pointers([start + i * half for i in range(4)], [half] * 4, fragments=2, keep=into)
    assert ns.get(["a", "b"], places).ok == 2
    assert into == memory


def test_flat_keys_have_nothing_to_do_with_each_other(make: MakeNamespace) -> None:
    ns = make(flat=True)
    assert ns.put(["a", "c"], [value(ns, 0), value(ns, 2)]).ok == 2
    assert list(ns.exists(["a", "b", "c"]).codes) == [KeyResult.OK, KeyResult.MISS, KeyResult.OK]
    assert ns.match(["a", "b", "c"]).prefix == 1
    into = [bytearray(ns.value_bytes) for _ in range(3)]
    got = ns.get(["a", "b", "c"], into)
    assert (got.done(), got.prefix, got.cut) == ([True, False, True], 1, Cut.ABSENT)
    assert into[2] == value(ns, 2)


def test_delete_and_touch(make: MakeNamespace) -> None:
    ns = make(flat=True)
    ns.put(["a", "b"], [value(ns, 0), value(ns, 1)])
    assert ns.touch(["a", "x"]).done() == [True, False]
    assert ns.delete(["a", "x"]).done() == [True, False]
    assert ns.exists(["a", "b"]).done() == [False, True]


def test_delete_takes_the_end_of_a_chain_with_it(ns: Namespace) -> None:
    ns.put(["a", "b", "c"], [value(ns, i) for i in range(3)])
    ns.delete(["a", "b"])
    assert ns.match(["a", "b", "c"]).prefix == 0


def test_a_lease_is_renewed_and_released(ns: Namespace) -> None:
    ns.put(["a"], [value(ns, 0)])
    match = ns.match(["a"], lease=30)
    assert match.lease is not None
    with match.lease as lease:
        lease.renew(60)
    lease.release()  # the second call does nothing
    assert ns.match(["a"]).lease is None


def test_after_a_bump_all_keys_are_misses(store: Store, ns: Namespace) -> None:
    other = store.namespace(ns.name, block_tokens=4, layers=2, token_bytes=64)
    ns.put(["a"], [value(ns, 0)])
    before = ns.epoch
    assert ns.bump() == before + 1 == ns.epoch
    assert ns.match(["a"]).prefix == 0
    assert other.match(["a"]).cut == Cut.EPOCH, "a handle of the old epoch"
    assert other.refresh() == before + 1
    with pytest.raises(MismatchError):
        ns.bump(before)


def test_a_handle_of_a_deleted_namespace_finds_nothing_in_the_next_one(node: Node, store: Store, ns: Namespace) -> None:
    ns.put(["a"], [value(ns, 0)])
    command = [str(program()), "ns", "delete", ns.name, "--yes", "--server", node.address]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
    into = [bytearray(ns.value_bytes)]
    with pytest.raises(NotFoundError):
        ns.get(["a"], into)
    again = store.namespace(ns.name, block_tokens=4, layers=2, token_bytes=64)
    assert again.epoch > ns.epoch
    assert again.put(["b"], [value(ns, 1)]).ok == 1
    assert ns.put(["a"], [value(ns, 0)]).ok == 0, "a value of the deleted namespace"
    assert again.match(["a"]).prefix == 0
    assert ns.match(["b"]).prefix == 0
    assert ns.get(["b"], into).ok == 0
    assert into == [bytearray(ns.value_bytes)]
    assert again.get(["b"], into).ok == 1


def test_several_epochs_are_live(ns: Namespace) -> None:
    first = ns.epoch
    ns.put(["a", "b"], [value(ns, 0), value(ns, 1)])
    second = ns.bump(keep=2)
    ns.put(["a"], [value(ns, 2)])
    got = bytearray(ns.value_bytes)
    for options, prefix, epoch in (
        ({}, 1, second),
        ({"epoch": first}, 2, first),
        ({"oldest": first}, 2, first),
        ({"newest": True}, 1, second),
        ({"newest": True, "oldest": first}, 2, first),
    ):
        match = ns.match(["a", "b"], **options)
        assert (match.prefix, match.epoch) == (prefix, epoch), options
    for epoch, number in ((first, 0), (second, 2)):
        assert ns.get(["a"], [got], epoch=epoch).ok == 1
        assert bytes(got) == bytes(value(ns, number)), f"the value of epoch {epoch}"
    mixed = ns.match(["a", "b"], oldest=first, mix=True)
    assert (mixed.prefix, mixed.epoch, mixed.epochs) == (2, second, (second, first))
    assert ns.match(["a", "b", "c"], oldest=first, mix=True).epochs == mixed.epochs
    assert ns.match(["a", "b"], oldest=first).epochs == () == ns.match([], mix=True).epochs
    pages = [bytearray(ns.value_bytes) for _ in range(2)]
    assert ns.get(["a", "b"], pages, epochs=mixed.epochs).ok == 2
    assert [bytes(p) for p in pages] == [bytes(value(ns, 2)), bytes(value(ns, 1))]
    for bad in ((first,), (first, 0), (first, -1)):
        with pytest.raises(InvalidError, match="epoch"):
            ns.get(["a", "b"], pages, epochs=bad)
    with pytest.raises(InvalidError, match="both epoch"):
        ns.get(["a", "b"], pages, epochs=mixed.epochs, epoch=first)
    with ns.pin(60, epoch=first) as pin:
        third = ns.bump()
        assert ns.match(["a", "b"], epoch=first).prefix == 2, "a pinned epoch"
        assert ns.match(["a"], epoch=second).cut == Cut.EPOCH
        pin.renew(60)
        with pytest.raises(MismatchError, match="pinned"):
            ns.retire(first)
        with pytest.raises(InvalidError, match="newest"):
            ns.retire(third)
        ns.retire(first, force=True)
        assert ns.match(["a"], epoch=first).cut == Cut.EPOCH
    with pytest.raises(MismatchError, match="not live"):
        ns.pin(60, epoch=first)
    for keep in (0, 17):
        with pytest.raises(InvalidError, match="1 to 16"):
            ns.bump(keep=keep)


def test_chain(make: MakeNamespace) -> None:
    ns = make(ids=True)
    ids = ns.chain(range(11))
    assert len(ids) == 2
    assert list(ns.chain(array("I", range(11)))) == list(ids)
    assert list(ns.chain(range(4, 8), parent=ids[0])) == [ids[1]], "parent does not continue the chain"
    assert list(ns.chain(range(8), extra=b"lora")) != list(ids)
    assert len(ns.chain([1, 2])) == 0
    ns.put(ids, [value(ns, 0), value(ns, 1)])
    assert ns.match(ids).prefix == 2
    for bad in ([-1], [2**32], ["x"], [None]):
        with pytest.raises(InvalidError, match="tokens"):
            ns.chain(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="parent"):
        ns.chain([1], parent=b"short")


def test_key_ids(make: MakeNamespace) -> None:
    a, b = make(), make()
    ids = a.key_ids(["x", "y"])
    assert [len(i) for i in ids] == [16, 16]
    assert ids[0] != ids[1]
    assert a.key_ids(["x"]) != b.key_ids(["x"]), "two namespaces have the same id"
    assert a.key_ids([]) == []


def test_a_hybrid_model(make: MakeNamespace) -> None:
    ns = make(groups=[Group(GroupKind.FULL, 2, 8), Group(GroupKind.STATE, 1, 100)])
    assert ns.piece_bytes == (2 * 4 * 8, 100)
    keys = ["a", "b"]
    full, state = bytes(range(64)), bytes(100)
    put = ns.put(keys, [full, full, state], pieces=[(0, 0), (1, 0), (1, 1)])
    assert put.ok == 3
    assert ns.match(keys).prefix == 2
    assert ns.match(keys[:1]).cut == Cut.GROUPS, "the first block has no snapshot"
    into = [bytearray(100), bytearray(64)]
    assert ns.get(keys, into, pieces=[(1, 1), (0, 0)]).ok == 2
    assert into == [state, full]


def test_a_batch_without_keys(ns: Namespace) -> None:
    assert ns.match([]).prefix == 0
    assert ns.get([], []).done() == []
    assert ns.exists([]).ok == 0


def test_keys() -> None:
    keys = Keys(["a", b"bc", "é"])
    assert list(keys) == [b"a", b"bc", b"\xc3\xa9"]
    assert (keys[-1], keys[1:], len(keys)) == (b"\xc3\xa9", Keys([b"bc", "é"]), 3)
    assert hash(Keys(["a"])) == hash(Keys([b"a"]))
    with pytest.raises(IndexError):
        keys[3]
    assert list(Keys.packed(b"abcd", 2)) == [b"ab", b"cd"]
    with pytest.raises(InvalidError):
        Keys.packed(b"abc", 2)


def test_stats(store: Store, node: object) -> None:
    assert isinstance(store.stats(), dict)
    assert store.stats()

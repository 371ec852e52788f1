"""A store on the node's own host copies values from the node's memory, and puts them over its unix socket."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import in_threads

import penstock
from penstock import testing

_BLOCKS, _BYTES = 8, 1 << 20


@pytest.fixture
def local_node(tmp_path: Path) -> Iterator[testing.Node]:
    with testing.node(args=["--local-socket", str(tmp_path / "local.sock")]) as n:
        yield n


def test_values_are_copied(local_node: testing.Node) -> None:
    keys = [f"key {i}" for i in range(_BLOCKS)]
    values = [random.Random(i).randbytes(_BYTES) for i in range(_BLOCKS)]

    with penstock.Store(local_node.address) as store:
        ns = store.namespace("copied", block_tokens=16, layers=16, token_bytes=4096, flat=True)

        def get(_: int) -> None:
            into = [bytearray(_BYTES) for _ in keys]
            assert ns.get(keys, into).ok == _BLOCKS
            assert [bytes(b) for b in into] == values

        def copied() -> int:
            count: int = store.stats()["LocalReads"]
            return count

        def get_until_copied() -> None:
            """Get the values, and store them if the node does not have them. Connections are made in the background."""
            before = copied()
            for _ in range(10_000):
                ns.put(keys, values)
                if ns.get(keys, [bytearray(_BYTES) for _ in keys]).ok == _BLOCKS and copied() > before:
                    return
            pytest.fail(f"no value was copied: {store.stats()}")

        get_until_copied()
        before = copied()
        get(0)  # the main thread waits in the library in short intervals
        in_threads(4, get)  # another thread waits in one call
        assert copied() > before

        local_node.kill()
        assert ns.get(keys, [bytearray(_BYTES) for _ in keys]).ok == 0
        local_node.start()
        get_until_copied()
        get(0)


def test_values_are_put_over_the_socket(local_node: testing.Node) -> None:
    with penstock.Store(local_node.address) as store:
        pairs = store.namespace("pairs", block_tokens=16, layers=16, token_bytes=4096, flat=True)

        def sent() -> int:
            count: int = store.stats()["LocalWrites"]
            return count

        def put(number: int) -> None:
            """Put values twice, and compare the stored values."""
            names = [f"{number} {i}" for i in range(_BLOCKS)]
            values = [random.Random(name).randbytes(_BYTES) for name in names]
            assert pairs.put(names, values).ok == _BLOCKS
            assert pairs.put(names, values).ok == _BLOCKS  # they exist
            into = [bytearray(_BYTES) for _ in names]
            assert pairs.get(names, into).ok == _BLOCKS
            assert [bytes(b) for b in into] == values

        def put_until_sent() -> None:
            """Connections are made in the background."""
            before = sent()
            names, values = [f"any {i}" for i in range(_BLOCKS)], [bytes([i]) * _BYTES for i in range(_BLOCKS)]
            for _ in range(10_000):
                if pairs.put(names, values).ok == _BLOCKS and sent() > before:
                    return
                pairs.get(names, [bytearray(_BYTES) for _ in names])
            pytest.fail(f"no value went over the socket: {store.stats()}")

        put_until_sent()
        before = sent()
        put(0)
        in_threads(4, lambda i: put(1 + i))
        assert sent() > before

        local_node.kill()
        assert pairs.put(["lost"], [bytes(_BYTES)]).ok == 0
        local_node.start()
        put_until_sent()
        put(10)

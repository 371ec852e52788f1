"""vLLM's own engine on PenstockTier: engines, one after the other and at once, on one node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq
from harness.faults import blocks
from harness.model import FIRST_TOKEN
from harness.sessions import Session
from harness.vllm import BLOCK, OUTPUT, RANKS, Stored, Vllm, tier

from penstock import testing as penstock_testing

FAILURES = ("lookup_unavailable", "lookup_failed", "load_failed_rows", "store_failed_rows")
ROW = 2**16  # 4 layers, 2 heads, K and V of 32 floats, for each of 32 tokens


def generate(vllm: Vllm, name: str, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each prompt, and how many of its tokens were cached."""
    answers = vllm.generate(name, prompts)
    return [answer["tokens"] for answer in answers], [answer["cached"] for answer in answers]


def whole_blocks(prompts: list[list[int]]) -> list[int]:
    """Return how many tokens are cached: a prompt of whole blocks counts to its end, although the engine computes its last token again."""
    return [len(prompt) // BLOCK * BLOCK for prompt in prompts]


def test_tier(vllm: Vllm, agents: list[Session], node: penstock_testing.Node) -> None:
    """The second engine gets the whole blocks of each prompt from the node, and the same tokens; so it does without the node."""
    prompts = [session.turns[-1].prompt for session in agents]
    connector = tier(node, retry_interval=0.5)

    # Nothing is stored yet, so these are the tokens without Penstock.
    vllm.start("one", connector)
    want, _ = generate(vllm, "one", prompts)
    vllm.stop("one")

    vllm.start("two", connector)
    got, cached = generate(vllm, "two", prompts)
    assert got == want
    assert cached == whole_blocks(prompts)

    # A reset of the connector, as after a weight update: what the node has is of another epoch.
    assert vllm.call("two", "reset", connector=True)
    assert generate(vllm, "two", prompts[:1]) == (want[:1], [0])

    # The node is killed while requests run.
    vllm.host.submit("call", name="two", function="generate", prompts=prompts, output=OUTPUT)
    node.kill()
    assert [answer["tokens"] for answer in vllm.host.result("call", timeout=600)] == want
    assert vllm.call("two", "reset", connector=False)
    assert generate(vllm, "two", prompts)[0] == want
    vllm.stop("two")


def test_two_ranks(vllm: Vllm, agents: list[Session], node: penstock_testing.Node) -> None:
    """A row of the tier has the blocks of both ranks, and an engine of one rank does not find it."""
    prompts = [session.turns[-1].prompt for session in agents[:8]]
    vllm.start("pair", tier(node), **RANKS)
    want, _ = generate(vllm, "pair", prompts)
    vllm.stop("pair")

    vllm.start("next", tier(node), **RANKS)
    assert generate(vllm, "next", prompts) == (want, whole_blocks(prompts))
    assert vllm.call("next", "reset", connector=True)
    assert generate(vllm, "next", prompts[:1]) == (want[:1], [0])
    vllm.stop("next")

    vllm.start("single", tier(node))
    assert generate(vllm, "single", prompts[:1]) == (want[:1], [0])
    vllm.stop("single")


Prompts = list[list[int]]


class Plain(NamedTuple):
    """Prompts by turn of their sessions, and their tokens in an engine without Penstock."""

    prompts: list[Prompts]
    tokens: list[Prompts]
    updated: Prompts
    """The tokens of the last turn after a weight update."""


@pytest.fixture(scope="module")
def plain(vllm: Vllm, agents: list[Session], updated_model: Path) -> Plain:
    prompts = [[session.turns[k].prompt for session in agents[:8]] for k in range(4)]
    vllm.start("plain tier", None)
    tokens = [generate(vllm, "plain tier", turn)[0] for turn in prompts]
    vllm.call("plain tier", "update_weights", model=str(updated_model))
    assert vllm.call("plain tier", "reset")
    updated, _ = generate(vllm, "plain tier", prompts[-1])
    vllm.stop("plain tier")
    assert all(new != old for new, old in zip(updated, tokens[-1], strict=True))
    return Plain(prompts, tokens, updated)


class Subscriber:
    """Receives the KV events of an engine from vLLM's publisher, as a router does. It is a context manager."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._next: int | None = None

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def receive(self, milliseconds: int) -> list[dict[str, Any]]:
        """Return the events of the next message; none if there is none in that time. No message is lost after the first."""
        if not self._socket.poll(milliseconds):
            return []
        _, sequence, payload = self._socket.recv_multipart()
        number = int.from_bytes(sequence, "big")
        assert self._next in (None, number)
        self._next = number + 1
        _, events, *_ = msgspec.msgpack.decode(payload)
        return [dict(event) for event in events]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('events')}/zmq"


@pytest.fixture(scope="module")
def left(vllm: Vllm, kept: penstock_testing.Node, endpoint: str) -> Iterator[str]:
    """An engine that publishes the tier's events too."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    vllm.start("left", tier(kept, enable_kv_events=True, locality="REMOTE"), kv_events_config=events)
    yield "left"
    vllm.stop("left")


def test_events_of_stored_blocks(vllm: Vllm, left: str, kept: penstock_testing.Node, endpoint: str, plain: Plain) -> None:
    """A subscriber of the engine's publisher gets one event for each block that the node has, with the block's tokens."""
    stored = Stored()
    links: dict[int, tuple[int | None, tuple[int, ...]]] = {}  # by hash of a block: hash of its parent, and its tokens
    with Subscriber(endpoint) as subscriber:

        def serve(prompts: Prompts) -> Prompts:
            tokens, _ = generate(vllm, left, prompts)
            for prompt, output in zip(prompts, tokens, strict=True):
                stored.add(prompt, output)
            return tokens

        first = FIRST_TOKEN
        while not subscriber.receive(100):  # until the publisher has the subscription
            serve([[first] * (BLOCK + 1)])
            first += 1
        missed = len(stored)
        assert serve(plain.prompts[0]) == plain.tokens[0]
        end = time.monotonic() + 60
        while len(links) < len(stored) - missed and time.monotonic() < end:
            for event in subscriber.receive(1000):
                if (event["type"], event["medium"]) == ("BlockStored", "STORAGE") and len(set(event["token_ids"])) > 1:
                    (name,) = event["block_hashes"]
                    assert name not in links
                    assert (event["locality"], event["block_size"]) == ("REMOTE", BLOCK)
                    links[name] = event["parent_block_hash"], tuple(event["token_ids"])

    def prefix(name: int | None) -> tuple[int, ...]:
        return () if name is None else prefix(links[name][0]) + links[name][1]

    prefixes = {prefix(name) for name in links}
    assert len(prefixes) == len(links) == len(stored) - missed
    assert all(one in stored for one in prefixes)
    assert blocks(kept) == len(stored)


def test_two_engines(vllm: Vllm, left: str, kept: penstock_testing.Node, plain: Plain) -> None:
    """Two engines look up, load and store the same rows at once."""
    vllm.start("right", tier(kept))
    for prompts, tokens in zip(plain.prompts, plain.tokens, strict=True):
        for answers in vllm.both([left, "right"], prompts):
            assert [a["tokens"] for a in answers] == tokens
    seen = [vllm.call(name, "metrics") for name in (left, "right")]
    vllm.stop("right")
    assert sum(one.get("tier_load_rows", 0) for one in seen) > 0
    assert all(one["tier_store_rows"] > 0 for one in seen)
    assert not any(one.get(f"tier_{name}", 0) for one in seen for name in FAILURES)


def test_new_weights(vllm: Vllm, left: str, kept: penstock_testing.Node, plain: Plain, updated_model: Path) -> None:
    """After an update and a reset no row of the old weights is loaded, and rows of the new weights are."""
    prompts = plain.prompts[-1]
    assert generate(vllm, left, prompts)[0] == plain.tokens[-1]  # so the node has all rows of the old weights
    vllm.call(left, "update_weights", model=str(updated_model))
    assert vllm.call(left, "reset", connector=True)
    assert generate(vllm, left, prompts) == (plain.updated, [0] * len(prompts))

    vllm.start("updated", tier(kept))  # at the node's epoch
    vllm.call("updated", "update_weights", model=str(updated_model))
    assert generate(vllm, "updated", prompts) == (plain.updated, whole_blocks(prompts))
    vllm.stop("updated")


def test_a_full_node(vllm: Vllm, agents: list[Session]) -> None:
    """Neither the node nor the primary tier has room for all rows, so the node evicts rows that lookups may just have found."""
    prompts = [[session.turns[k].prompt for session in agents[:30]] for k in (2, 3)]
    with penstock_testing.node(capacity="16MiB", arena="8MiB") as node:
        vllm.start("crowded", tier(node, memory=8 << 20))
        want = [generate(vllm, "crowded", turn)[0] for turn in prompts]
        for turn, tokens in zip(prompts, want, strict=True):
            assert vllm.call("crowded", "reset")
            assert generate(vllm, "crowded", turn)[0] == tokens
        seen = vllm.call("crowded", "metrics")
        vllm.stop("crowded")
        assert seen["tier_store_rows"] * ROW > 16 << 20
        assert seen["tier_load_rows"] > 0
        print(seen, blocks(node))

"""vLLM's own engine on PenstockTier: engines, one after the other and at once, on one node."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq
from harness.faults import blocks, node_of_another_version, until, while_stopped
from harness.model import FIRST_TOKEN
from harness.sessions import Session
from harness.vllm import BLOCK, OUTPUT, RANKS, Stored, Vllm, tier

from penstock import testing as penstock_testing

FAILURES = ("lookup_unavailable", "lookup_failed", "load_failed_rows", "store_failed_rows")
NAMESPACE = "shared"
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
    """A row of the tier has the blocks of both ranks. An engine of one rank is refused, and serves without the tier."""
    prompts = [session.turns[-1].prompt for session in agents[:8]]
    connector = tier(node, namespace=NAMESPACE)
    vllm.start("pair", connector, **RANKS)
    want, _ = generate(vllm, "pair", prompts)
    vllm.stop("pair")

    vllm.start("next", connector, **RANKS)
    assert generate(vllm, "next", prompts) == (want, whole_blocks(prompts))
    assert vllm.call("next", "reset", connector=True)
    assert generate(vllm, "next", prompts[:1]) == (want[:1], [0])
    vllm.stop("next")

    before = len(vllm.host.log.read_text())
    vllm.start("single", connector)
    assert generate(vllm, "single", prompts[:1]) == (want[:1], [0])
    assert vllm.call("single", "metrics")["tier_lookup_unavailable"] > 0
    vllm.stop("single")
    (line,) = [line for line in vllm.host.log.read_text()[before:].splitlines() if "serves without the cache" in line]
    assert "namespace differs" in line


Prompts = list[list[int]]
SOME, OTHERS = slice(8), slice(8, 12)


class Plain(NamedTuple):
    """Prompts by turn of their sessions, and their tokens in an engine without Penstock."""

    prompts: list[Prompts]
    tokens: list[Prompts]
    updated: Prompts
    """The tokens of SOME of the last turn after a weight update."""


@pytest.fixture(scope="module")
def plain(vllm: Vllm, agents: list[Session], updated_model: Path) -> Plain:
    prompts = [[session.turns[k].prompt for session in agents[:30]] for k in range(4)]
    vllm.start("plain tier", None)
    tokens = [generate(vllm, "plain tier", turn)[0] for turn in prompts]
    vllm.call("plain tier", "update_weights", model=str(updated_model))
    assert vllm.call("plain tier", "reset")
    updated, _ = generate(vllm, "plain tier", prompts[-1][SOME])
    vllm.stop("plain tier")
    assert all(new != old for new, old in zip(updated, tokens[-1][SOME], strict=True))
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
    vllm.start("left", tier(kept, namespace=NAMESPACE, enable_kv_events=True, locality="REMOTE"), kv_events_config=events)
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
        assert serve(plain.prompts[0][SOME]) == plain.tokens[0][SOME]
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
    generate(vllm, left, plain.prompts[0][SOME])
    vllm.start("right", tier(kept, namespace=NAMESPACE))
    for prompts, tokens in zip(plain.prompts, plain.tokens, strict=True):
        for answers in vllm.both([left, "right"], prompts[SOME]):
            assert [a["tokens"] for a in answers] == tokens[SOME]
    seen = [vllm.call(name, "metrics") for name in (left, "right")]
    assert seen[1]["tier_load_rows"] > 0
    assert not any(one.get(f"tier_{name}", 0) for one in seen for name in FAILURES)

    # A store that is closed while the engine serves. The primary tier has none of these prompts.
    before = len(vllm.host.log.read_text())
    vllm.call("right", "close_stores")
    for k in (0, 1):
        assert generate(vllm, "right", plain.prompts[k][OTHERS])[0] == plain.tokens[k][OTHERS]
    failures = vllm.call("right", "metrics")
    vllm.stop("right")
    assert failures["tier_lookup_failed"] > 0
    lines = [line for line in vllm.host.log.read_text()[before:].splitlines() if "the store is closed" in line]
    assert len(lines) == 2, lines  # of the lookups and of the stores


def test_new_weights(vllm: Vllm, left: str, kept: penstock_testing.Node, plain: Plain, updated_model: Path) -> None:
    """After an update and a reset no row of the old weights is loaded, and rows of the new weights are."""
    prompts = plain.prompts[-1][SOME]
    assert generate(vllm, left, prompts)[0] == plain.tokens[-1][SOME]  # so the node has all rows of the old weights
    vllm.call(left, "update_weights", model=str(updated_model))
    assert vllm.call(left, "reset", connector=True)
    assert generate(vllm, left, prompts) == (plain.updated, [0] * len(prompts))

    vllm.start("updated", tier(kept, namespace=NAMESPACE))  # at the node's epoch
    vllm.call("updated", "update_weights", model=str(updated_model))
    assert generate(vllm, "updated", prompts) == (plain.updated, whole_blocks(prompts))
    vllm.stop("updated")


def test_a_full_node(vllm: Vllm, plain: Plain) -> None:
    """Neither the node nor the primary tier has room for all rows, so the node evicts rows that lookups may just have found."""
    with penstock_testing.node(capacity="16MiB", arena="8MiB") as node:
        vllm.start("crowded", tier(node, memory=8 << 20))
        for k in (2, 3):
            assert vllm.call("crowded", "reset")
            assert generate(vllm, "crowded", plain.prompts[k])[0] == plain.tokens[k]
        new = [prompt[::-1] for prompt in plain.prompts[3][:4]]
        want, cached = generate(vllm, "crowded", new)
        assert cached == [0] * len(new)
        seen = vllm.call("crowded", "metrics")
        vllm.stop("crowded")
        assert seen["tier_store_rows"] * ROW > 16 << 20
        assert 0 < blocks(node) * ROW < 16 << 20

        vllm.start("after", tier(node))
        assert generate(vllm, "after", new) == (want, whole_blocks(new))  # the node has the latest rows
        vllm.stop("after")


def test_a_stopped_node(vllm: Vllm, plain: Plain, node: penstock_testing.Node) -> None:
    """The node is stopped while requests run, and the sessions go on without it. The primary tier has not room for a turn of them."""
    turns = itertools.cycle(range(len(plain.prompts)))
    bounds = {"lookup_timeout": 2, "load_timeout": 2, "store_timeout": 2, "retry_interval": 0.5}
    vllm.start("stopped", tier(node, memory=8 << 20, **bounds))

    def run() -> dict[str, float]:
        """Generate for the next turn of the sessions, and return which events there were."""
        k = next(turns)
        before = vllm.call("stopped", "metrics")
        assert vllm.call("stopped", "reset")
        assert generate(vllm, "stopped", plain.prompts[k])[0] == plain.tokens[k]
        after = vllm.call("stopped", "metrics")
        return {name: after.get(f"tier_{name}", 0) - before.get(f"tier_{name}", 0) for name in ("load_rows", *FAILURES)}

    until(run, "load_rows")
    k = next(turns)
    assert vllm.call("stopped", "reset")
    vllm.host.submit("call", name="stopped", function="generate", prompts=plain.prompts[k], output=OUTPUT)
    node.pause()
    assert [answer["tokens"] for answer in vllm.host.result("call", timeout=600)] == plain.tokens[k]
    for events in while_stopped(node, run):
        assert events["load_rows"] == 0
        assert events["lookup_unavailable"] + events["lookup_failed"] > 0
    until(run, "load_rows")
    vllm.stop("stopped")


def test_a_node_that_refuses(vllm: Vllm, left: str, plain: Plain, kept: penstock_testing.Node) -> None:
    """A namespace of another dtype, and a node of another version: the engine serves without the tier, logs it once, and counts it."""
    prompts, tokens = plain.prompts[0][SOME], plain.tokens[0][SOME]
    with node_of_another_version() as other:
        cases: list[tuple[str, penstock_testing.Node, dict[str, Any], str]] = [
            ("narrow", kept, {"dtype": "bfloat16"}, "namespace differs"),
            ("older", other, {}, "run the same release"),
        ]
        for name, node, options, why in cases:
            before = len(vllm.host.log.read_text())
            vllm.start(name, tier(node, namespace=NAMESPACE), **options)
            got, cached = generate(vllm, name, prompts)
            assert got == tokens or options
            assert cached == [0] * len(prompts)
            assert vllm.call(name, "metrics")["tier_lookup_unavailable"] > 0
            vllm.stop(name)
            (line,) = [line for line in vllm.host.log.read_text()[before:].splitlines() if "serves without the cache" in line]
            assert why in line

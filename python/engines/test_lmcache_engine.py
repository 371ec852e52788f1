"""vLLM's engine with LMCache, whose L2 is Penstock: the same tokens, the expected objects, whatever happens to the node.

Two servers of LMCache, each with an engine, serve most tests. Nothing but the node is common to them.
"""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.faults import damage, penstock, until, while_stopped
from harness.lmcache import Chunks, LMCache, objects, wait, wait_until_stored
from harness.sessions import Session, turn
from harness.vllm import RANKS, Vllm, tokens_of

from penstock import testing

Servers = tuple[LMCache, LMCache]

LEFT, RIGHT = "left", "right"
OBJECT = 2**17  # 4 layers, 2 heads, K and V of 32 floats, for each of 64 tokens


@pytest.fixture(scope="module")
def servers(kept: testing.Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("lmcache")
    with ExitStack() as started:

        def start(name: str) -> LMCache:
            return started.enter_context(LMCache(kept.address, logs / name))

        with ThreadPoolExecutor() as threads:
            left, right = threads.map(start, (LEFT, RIGHT))
        yield left, right


@pytest.fixture(scope="module")
def engines(vllm: Vllm, servers: Servers) -> Iterator[Vllm]:
    """An engine on each of the servers."""
    for name, server in zip((LEFT, RIGHT), servers, strict=True):
        vllm.start(name, server.connector)
    yield vllm
    for name in (LEFT, RIGHT):
        vllm.stop(name)


def chunks(prompts: list[list[int]]) -> Chunks:
    found = Chunks()
    for prompt in prompts:
        found.add(prompt, [])
    return found


def forget(vllm: Vllm, engine: str, server: LMCache) -> None:
    """Empty the memory of an engine and of its server, so that they have nothing but the node."""
    assert vllm.call(engine, "reset")
    server.clear()


def test_sessions_across_processes(
    engines: Vllm, servers: Servers, kept: testing.Node, agents: list[Session], plain: list[list[list[int]]]
) -> None:
    """An engine and a server that have just started get each chunk of all sessions from the node, and the tokens are the same."""
    for k, tokens in enumerate(plain):
        assert tokens_of(engines.generate(LEFT, turn(agents, k))) == tokens
    stored = chunks([prompt for k in range(len(plain)) for prompt in turn(agents, k)])
    wait_until_stored(kept.address, len(stored))
    first = servers[0].events()
    assert (first["set_ok"], first["get_ok"]) == (len(stored), 0)

    for k, tokens in enumerate(plain):
        prompts = turn(agents, k)
        forget(engines, RIGHT, servers[1])
        before = servers[1].events()
        answers = engines.generate(RIGHT, prompts)
        assert tokens_of(answers) == tokens
        assert [a["cached"] for a in answers] == [stored.cached(p) for p in prompts]
        assert (servers[1].events() - before)["get_ok"] == len(chunks(prompts))
    second = servers[1].events()
    assert second["set_ok"] == 0
    assert objects(kept.address) == len(stored)


def test_two_engines_at_once(engines: Vllm, alone: Vllm, kept: testing.Node, agents: list[Session]) -> None:
    """Engines that look up, load and store the same objects at once have the same tokens, and each object is stored once."""
    before = objects(kept.address)
    turns = [[prompt[::-1] for prompt in turn(agents, k)[:8]] for k in range(4)]
    for prompts in turns:
        tokens = tokens_of(alone.generate("plain", prompts))
        assert [tokens_of(answers) for answers in engines.both([LEFT, RIGHT], prompts)] == [tokens, tokens]
    wait_until_stored(kept.address, before + len(chunks([prompt for prompts in turns for prompt in prompts])))


def test_two_ranks(vllm: Vllm, servers: Servers, kept: testing.Node, agents: list[Session], plain: list[list[list[int]]]) -> None:
    """Each rank has half of the heads, and objects of its own."""
    prompts, tokens = turn(agents, 1)[:8], plain[1][:8]
    before, stored = objects(kept.address), chunks(prompts)
    vllm.start("wide", servers[0].connector, **RANKS)
    answers = vllm.generate("wide", prompts)
    assert tokens_of(answers) == tokens
    assert [a["cached"] for a in answers] == [0] * len(prompts)
    wait_until_stored(kept.address, before + 2 * len(stored))
    vllm.stop("wide")

    seen = servers[1].events()
    vllm.start("wide again", servers[1].connector, **RANKS)
    answers = vllm.generate("wide again", prompts)
    assert tokens_of(answers) == tokens
    assert [a["cached"] for a in answers] == [stored.cached(p) for p in prompts]
    assert (servers[1].events() - seen)["get_ok"] == 2 * len(stored)
    vllm.stop("wide again")


def test_new_weights(
    engines: Vllm, alone: Vllm, servers: Servers, kept: testing.Node, agents: list[Session], updated_model: Path, tmp_path: Path
) -> None:
    """After a bump of the epoch no object of the old weights is found. A server that began before the bump stores none either."""
    prompts = [prompt[1:] for prompt in turn(agents, 3)[:8]]  # no other test has stored these
    before, stored = objects(kept.address), chunks(prompts)
    old = tokens_of(alone.generate("plain", prompts))
    alone.call("plain", "update_weights", model=str(updated_model))
    assert alone.call("plain", "reset")
    new = tokens_of(alone.generate("plain", prompts))
    alone.call("plain", "update_weights", model=alone.model)
    assert alone.call("plain", "reset")
    assert not any(a == b for a, b in zip(old, new, strict=True))

    def check(engine: str, server: LMCache, tokens: list[list[int]], cached: list[int]) -> None:
        forget(engines, engine, server)
        answers = engines.generate(engine, prompts)
        assert tokens_of(answers) == tokens
        assert [a["cached"] for a in answers] == cached

    nothing, everything = [0] * len(prompts), [stored.cached(p) for p in prompts]
    check(LEFT, servers[0], old, nothing)
    wait_until_stored(kept.address, before + len(stored))
    check(LEFT, servers[0], old, everything)
    for namespace in penstock("ns", "list", "--server", kept.address)["namespaces"]:
        if not namespace["name"].endswith("/lengths"):
            penstock("ns", "bump-epoch", namespace["name"], "--server", kept.address)
    engines.call(LEFT, "update_weights", model=str(updated_model))
    check(LEFT, servers[0], new, nothing)
    wait(lambda: servers[0].events()["set_refused"] == len(stored), f"{len(stored)} refused objects")
    check(LEFT, servers[0], new, nothing)

    with LMCache(kept.address, tmp_path / "renewed") as renewed:
        engines.start("renewed", renewed.connector)
        engines.call("renewed", "update_weights", model=str(updated_model))
        check("renewed", renewed, new, nothing)
        wait(lambda: renewed.events()["set_ok"] == len(stored), f"{len(stored)} objects")
        check("renewed", renewed, new, everything)
        assert renewed.events()["get_ok"] == len(stored)
        engines.stop("renewed")


def test_faults(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]], tmp_path: Path) -> None:
    """A node that stops, dies, is full, or has damaged its bytes costs time, no request and no token."""
    later = itertools.cycle([2, 3, 1])
    bounds = {"timeout": 4, "connect_timeout": 4, "retry_interval": 1}
    with (
        testing.node(capacity="16MiB", arena="8MiB") as node,
        LMCache(node.address, tmp_path / "log", signals=True, **bounds) as server,
    ):
        vllm.start("faulty", server.connector)

        def run(k: int = 1) -> Counter[str]:
            """Empty the memories of engine and server, generate for a turn, and return which events there were."""
            assert vllm.call("faulty", "reset", connector=True)
            before = server.events()
            assert tokens_of(vllm.generate("faulty", turn(agents, k)[:8])) == plain[k][:8]
            events = server.events() - before
            events["lost"] = events["get_lost"] + events["get_down"] + events["get_failed"]
            return events

        assert run()["get_ok"] == 0
        until(run, "get_ok")

        # Stopped between a lookup and its load. The sessions go on.
        server.signal_at_load(node.pid, signal.SIGSTOP)
        until(run, "lost")
        assert all(events["get_ok"] == 0 for events in while_stopped(node, lambda: run(next(later))))
        until(run, "get_ok")

        # Killed between a lookup and its load.
        server.signal_at_load(node.pid, signal.SIGKILL)
        until(run, "lost")
        assert run()["get_ok"] == 0
        node.kill()
        node.start()
        until(run, "get_ok")

        # A bit of each page on the disk is flipped. The node delivers none of the objects.
        node.stop()
        damage(node)
        node.start()
        until(run, "get_lost")
        # The engine computes the chunks again and stores them, until the node has no damaged object.
        until(lambda: {"good": (events := run())["get_ok"] * (not events["lost"])}, "good")

        # The node has not room for all objects, and evicts objects that lookups may just have found.
        before = server.events()
        for k in (1, 2, 3):
            assert vllm.call("faulty", "reset", connector=True)
            assert tokens_of(vllm.generate("faulty", turn(agents, k))) == plain[k]
        wait(lambda: (server.events() - before)["set_ok"] * OBJECT > 16 * 2**20, "stores of more than the node's capacity")
        assert objects(node.address) * OBJECT < 16 * 2**20
        run()
        vllm.stop("faulty")

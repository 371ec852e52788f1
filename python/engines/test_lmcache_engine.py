"""vLLM's engine with LMCache, whose L2 is Penstock: the same tokens and the expected objects.

Two servers of LMCache, each with an engine, serve the tests. Nothing but the node is common to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.lmcache import Chunks, LMCache, objects, wait_until_stored
from harness.sessions import Session, turn
from harness.vllm import RANKS, Vllm, tokens_of

from penstock import testing

Servers = tuple[LMCache, LMCache]

LEFT, RIGHT = "left", "right"


@pytest.fixture(scope="module")
def servers(kept: testing.Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("lmcache")
    with ThreadPoolExecutor() as threads:
        starts = [threads.submit(LMCache, kept.address, logs / name) for name in (LEFT, RIGHT)]
    with starts[0].result() as left, starts[1].result() as right:
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

"""A prefill/decode cluster of vLLM's servers whose hosts are network namespaces: agents' sessions, and faults in the middle of requests.

Every test ends each request with the tokens of one engine alone or with a refusal, and after each fault the cluster serves again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dualpath_cluster import BITS, PATIENCE, TOKEN_BYTES, Answer, Cluster, check, cluster, until
from harness.model import FIRST_TOKEN, VOCABULARY
from harness.sessions import Session
from harness.vllm import BLOCK, OUTPUT, Stored, Vllm

CLIENTS = 10
SLOW = BITS // 10
"""Rate of the storage NICs with which the reads of CLIENTS requests take seconds."""
LONG = 100
"""Output of requests that meet a fault while they decode."""


class Alone:
    """One vLLM without Penstock, for each version of the weights."""

    def __init__(self, vllm: Vllm) -> None:
        self._vllm = vllm
        self.models: list[str] = []

    def tokens(self, prompts: list[list[int]], output: int = OUTPUT, model: str = "") -> list[list[int]]:
        model = model or self._vllm.model
        if model not in self.models:
            self._vllm.start(f"alone {model}", None, model=Path(model), enable_prefix_caching=False)
            self.models.append(model)
        return [answer["tokens"] for answer in self._vllm.generate(f"alone {model}", prompts, output)]


@pytest.fixture(scope="module")
def alone(vllm: Vllm) -> Iterator[Alone]:
    engine = Alone(vllm)
    yield engine
    for model in engine.models:
        vllm.stop(f"alone {model}")


@pytest.fixture(scope="module")
def faulty(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that all tests of faults harm, one after the other."""
    with cluster(vllm, tmp_path_factory.mktemp("1P2D"), ["p0", "d0", "d1"], nodes=2) as c:
        yield c


@pytest.fixture
def trio(faulty: Cluster) -> Cluster:
    """The same, repaired."""
    faulty.repair()
    return faulty


class Turns:
    """A turn of CLIENTS sessions, which the cluster has served and stored, and the next one, which continues it."""

    def __init__(self, c: Cluster, alone: Alone, agents: list[Session], number: int, output: int = OUTPUT) -> None:
        some = [agents[(number * CLIENTS + i) % len(agents)] for i in range(CLIENTS)]
        first = [max((turn.prompt for turn in s.turns), key=len) for s in some]
        tokens = alone.tokens(first, model=c.model)
        assert check(c.serve(first), tokens) == {"right": CLIENTS}
        until(lambda: c.metric(c.planner, "penstock_planner_serving_requests") == 0, "end of the first turn")
        tails = [FIRST_TOKEN + (number * CLIENTS + i) % (VOCABULARY - FIRST_TOKEN) for i in range(CLIENTS)]
        self.prompts = [[*p, *t, *[tail] * BLOCK] for p, t, tail in zip(first, tokens, tails, strict=True)]
        self.output = output
        self.tokens = alone.tokens(self.prompts, output, c.model)
        assert len(set(map(tuple, self.tokens))) == CLIENTS


def in_the_middle(c: Cluster, turns: Turns, fault: Callable[[], None], *, decoding: bool = False) -> list[Answer]:
    """Begin the requests, cause the fault while storage is read or while streams get tokens, and return what the clients got."""
    c.limit(BITS if decoding else SLOW)
    batch = c.begin(turns.prompts, turns.output, stream=decoding)
    if decoding:
        assert batch.generating.wait(PATIENCE)
    else:
        until(c.reading, "read of a prefix")
    assert batch.ended() < CLIENTS
    fault()
    return batch.answers()


def serves(c: Cluster, turns: Turns) -> None:
    """Check that the cluster serves the requests with the tokens of one engine alone."""
    assert check(c.serve(turns.prompts, turns.output), turns.tokens) == {"right": CLIENTS}


@pytest.mark.parametrize("names", [["p0", "d0"], ["p0", "d0", "d1"]], ids=["1P1D", "1P2D"])
def test_sessions(
    vllm: Vllm, alone: Alone, agents: list[Session], names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All turns of all sessions have the tokens of one engine alone. Each turn's KV is stored once and found by the next one.

    Each side's storage NIC carries what the planner had it read.
    """
    stored = Stored()
    found = 0
    with cluster(vllm, tmp_path, names) as c:
        before = {name: engine.host.storage.received() for name, engine in c.engines.items()}
        for k in range(len(agents[0].turns)):
            prompts = [session.turns[k].prompt for session in agents]
            tokens = alone.tokens(prompts)
            found += sum(stored.cached(prompt) for prompt in prompts)
            assert check(c.serve(prompts, clients=CLIENTS), tokens) == {"right": len(agents)}
            for prompt, answer in zip(prompts, tokens, strict=True):
                stored.add(prompt, answer)
            until(lambda: c.stored() == len(stored), "blocks of this turn in the node")
        assert c.stored("penstock_write_blocks_total") == len(stored)  # each once
        assert c.metric(c.gateway, "penstock_gateway_hit_tokens_total") == found
        for events in ("attempts_failed", "load_failures", "failed_blocks", "dropped_blocks", "unavailable", "unnamed"):
            assert {name: engine.event(events) for name, engine in c.engines.items()} == dict.fromkeys(names, 0), events
        read = {side: c.metric(c.planner, "penstock_planner_read_tokens_total", f'side="{side}"') for side in ("prefill", "decode")}
        carried = {name: engine.host.storage.received() - before[name] for name, engine in c.engines.items()}
    with capsys.disabled():
        print(f"\n{len(names)} engines: tokens found {found}, tokens read {read}, bytes of storage NICs {carried}")
    # A part that its side reads slowly is ordered again from the other side.
    assert found <= sum(read.values()) <= 1.5 * found
    sides = {"prefill": carried["p0"], "decode": sum(count for name, count in carried.items() if name != "p0")}
    assert sum(sides.values()) >= TOKEN_BYTES * found
    for side, count in sides.items():
        assert count <= 1.3 * TOKEN_BYTES * read[side]
        assert count >= 0.2 * sum(sides.values())
    assert min(carried.values()) >= 0.1 * sum(carried.values())


def test_prefill_engine_killed(trio: Cluster, alone: Alone, agents: list[Session]) -> None:
    """The requests wait for the engine that is started in its place."""
    turns = Turns(trio, alone, agents, 0)

    def fault() -> None:
        trio.engines["p0"].kill()
        trio.limit(BITS)
        trio.start_engines()

    assert check(in_the_middle(trio, turns, fault), turns.tokens) == {"right": CLIENTS}
    serves(trio, turns)


def test_decode_engine_killed(trio: Cluster, alone: Alone, agents: list[Session]) -> None:
    """The other decode engine takes the requests, and goes on with all that follow."""
    turns = Turns(trio, alone, agents, 1)

    def fault() -> None:
        trio.engines["d0"].kill()
        trio.limit(BITS)

    assert check(in_the_middle(trio, turns, fault), turns.tokens) == {"right": CLIENTS}
    serves(trio, turns)
    trio.repair()
    serves(trio, turns)


def test_decode_engine_killed_while_it_answers(trio: Cluster, alone: Alone, agents: list[Session]) -> None:
    """A stream that has begun on the engine ends early, with the tokens that are right. The others are whole."""
    turns = Turns(trio, alone, agents, 2, LONG)
    found = check(in_the_middle(trio, turns, trio.engines["d1"].kill, decoding=True), turns.tokens)
    assert found["refused"] == 0
    assert found["right"]
    trio.repair()
    serves(trio, turns)

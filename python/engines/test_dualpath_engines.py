"""A prefill/decode cluster of vLLM's servers whose hosts are network namespaces: agents' sessions, and faults in the middle of requests.

Every test ends each request with the tokens of one engine alone or with a refusal, and after each fault the cluster serves again.
"""

from __future__ import annotations

import base64
import io
import json
import string
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from dualpath_cluster import BITS, PATIENCE, TOKEN_BYTES, Answer, Chat, Cluster, check, cluster, request, until
from harness.faults import damage
from harness.model import FIRST_TOKEN, IMAGE_TOKENS, VOCABULARY, make_adapter, make_lfm2, make_llava
from harness.sessions import Session
from harness.vllm import BLOCK, LFM2, OUTPUT, Snapshots, Stored, Vllm

CLIENTS = 10
SLOW = BITS // 40
"""Rate of the storage NICs with which the reads of CLIENTS requests take tens of seconds."""
LONG = 100
"""Output of requests that meet a fault while they decode."""


class Alone:
    """One vLLM without Penstock, for each version of the weights."""

    def __init__(self, vllm: Vllm, **options: Any) -> None:
        self._vllm = vllm
        self._options = options
        self.models: list[str] = []

    def tokens(self, prompts: list[list[int]], output: int = OUTPUT, model: str = "") -> list[list[int]]:
        model = model or self._vllm.model
        if model not in self.models:
            self._vllm.start(f"alone {model}", None, model=Path(model), enable_prefix_caching=False, **self._options)
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
        self.first = list(zip(first, tokens, strict=True))
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


def text(length: int, seed: int) -> dict[str, Any]:
    """Return a part of a chat of ``length`` tokens."""
    return {"type": "text", "text": "".join(Random(seed).choices(string.ascii_letters, k=length))}


def image(seed: int) -> dict[str, Any]:
    """Return a part of a chat: an image of 64 x 64 random pixels, which takes IMAGE_TOKENS tokens."""
    from PIL import Image

    png = io.BytesIO()
    Image.frombytes("RGB", (64, 64), Random(seed).randbytes(64 * 64 * 3)).save(png, "PNG")
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()}}


def replans(c: Cluster) -> float:
    return c.metric(c.planner, "penstock_planner_replans_total")


def serves(c: Cluster, turns: Turns) -> None:
    """Check that the cluster serves the requests with the tokens of one engine alone."""
    assert check(c.serve(turns.prompts, turns.output), turns.tokens) == {"right": CLIENTS}


def serve_sessions(c: Cluster, alone: Alone, agents: list[Session], capsys: pytest.CaptureFixture[str]) -> None:
    """Check that all turns of all sessions have the tokens of one engine alone, and that each turn finds the KV of the turns before.

    Each block is stored once, in all shards. Each side's storage NIC carries what the planner had it read.
    """
    stored = Stored()
    found = 0
    names = list(c.engines)
    before = {name: engine.host.storage.received() for name, engine in c.engines.items()}
    for k in range(len(agents[0].turns)):
        prompts = [session.turns[k].prompt for session in agents]
        tokens = alone.tokens(prompts)
        found += sum(stored.cached(prompt) for prompt in prompts)
        assert check(c.serve(prompts, clients=CLIENTS), tokens) == {"right": len(agents)}
        for prompt, answer in zip(prompts, tokens, strict=True):
            stored.add(prompt, answer)
        until(lambda: c.stored() == c.shards * len(stored), "blocks of this turn in the node")
    assert c.stored("penstock_write_blocks_total") == c.shards * len(stored)  # each once
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


def test_sessions(vllm: Vllm, alone: Alone, agents: list[Session], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(vllm, tmp_path, ["p0", "d0"]) as c:
        serve_sessions(c, alone, agents, capsys)


def test_ranks(vllm: Vllm, alone: Alone, agents: list[Session], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of two decode engines has two ranks. Then one of these ranks is killed.

    Its engine ends, and the other decode engine takes the requests until the first one is started again.
    """
    with cluster(vllm, tmp_path, ["p0", "d0", "d1"], wide=["d0"]) as c:
        serve_sessions(c, alone, agents, capsys)
        turns = Turns(c, alone, agents, 0)
        before = replans(c)

        def fault() -> None:
            c.engines["d0"].kill_rank(1)
            c.limit(BITS)

        assert check(in_the_middle(c, turns, fault), turns.tokens) == {"right": CLIENTS}
        assert replans(c) > before
        c.repair()
        serves(c, turns)
        assert c.engines["d0"].event("attempts") > 0


def test_ranks_with_state_killed(vllm: Vllm, agents: list[Session], tmp_path: Path) -> None:
    """The engines of a model with recurrent state have two ranks, but for one decode engine, whose rank has the state of both. While
    storage is read, one rank of each wide engine is killed, and vLLM ends these engines. A prefill engine that is started again and the
    other decode engine serve the requests. A prefix is found exactly up to the last state that was stored. The engines have the same names
    as in ``faulty``, so this test runs before that cluster starts.
    """
    model = str(make_lfm2(tmp_path / "model"))
    alone = Alone(vllm, **LFM2)
    (tmp_path / "cluster").mkdir()
    with cluster(vllm, tmp_path / "cluster", ["p0", "d0", "d1"], wide=["p0", "d0"], model=model, hybrid=True) as c:
        turns = Turns(c, alone, agents, 0)
        assert min(engine.event("attempts") for engine in c.engines.values()) > 0
        vllm.stop(f"alone {model}")
        before = replans(c)
        states = Snapshots()
        for prompt, tokens in turns.first:
            states.add(prompt, tokens)
        wanted = sum(states.cached(prompt) for prompt in turns.prompts)

        def found() -> float:
            return c.metric(c.gateway, "penstock_gateway_hit_tokens_total")

        assert found() == 0

        def fault() -> None:
            c.engines["d0"].kill_rank(0)
            c.engines["p0"].kill_rank(1)
            c.limit(BITS)
            c.engines["p0"].start(model)
            c.engines["p0"].wait()

        assert check(in_the_middle(c, turns, fault), turns.tokens) == {"right": CLIENTS}
        assert replans(c) > before
        assert found() == wanted > 0
        until(lambda: c.metric(c.planner, "penstock_planner_serving_requests") == 0, "end of the second turn")
        serves(c, turns)
        assert found() - wanted == sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in turns.prompts)


def test_images(vllm: Vllm, tmp_path: Path) -> None:
    """Chats with images are planned. A chat finds the KV of an earlier chat up to the end of its last common part, and with another image
    up to the text before the image. With a LoRA adapter that changes the encoder of images it finds only the KV of that adapter. As in the
    test before, the engines have the same names as in ``faulty``.
    """
    model = make_llava(tmp_path / "model")
    before, between, after, elsewhere = text(50, 1), text(40, 2), text(30, 3), text(100, 4)
    one, other = image(1), image(2)
    # The image takes the tokens from 50 on, from the second to the fourth block, and the other one those from 155 on.
    first, second = [before, one, between], [before, one, between, other, after]
    found = [
        ("tiny", first, 0),
        ("tiny", second, (50 + IMAGE_TOKENS + 40) // BLOCK * BLOCK),
        ("tiny", [before, other, between], 50 // BLOCK * BLOCK),
        ("tiny", second, (50 + 2 * IMAGE_TOKENS + 40 + 30) // BLOCK * BLOCK),
        ("tiny", [elsewhere, one, one, after], 0),
        ("tiny", [elsewhere, one, other, after], (100 + IMAGE_TOKENS) // BLOCK * BLOCK),
        ("red", first, 0),
        ("red", second, (50 + IMAGE_TOKENS + 40) // BLOCK * BLOCK),
    ]
    chats: list[Chat] = [[{"role": "user", "content": parts}] for _, parts, _ in found]
    adapter = str(make_adapter(tmp_path / "red", model, seed=1))
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_tower_connector_lora": True}
    vllm.start("images alone", None, model=model, limit_mm_per_prompt={"image": 2}, enable_prefix_caching=False, **lora)
    red = {"lora_name": "red", "lora_int_id": 1, "lora_path": adapter}
    adapters = [red if name == "red" else None for name, _, _ in found]
    tokens: list[list[int]] = vllm.call("images alone", "chat", chats=chats, adapters=adapters, output=OUTPUT)
    vllm.stop("images alone")
    assert len(set(map(tuple, tokens))) == len({(name, json.dumps(parts)) for name, parts, _ in found})
    (tmp_path / "cluster").mkdir()
    options = ["--enable-scale-out", "--limit-mm-per-prompt", json.dumps({"image": 2}), "--lora-modules", f"red={adapter}"]
    options += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--enable-tower-connector-lora"]
    with cluster(vllm, tmp_path / "cluster", ["p0", "d0"], model=str(model), options=options) as c:
        question = {"model": "tiny", "messages": chats[0], "mm_payload": "none"}
        status, rendered = request(c.control, c.engines["d0"].address, "/v1/chat/completions/render", question)
        assert (status, json.loads(rendered)["features"]["kwargs_data"]) == (200, None)  # no pixels
        for k, ((name, _, hit), chat, wanted) in enumerate(zip(found, chats, tokens, strict=True)):
            before_it = c.metric(c.gateway, "penstock_gateway_hit_tokens_total")
            answer = c.complete(chat, OUTPUT, threading.Event() if k % 2 else None, name)
            assert check([answer], [wanted]) == {"right": 1}
            until(lambda: c.metric(c.planner, "penstock_planner_serving_requests") == 0, "end of the chat")
            assert c.metric(c.gateway, "penstock_gateway_hit_tokens_total") - before_it == hit, k
        until(
            lambda: c.metric(c.gateway, "penstock_gateway_planned_requests_total", 'outcome="done"') == len(chats),
            "end of all chats at the gateway",
        )
        assert media_errors(c) == (0, 0)
        for events in ("attempts_failed", "load_failures", "failed_blocks", "dropped_blocks", "unavailable", "unnamed"):
            assert {name: engine.event(events) for name, engine in c.engines.items()} == {"p0": 0, "d0": 0}, events


def media_errors(c: Cluster) -> tuple[float, float]:
    """Return how many chats with images were not planned, and how many questions about them failed."""
    counts = [c.metric(c.gateway, f"penstock_gateway_{name}_total") for name in ("unplanned_requests", "render_errors")]
    return counts[0], counts[1]


def test_images_without_scale_out(trio: Cluster) -> None:
    """Engines that are not started with --enable-scale-out send no hashes, and are asked once. The client gets the answer of one engine,
    whose model has no images.
    """
    unplanned, errors = media_errors(trio)
    for _ in range(3):
        answer = trio.complete([{"role": "user", "content": [image(1)]}])
        assert answer.status == 400, answer
    assert media_errors(trio) == (unplanned + 3, errors + 1)


def test_logprobs_of_a_prompt(trio: Cluster, agents: list[Session]) -> None:
    """One engine computes the whole prompt of a request for its logprobs, although its KV is stored. The engines go on serving."""
    prompt = agents[0].turns[0].prompt
    first = trio.complete(prompt)
    until(lambda: trio.metric(trio.planner, "penstock_planner_serving_requests") == 0, "end of the request")
    before = trio.metric(trio.planner, "penstock_planner_read_tokens_total")
    body = {"model": "tiny", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, text = request(trio.control, trio.gateway.address, "/v1/completions", {**body, "prompt_logprobs": 0})
    assert status == 200, text
    (choice,) = json.loads(text)["choices"]
    assert choice["token_ids"] == first.tokens
    logprobs = [next(iter(one.values()))["logprob"] for one in choice["prompt_logprobs"][1:]]
    assert len(logprobs) == len(prompt) - 1
    assert len(set(logprobs)) > len(prompt) // 2  # they were computed
    assert all(logprob <= 0 for logprob in logprobs)
    assert trio.metric(trio.planner, "penstock_planner_read_tokens_total") == before
    assert trio.complete(prompt).tokens == first.tokens


def test_prompt_of_one_token(trio: Cluster, alone: Alone) -> None:
    """The decode engine computes the prompt."""
    prompts = [[FIRST_TOKEN], [FIRST_TOKEN + 1, FIRST_TOKEN]]
    assert check(trio.serve(prompts), alone.tokens(prompts)) == {"right": 2}


def test_prefill_engine_killed(trio: Cluster, alone: Alone, agents: list[Session]) -> None:
    """The requests wait for the engine that is started in its place."""
    turns = Turns(trio, alone, agents, 0)
    before = replans(trio)

    def fault() -> None:
        trio.engines["p0"].kill()
        trio.limit(BITS)
        trio.start_engines()

    assert check(in_the_middle(trio, turns, fault), turns.tokens) == {"right": CLIENTS}
    assert replans(trio) > before
    serves(trio, turns)


def test_decode_engine_killed(trio: Cluster, alone: Alone, agents: list[Session]) -> None:
    """The other decode engine takes the requests, and all later ones."""
    turns = Turns(trio, alone, agents, 1)
    before = replans(trio)

    def fault() -> None:
        trio.engines["d0"].kill()
        trio.limit(BITS)

    assert check(in_the_middle(trio, turns, fault), turns.tokens) == {"right": CLIENTS}
    assert replans(trio) > before
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


def test_storage_node_killed(trio: Cluster, alone: Alone, agents: list[Session]) -> None:
    """What one of two nodes has is computed while the node is away, and is computed again when its disk is damaged."""
    turns = Turns(trio, alone, agents, 3)
    node = trio.nodes[0]

    def fault() -> None:
        node.kill()
        trio.limit(BITS)

    found = check(in_the_middle(trio, turns, fault), turns.tokens)
    assert found["right"] + found["refused"] == CLIENTS
    serves(trio, turns)
    damage(node)
    trio.repair()

    def found_damage() -> bool:
        serves(trio, turns)
        return trio.metric(node, "penstock_corrupt_blocks_total") > 0

    until(found_damage, "damaged block")  # gateway and engines leave the node alone for some seconds after its end


def test_all_storage_nodes_killed(trio: Cluster, alone: Alone, agents: list[Session]) -> None:
    """Requests that meet the end of storage are computed or refused. When the nodes are back, what they had is found."""
    turns = Turns(trio, alone, agents, 4)

    def fault() -> None:
        for node in trio.nodes:
            node.kill()
        trio.limit(BITS)
        for node in trio.nodes:
            trio.start(node)

    found = check(in_the_middle(trio, turns, fault), turns.tokens)
    assert found["right"] + found["refused"] == CLIENTS
    trio.repair()
    before = trio.metric(trio.gateway, "penstock_gateway_hit_tokens_total")

    def hits() -> bool:
        serves(trio, turns)
        return trio.metric(trio.gateway, "penstock_gateway_hit_tokens_total") > before

    until(hits, "hits")


def test_planner_killed(trio: Cluster, alone: Alone, agents: list[Session]) -> None:
    """The running attempts continue, and requests that arrive meanwhile wait until the planner is started again."""
    turns = Turns(trio, alone, agents, 5)

    def fault() -> None:
        trio.planner.kill()
        trio.limit(BITS)
        trio.start(trio.planner)

    assert check(in_the_middle(trio, turns, fault), turns.tokens) == {"right": CLIENTS}
    trio.repair()
    serves(trio, turns)


@pytest.mark.parametrize("how", ["restarted", "killed", "stopped"])
def test_gateway(trio: Cluster, alone: Alone, agents: list[Session], how: str) -> None:
    """A gateway that gets SIGTERM answers the requests that it has. After SIGKILL the clients send theirs again. SIGSTOP delays them."""
    turns = Turns(trio, alone, agents, 6)

    def fault() -> None:
        if how == "killed":
            trio.gateway.kill()
        elif how == "stopped":
            trio.gateway.pause()
        trio.limit(BITS)
        if how == "stopped":
            until(lambda: not trio.reading(), "end of all reads")
            trio.gateway.resume()
            return
        if how == "restarted":
            trio.gateway.stop()
        trio.start(trio.gateway)

    answers = in_the_middle(trio, turns, fault)
    assert check(answers, turns.tokens) == {"right": CLIENTS}
    assert (how == "killed") == any(answer.broken for answer in answers)
    trio.repair()
    serves(trio, turns)


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_storage_cable_pulled(trio: Cluster, alone: Alone, agents: list[Session], name: str) -> None:
    """The other side reads, or the prefill engine computes, what the engine without a storage NIC was to read."""
    turns = Turns(trio, alone, agents, 7)

    def fault() -> None:
        trio.engines[name].host.storage.unplug()
        trio.limit(BITS)

    found = check(in_the_middle(trio, turns, fault), turns.tokens)
    assert found["right"] + found["refused"] == CLIENTS
    trio.repair()
    serves(trio, turns)


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_slow_storage_nic(trio: Cluster, alone: Alone, agents: list[Session], name: str) -> None:
    """A NIC that becomes slow costs time, and no request."""
    turns = Turns(trio, alone, agents, 8)

    def fault() -> None:
        for engine in trio.engines.values():
            if engine.name != name:
                engine.host.storage.limit(BITS)

    assert check(in_the_middle(trio, turns, fault), turns.tokens) == {"right": CLIENTS}
    trio.repair()
    serves(trio, turns)


def test_epoch_bumped(trio: Cluster, alone: Alone, agents: list[Session]) -> None:
    """With the policy recompute requests that are not prefilled yet are planned again, without their prefix."""
    turns = Turns(trio, alone, agents, 9)

    def fault() -> None:
        trio.update(trio.bump("recompute", wait=False))
        trio.limit(BITS)

    found = check(in_the_middle(trio, turns, fault), turns.tokens)
    assert found["right"] + found["refused"] == CLIENTS
    trio.repair()
    serves(trio, turns)


@pytest.mark.parametrize("policy", ["finish", "abort"])
def test_new_weights(trio: Cluster, alone: Alone, agents: list[Session], updated_model: Path, vllm: Vllm, policy: str) -> None:
    """Each answer has the tokens of the old or of the new weights, and after the update of the new ones only."""
    turns = Turns(trio, alone, agents, 10)
    other = vllm.model if trio.model == str(updated_model) else str(updated_model)
    new = alone.tokens(turns.prompts, model=other)
    assert all(a != b for a, b in zip(new, turns.tokens, strict=True))

    def fault() -> None:
        if policy == "finish":
            trio.limit(BITS)
        epoch = trio.bump(policy, wait=True)
        trio.limit(BITS)
        trio.update(epoch, other)

    answers = in_the_middle(trio, turns, fault)
    found = check(answers, turns.tokens, new)
    assert found["right"] + found["refused"] == CLIENTS
    if policy == "finish":
        assert found["right"] == CLIENTS
    else:
        assert any("weights_changed" in answer.text for answer in answers if answer.refused)
    trio.repair()
    assert check(trio.serve(turns.prompts), new) == {"right": CLIENTS}

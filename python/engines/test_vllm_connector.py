"""PenstockConnector in vLLM's own engine."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from harness.faults import damage, namespaces, node_of_another_version, until, while_stopped
from harness.model import FIRST_TOKEN, VOCABULARY, make_deepseek, make_lfm2, make_llama, make_llama4, make_mamba
from harness.process import EngineError
from harness.sessions import Session, turn
from harness.vllm import BLOCK, LFM2, OUTPUT, RANKS, Snapshots, Stored, Vllm, connector, tokens_of

from penstock import InvalidError, testing


def test_signatures(vllm: Vllm) -> None:
    """An engine that has changed what the connector implements or uses is noticed here first."""
    assert vllm.host.call("drift") == []
    version = vllm.host.call("version")
    page = Path(__file__).parents[2] / "docs" / "engines.md"
    assert f"| {version} (" in page.read_text(), f"docs/engines.md has no row for vLLM {version}"


def test_layouts(vllm: Vllm) -> None:
    """What would not be stored whole is refused by name, before the engine serves."""
    found = vllm.host.call("layouts")
    taken = [name for name, why in found.items() if not why]
    assert taken == [
        "two layers",
        "a layer that shares another's",
        "K and V apart",
        "blocks of tokens",
        "heads apart",
        "two groups",
        "chunks of attention",
        "recurrent state",
        "chunks without the hybrid manager",
        "a sliding window",
    ]
    kinds = (
        "; PenstockConnector stores full attention, MLA, sliding windows, chunked attention and snapshots of recurrent state:"
        " start the engine "
    )
    words = {
        "a second pool": "layer indexer has a KV cache of its own",
        "tensors of state": "layer b registers a list",
        "recurrent state alone": "layer b has recurrent state (MambaSpec), and no layer of the model has full attention",
        "recurrent state without snapshots": 'layer b has recurrent state (MambaSpec) in the cache mode "none"'
        + kinds
        + "with --enable-prefix-caching or without PenstockConnector",
        "recurrent state of drafts": "layer b has recurrent state (MambaSpec) and blocks for drafts"
        + kinds
        + "without speculative decoding or without PenstockConnector",
        "recurrent state with checkpoints": "layer b has recurrent state (MambaSpec) of MAMBA2, with checkpoints within a step"
        + kinds
        + "without PenstockConnector",
        "an encoder": "layer b has attention to an encoder (CrossAttentionSpec)" + kinds + "without PenstockConnector",
        "one kind of two sizes": "layer b has 32768 bytes a block, and a has 16384, in 1 and 1 pieces",
        "a layer without a tensor": "layer b has no KV cache",
        "two layers in one place": "layer a: block",
        "K and V apart in one layer": "layer b has 16384 bytes a block, and a has 16384, in 1 and 2 pieces",
        "smaller blocks of the kernel": "layer a: shape [16, 2, 32, 64]",
        "rows apart": "layer a: 252 contiguous bytes in a block of 32 tokens",
        "layers of two sizes": "layer b has 32768 bytes a block, and a has 16384",
        "a device": "layer a is on device meta",
        "groups with blocks of two sizes": "blocks of [16, 32] tokens",
    }
    assert sorted([*taken, *words]) == sorted(found)
    for name, word in words.items():
        assert word in found[name], found[name]


def test_a_model_without_attention(vllm: Vllm, node: testing.Node, tmp_path: Path) -> None:
    """The engine ends at its start with one error, and has made no namespace."""
    refused = (
        r"InvalidError: layer backbone\.layers\.0\.mixer has recurrent state \(MambaSpec\), and no layer of the model has full attention;"
        r".* start the engine without PenstockConnector"
    )
    with pytest.raises(EngineError, match=refused):
        vllm.start("recurrent", connector(node), model=make_mamba(tmp_path))
    assert namespaces(node) == {}


# The tiny model has 4 layers, so that a load is 4 reads.
LAYERS = {"load": "layers", "layers_per_read": 1}
both_loads = pytest.mark.parametrize("load", [{}, LAYERS], ids=["async", "layers"])


@both_loads
def test_sessions_across_processes(
    vllm: Vllm, agents: list[Session], plain: list[list[list[int]]], updated_model: Path, load: dict[str, Any]
) -> None:
    turns = range(len(plain))
    with testing.node() as node:
        vllm.start("first", connector(node))
        stored = Stored()
        for k in turns:
            answers = vllm.generate("first", turn(agents, k))
            assert tokens_of(answers) == plain[k]
            for prompt, answer in zip(turn(agents, k), answers, strict=True):
                stored.add(prompt, answer["tokens"])
        seen = vllm.call("first", "counters")
        assert seen["dropped_blocks"] == seen["save_failures"] == seen["unavailable"] == 0
        vllm.stop("first")

        # A fresh process has nothing but the node.
        vllm.start("second", connector(node, **load))
        for k in turns:
            prompts = turn(agents, k)
            answers = vllm.generate("second", prompts)
            assert tokens_of(answers) == plain[k]
            assert [a["cached"] for a in answers] == [stored.cached(p) for p in prompts]
        seen = vllm.call("second", "counters")
        assert seen["hit_tokens"] > 0
        assert seen["load_failures"] == seen["failed_blocks"] == seen["dropped_blocks"] == 0
        assert seen["loaded_bytes"] * BLOCK == seen["hit_tokens"] * 2**16  # 4 layers, 2 heads, K and V of 32 floats: 64 KiB a block
        assert vllm.call("second", "metrics")["hit_tokens"] == seen["hit_tokens"]

        # Another cache salt is another prompt.
        prompts = turn(agents, 0)[:2]
        salted = vllm.generate("second", prompts, salts=["a", None])
        assert [a["cached"] for a in salted] == [0, stored.cached(prompts[1])]

        # After a weight update nothing comes from the store, and the tokens are those of the new weights.
        vllm.call("plain", "update_weights", model=str(updated_model))
        vllm.call("second", "update_weights", model=str(updated_model))
        assert vllm.call("plain", "reset")
        assert vllm.call("second", "reset", connector=True)
        new = vllm.generate("plain", prompts)
        assert tokens_of(new) != plain[0][:2]
        answers = vllm.generate("second", prompts)
        assert tokens_of(answers) == tokens_of(new)
        assert [a["cached"] for a in answers] == [0, 0]
        # The engine stores the blocks that it computes from here on at the new epoch.
        assert vllm.call("second", "reset")
        assert [a["cached"] for a in vllm.generate("second", prompts)] == [stored.cached(p) for p in prompts]

        # The hook for collective_rpc. An epoch that has begun is no error, so that every engine may call it.
        assert vllm.call("second", "reset")
        assert vllm.call("second", "new_weights", version=7) == [7]
        assert vllm.call("second", "new_weights", version=7) == [7]
        vllm.generate("second", [[5] * 40])  # the scheduler learns of it in its next step
        answers = vllm.generate("second", prompts)
        assert [a["cached"] for a in answers] == [0, 0]
        vllm.call("plain", "update_weights", model=vllm.model)
        assert vllm.call("plain", "reset")
        vllm.stop("second")


def test_requests_that_name_their_epoch(
    alone: Vllm, agents: list[Session], plain: list[list[list[int]]], updated_model: Path, node: testing.Node
) -> None:
    """Engines get new weights one after the other. Each finds and stores blocks of its own weights, without a call into the connector."""
    vllm, some = alone, slice(4)
    prompts, longer = (turn(agents, k)[some] for k in (0, 1))
    old, new = Stored(), Stored()

    def check(engine: str, epoch: int, prompts: list[list[int]], tokens: list[list[int]], stored: Stored) -> None:
        answers = vllm.generate(engine, prompts, epoch=epoch)
        assert tokens_of(answers) == tokens
        assert [a["cached"] for a in answers] == [stored.cached(p) for p in prompts]
        for prompt, answer in zip(prompts, tokens, strict=True):
            stored.add(prompt, answer)

    def update(engine: str) -> None:
        vllm.call(engine, "update_weights", model=str(updated_model))
        assert vllm.call(engine, "reset")

    for engine in ("slow", "fast"):
        vllm.start(engine, connector(node, live_epochs=2))
        check(engine, 5, prompts, plain[0][some], old)
    update("plain")
    update("fast")
    tokens = tokens_of(vllm.generate("plain", prompts))
    check("fast", 6, prompts, tokens, new)
    assert vllm.call("slow", "reset")
    check("slow", 5, longer, plain[1][some], old)
    vllm.start("restarted", connector(node, live_epochs=2))  # with the old weights
    check("restarted", 5, longer, plain[1][some], old)
    update("slow")
    check("slow", 6, prompts, tokens, new)

    vllm.generate("slow", [[5] * 40], epoch=7)
    assert vllm.call("restarted", "reset")
    check("restarted", 5, prompts, plain[0][some], Stored())
    assert vllm.call("restarted", "counters")["unavailable"] == len(prompts)
    for engine in ("slow", "fast", "restarted"):
        assert vllm.call(engine, "counters")["dropped_blocks"] == 0
        vllm.stop(engine)
    vllm.call("plain", "update_weights", model=vllm.model)
    assert vllm.call("plain", "reset")


@both_loads
def test_faults(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]], load: dict[str, Any]) -> None:
    """A node that stops, dies, or has damaged its bytes costs time, no request and no token. Nothing wrong is stored."""
    agents = agents[:8]
    prompts, tokens = turn(agents, 1), plain[1][:8]
    later = itertools.cycle([2, 3, 1])
    with testing.node() as node:
        vllm.start("faulty", connector(node, load_timeout=4, save_timeout=4, lookup_timeout=2, retry_interval=2, **load))

        def run(k: int = 1) -> dict[str, int]:
            """Let the engine have nothing but the node, generate for a turn, and return which events there were."""
            assert vllm.call("faulty", "reset")
            before = vllm.call("faulty", "counters")
            assert tokens_of(vllm.generate("faulty", turn(agents, k))) == plain[k][:8]
            after = vllm.call("faulty", "counters")
            return {name: after[name] - before[name] for name in after}

        assert run()["hit_tokens"] == 0
        until(run, "hit_tokens")

        # Stopped between a lookup and its load: the load ends at its time limit, and the sessions go on while the node is stopped.
        vllm.call("faulty", "signal_at_load", pid=node.pid, number=signal.SIGSTOP)
        until(run, "load_failures")
        for events in while_stopped(node, lambda: run(next(later)), seconds=0 if load else 30):
            assert events["hit_tokens"] == 0
            assert events["unavailable"] + events["lookup_failures"] >= len(prompts)
        until(run, "hit_tokens")

        # Killed between a lookup and its load.
        vllm.call("faulty", "signal_at_load", pid=node.pid, number=signal.SIGKILL)
        until(run, "load_failures")
        node.kill()
        node.start()
        until(run, "hit_tokens")

        # A bit of each page on the disk is flipped. The node finds that out, and delivers none of them.
        node.stop()
        damage(node)
        node.start()
        until(run, "failed_blocks")
        # The engine computes the damaged blocks again and stores them, until the node has none.
        until(lambda: {"good hits": (events := run())["hit_tokens"] * (not events["failed_blocks"])}, "good hits")
        vllm.stop("faulty")
        vllm.start("after", connector(node))
        assert tokens_of(vllm.generate("after", prompts)) == tokens
        seen = vllm.call("after", "counters")
        assert seen["hit_tokens"] > 0
        assert seen["load_failures"] == 0
        vllm.stop("after")


def store(vllm: Vllm, node: testing.Node, prompt: list[int]) -> None:
    """Store the KV of a prompt, by an engine that stops."""
    vllm.start("writer", connector(node))
    vllm.generate("writer", [prompt])
    vllm.stop("writer")


def test_the_first_layer_is_computed_before_the_last_one_arrives(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]]) -> None:
    """The node is stopped before it reads the last layer, and continues only when the first layer is computed."""
    prompt = agents[0].turns[1].prompt
    with testing.node() as node:
        store(vllm, node, prompt)
        vllm.start("layered", connector(node, **LAYERS))
        seen = vllm.call("layered", "delay_last_layer", pid=node.pid, prompt=prompt, output=OUTPUT)
        names = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
        assert seen["events"] == [
            "the last read waits",
            f"computed {names[0]}",
            f"computed {names[1]}",
            f"computed {names[2]}",
            "the node continues",
            "the last read is complete",
            f"computed {names[3]}",
        ]
        assert seen["tokens"] == plain[1][0]
        counters = vllm.call("layered", "counters")
        assert (counters["loads"], counters["load_failures"]) == (1, 0)

        # An engine that does not wait reads layers that have not arrived. The connector reports the blocks as not loaded.
        assert vllm.call("layered", "reset")
        vllm.call("layered", "skip_waits")
        (answer,) = vllm.generate("layered", [prompt])
        assert answer["tokens"] == plain[1][0]
        counters = vllm.call("layered", "counters")
        assert (counters["loads"], counters["load_failures"]) == (2, 1)
        vllm.stop("layered")


def test_a_request_that_is_aborted_after_its_load_has_failed(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]]) -> None:
    """The engine's prefix cache does not have the blocks that were not loaded, nor those computed from them."""
    prompt = agents[0].turns[1].prompt
    with testing.node() as node:
        store(vllm, node, prompt)
        vllm.start("aborting", connector(node, retry_interval=3600, **LAYERS))
        vllm.call("aborting", "signal_at_load", pid=node.pid, number=signal.SIGKILL)
        vllm.call("aborting", "abort_after_a_failed_load", prompt=prompt)
        (answer,) = vllm.generate("aborting", [prompt])
        assert (answer["tokens"], answer["cached"]) == (plain[1][0], 0)
        vllm.stop("aborting")
        node.kill()


def test_engines_that_cannot_load_by_layers(vllm: Vllm, node: testing.Node, tmp_path: Path) -> None:
    windows = make_llama(tmp_path, layer_types=["sliding_attention"] * 3 + ["full_attention"], sliding_window=64)
    with pytest.raises(EngineError, match=r'InvalidError: the option load is "layers", and the model has 4 KV cache groups: .*"async"'):
        vllm.start("windows by layers", connector(node, **LAYERS), model=windows)
    with pytest.raises(EngineError, match=r'InvalidError: the option load is "layers", and long_prefill_token_threshold is 64'):
        vllm.start("thresholds", connector(node, **LAYERS), long_prefill_token_threshold=64)
    with pytest.raises(EngineError, match=r"InvalidError: .*option 'load': 'layer'; want 'async' or 'layers'"):
        vllm.start("misspelt", connector(node, load="layer"))


@pytest.mark.filterwarnings("ignore")  # those of vLLM's imports
@pytest.mark.parametrize("kind", ["SlidingWindowSpec", "ChunkedLocalAttentionSpec"])
@pytest.mark.parametrize("within", [False, True], ids=["of a group", "within one of a group"])
def test_windows_alone_by_layers(kind: str, within: bool) -> None:
    """An engine in which every layer has a window does not load by layers: it could not compute a whole request after a failed load."""
    from penstock.vllm.connector import _refuse_layers

    def refuse(kind: str) -> None:
        spec = type(kind, (), {})()
        if within:
            spec = SimpleNamespace(kv_cache_specs={"a": spec})
        groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        _refuse_layers(SimpleNamespace(scheduler_config=SimpleNamespace(long_prefill_token_threshold=0)), groups)

    refuse("FullAttentionSpec")
    with pytest.raises(InvalidError, match=rf'the option load is "layers", and no layer has full attention \({kind}\).* "async"'):
        refuse(kind)


@both_loads
def test_heads_apart(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]], node: testing.Node, load: dict[str, Any]) -> None:
    """The heads of a block lie apart in the engine's memory, and at other distances in the next process."""
    turns = [s.turns[0].prompt for s in agents[:4]]
    stored = Stored()
    for name, layout in (("heads apart", "LHBNC"), ("heads apart again", "BHLNC")):
        want = [stored.cached(prompt) for prompt in turns]
        vllm.start(name, connector(node, **load), kv_cache_layout=layout)
        answers = vllm.generate(name, turns)
        assert tokens_of(answers) == plain[0][:4]
        assert [a["cached"] for a in answers] == want
        vllm.stop(name)
        for prompt, answer in zip(turns, answers, strict=True):
            stored.add(prompt, answer["tokens"])
    assert min(want) > 0


def test_two_engines(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]]) -> None:
    agents = agents[:8]
    with testing.node() as node:
        vllm.start("left", connector(node))
        vllm.start("right", connector(node))
        for k in range(len(plain)):
            for answers in vllm.both(["left", "right"], turn(agents, k)):
                assert tokens_of(answers) == plain[k][:8]
        for name in ("left", "right"):
            seen = vllm.call(name, "counters")
            assert seen["dropped_blocks"] == seen["load_failures"] == 0
            vllm.stop(name)


def test_sliding_windows(vllm: Vllm, agents: list[Session], tmp_path: Path) -> None:
    """In three of four layers a token reads the last 64 tokens. The engine has a KV cache group for each layer."""
    model = make_llama(tmp_path, layer_types=["sliding_attention"] * 3 + ["full_attention"], sliding_window=64)
    agents = agents[:12]
    vllm.start("plain windows", None, model=model)
    plain = [tokens_of(vllm.generate("plain windows", turn(agents, k))) for k in range(3)]
    vllm.stop("plain windows")
    with testing.node() as node:
        vllm.start("windows", connector(node), model=model)
        stored = Stored()
        for k, tokens in enumerate(plain):
            answers = vllm.generate("windows", turn(agents, k))
            assert tokens_of(answers) == tokens
            for prompt, answer in zip(turn(agents, k), answers, strict=True):
                stored.add(prompt, answer["tokens"])
        seen = vllm.call("windows", "counters")
        assert seen["dropped_blocks"] == seen["save_failures"] == 0
        vllm.stop("windows")

        vllm.start("again", connector(node, load_timeout=4, retry_interval=2), model=model)
        prompts = turn(agents, 2)
        answers = vllm.generate("again", prompts)
        assert tokens_of(answers) == plain[2]
        assert [a["cached"] for a in answers] == [stored.cached(p) for p in prompts]
        seen = vllm.call("again", "counters")
        assert seen["load_failures"] == 0
        # A block of a layer has 16 KiB. Of the layers with a window the last two blocks of each prompt are loaded.
        assert seen["loads"] > 0
        assert seen["loaded_bytes"] == (seen["hit_tokens"] // BLOCK + 3 * 2 * seen["loads"]) * 2**14

        # A load that fails: the engine computes the whole request.
        vllm.call("again", "signal_at_load", pid=node.pid, number=signal.SIGKILL)
        for _ in range(100):
            assert vllm.call("again", "reset")
            assert tokens_of(vllm.generate("again", prompts)) == plain[2]
            if vllm.call("again", "counters")["load_failures"]:
                break
        assert vllm.call("again", "counters")["load_failures"] > 0
        node.kill()
        vllm.stop("again")


LATENT = 16
"""Tokens of a block of latent KV, whatever block_size is: vLLM's kernel for CPUs has no other length."""


def test_latent_kv(vllm: Vllm, agents: list[Session], node: testing.Node, tmp_path: Path) -> None:
    """All heads of a DeepSeek model read one latent vector of each token. The engine has no prefix cache of its own on a CPU."""
    model = make_deepseek(tmp_path)
    firsts, longer = (turn(agents[:8], k) for k in (0, 1))
    vllm.start("plain latent", None, model=model)
    plain = [tokens_of(vllm.generate("plain latent", prompts)) for prompts in (firsts, longer)]
    vllm.stop("plain latent")
    assert len({tuple(tokens) for one in plain for tokens in one}) > len(firsts)

    stored = Stored(LATENT)
    vllm.start("first", connector(node), model=model)
    answers = vllm.generate("first", firsts)
    assert tokens_of(answers) == plain[0]
    for prompt, answer in zip(firsts, answers, strict=True):
        stored.add(prompt, answer["tokens"])
    assert [a["cached"] for a in vllm.generate("first", firsts)] == [stored.cached(p) for p in firsts]
    vllm.stop("first")

    vllm.start("second", connector(node, load_timeout=60, retry_interval=1), model=model)
    answers = vllm.generate("second", longer)
    assert tokens_of(answers) == plain[1]
    assert [a["cached"] for a in answers] == [stored.cached(p) for p in longer]
    seen = vllm.call("second", "counters")
    assert seen["hit_tokens"] == sum(stored.cached(p) for p in longer) > 0
    assert seen["loaded_bytes"] == seen["hit_tokens"] * 4 * (512 + 64) * 4  # layers, latent and rotary part, bytes of a float
    assert seen["load_failures"] == seen["save_failures"] == seen["dropped_blocks"] == 0

    # Damaged blocks are computed again.
    node.stop()
    damage(node)
    node.start()

    def run() -> dict[str, int]:
        before = vllm.call("second", "counters")["failed_blocks"]
        assert tokens_of(vllm.generate("second", longer)) == plain[1]
        return {"failed_blocks": vllm.call("second", "counters")["failed_blocks"] - before}

    until(run, "failed_blocks")
    assert vllm.call("second", "reset", connector=True)
    answers = vllm.generate("second", longer)
    assert (tokens_of(answers), [a["cached"] for a in answers]) == (plain[1], [0] * len(longer))
    vllm.stop("second")


CHUNK = 3 * BLOCK


@pytest.mark.parametrize("kind", ["chunked attention", "recurrent state"])
def test_hybrid_models(vllm: Vllm, tmp_path: Path, kind: str) -> None:
    """A prefix is loaded exactly up to where the engine can continue: with the begun chunk, or from a snapshot of the state."""
    page = 2**14  # of a block in a layer with attention
    if kind == "chunked attention":
        model, stored = make_llama4(tmp_path, chunk=CHUNK), Stored()
        options: dict[str, Any] = {"disable_hybrid_kv_cache_manager": False}

        def size(tokens: int) -> int:
            return (tokens + 3 * (tokens % CHUNK)) // BLOCK * page
    else:
        model, stored, options = make_lfm2(tmp_path), Snapshots(), {"prefix_cache_retention_interval": BLOCK, **LFM2}

        def size(tokens: int) -> int:
            return 2 * (tokens // BLOCK * page) + 2 * 2**10  # a layer's state is that of 2 tokens with 128 floats each

    random = Random(1)
    longest = [[random.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(400)] for _ in range(4)]
    firsts = [tokens[:length] for tokens, length in zip(longest, (3 * BLOCK + 1, 6 * BLOCK, 9 * BLOCK - 4, 331), strict=True)]

    with testing.node() as node:
        vllm.start("first", connector(node), model=model, **options)
        answers = vllm.generate("first", firsts)
        assert [a["cached"] for a in answers] == [0] * len(firsts)
        for prompt, answer in zip(firsts, answers, strict=True):
            stored.add(prompt, answer["tokens"])
        seen = vllm.call("first", "counters")
        assert seen["dropped_blocks"] == seen["save_failures"] == 0
        vllm.stop("first")
        ends = [tokens[-50:] for tokens in reversed(longest)]
        next_turns = [[*p, *a["tokens"], *end] for p, a, end in zip(firsts, answers, ends, strict=True)]
        forks = [[*p[:-2], *end] for p, end in zip(firsts, ends, strict=True)]
        hits = [stored.cached(prompt) for prompt in forks + next_turns]
        assert {n // BLOCK % 3 for n in hits} == {0, 1, 2}

        vllm.start("second", connector(node, load_timeout=60, retry_interval=1), model=model, **options)
        loaded = vllm.generate("second", forks)
        assert vllm.call("second", "reset")
        loaded += vllm.generate("second", next_turns)
        assert [a["cached"] for a in loaded] == hits
        seen = vllm.call("second", "counters")
        assert seen["load_failures"] == seen["dropped_blocks"] == 0
        assert seen["loaded_bytes"] == sum(size(n) for n in hits if n)

        # In a new epoch the engine computes all tokens. Its own prefix cache then has the same blocks and states, and the tokens are
        # the same.
        assert vllm.call("second", "reset", connector=True)
        assert vllm.generate("second", firsts) == answers
        own = vllm.generate("second", forks + next_turns)
        assert [a["cached"] for a in own] == hits
        assert vllm.call("second", "counters")["loads"] == seen["loads"]
        assert tokens_of(loaded) == tokens_of(own)

        assert vllm.call("second", "reset", connector=True)
        computed = vllm.generate("second", next_turns)
        assert [a["cached"] for a in computed] == [0] * len(computed)
        assert tokens_of(computed) == tokens_of(loaded)[len(forks) :]

        # Damaged blocks and states are not loaded. The engine computes the whole prompt.
        node.stop()
        damage(node)
        node.start()

        def run() -> dict[str, int]:
            """Count the loads that have failed, and have given the tokens of a computed prompt."""
            failures = 0
            for prompt, answer in zip(next_turns, computed, strict=True):
                assert vllm.call("second", "reset")
                before = vllm.call("second", "counters")["load_failures"]
                (got,) = vllm.generate("second", [prompt])
                if vllm.call("second", "counters")["load_failures"] > before:
                    assert got["tokens"] == answer["tokens"]
                    failures += 1
            return {"failures": failures}

        until(run, "failures")
        vllm.stop("second")


def test_a_full_node(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]]) -> None:
    """The node has not room for all that is saved, and evicts blocks that lookups may just have found."""
    agents = agents[:30]
    with testing.node(capacity="16MiB", arena="8MiB") as node:
        vllm.start("crowded", connector(node))
        for k in (1, 2, 3):
            assert vllm.call("crowded", "reset")
            assert tokens_of(vllm.generate("crowded", turn(agents, k))) == plain[k][:30]
        assert vllm.call("crowded", "counters")["saved_bytes"] > 16 * 2**20
        vllm.stop("crowded")


@both_loads
def test_blocks_are_reused_only_when_they_are_saved(alone: Vllm, agents: list[Session], load: dict[str, Any]) -> None:
    """Requests are preempted for want of blocks while their blocks are being saved. What has been stored is right nevertheless."""
    vllm = alone
    with testing.node() as node:
        vllm.start("narrow", connector(node, save_blocks=40, **load), num_gpu_blocks_override=64)
        # Eight requests that run together grow from 48 to 80 blocks of the 63. Requests whose lookups are answered late may
        # run after the others, so that a round has no preemption.
        for first in range(0, len(agents) - 8, 8):
            prompts = [prompt[:192] for prompt in turn(agents, 1)[first : first + 8]]
            tokens = tokens_of(vllm.generate("plain", prompts, output=128))
            assert tokens_of(vllm.generate("narrow", prompts, output=128)) == tokens
            if vllm.call("narrow", "preemptions"):
                break
        assert vllm.call("narrow", "preemptions") > 0
        assert vllm.call("narrow", "counters")["saved_blocks"] > 0
        vllm.stop("narrow")
        vllm.start("reader", connector(node))
        assert tokens_of(vllm.generate("reader", prompts, output=128)) == tokens
        assert vllm.call("reader", "counters")["hit_tokens"] > 0
        vllm.stop("reader")


def test_no_thread_of_the_engine_waits_for_a_node(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]]) -> None:
    """The node is stopped within a load, and the bounds are so long that a thread that waited would make the call fail."""
    held, other = agents[0].turns[1].prompt, agents[1].turns[1].prompt
    with testing.node() as node:
        vllm.start("writer", connector(node))
        vllm.generate("writer", [held])
        vllm.stop("writer")
        vllm.start("patient", connector(node, lookup_timeout=3000, load_timeout=3000, save_timeout=3000))
        tokens = vllm.call("patient", "hold_a_load", pid=node.pid, held=held, other=other, output=200)
        assert tokens["held"] == plain[1][0]
        assert tokens["other"][:OUTPUT] == plain[1][1]
        seen = vllm.call("patient", "counters")
        assert (seen["loads"], seen["load_failures"], seen["lookup_failures"]) == (1, 0, 0)
        vllm.stop("patient")


def test_a_node_that_refuses(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]]) -> None:
    """A wrong token, a namespace of another geometry or dtype, a node of another version, and a store that is closed while the engine
    serves: the engine serves without the cache, logs it once on each side, and counts it."""
    prompts, tokens = turn(agents, 0)[:4], plain[0][:4]
    secret = "a token of the test"
    with testing.node(token=secret) as node, node_of_another_version() as other:
        right = connector(node, token=secret, namespace="shared")
        cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
            ("none", {}, connector(node, token="another " + secret, namespace="shared"), "bearer token"),
            ("right", {}, right, ""),
            ("larger", {"block_size": 64}, right, "namespace differs"),
            ("narrow", {"dtype": "bfloat16"}, right, "namespace differs"),
            ("older", {}, connector(other, namespace="shared"), "run the same release"),
        ]
        for name, options, configuration, why in cases:
            before = len(vllm.host.log.read_text())
            vllm.start(name, configuration, **options)
            answers = vllm.generate(name, prompts)
            assert tokens_of(answers) == tokens or "dtype" in options
            seen = vllm.call(name, "metrics")
            assert seen.get("unavailable", 0) == (len(prompts) if why else 0)
            assert (seen.get("lookups", 0), seen.get("loads", 0)) == (0 if why else len(prompts), 0)
            if not why:
                why = "closed"
                vllm.call(name, "close_stores")
                assert vllm.call(name, "reset")
                for number in (1, 2):
                    assert tokens_of(vllm.generate(name, prompts)) == tokens
                    assert vllm.call(name, "metrics")["unavailable"] == number * len(prompts)
            vllm.stop(name)
            lines = [line for line in vllm.host.log.read_text()[before:].splitlines() if "serves without the cache" in line]
            assert [why in line for line in lines] == [True] * (1 if why == "closed" else 2), lines


@both_loads
def test_two_ranks(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]], load: dict[str, Any]) -> None:
    """Each rank has half of the heads, and a namespace of its own. A block that one of them cannot load is computed by both."""
    prompts, tokens = turn(agents, 1)[:8], plain[1][:8]
    with testing.node() as node:
        vllm.start("wide", connector(node), **RANKS)
        stored = Stored()
        answers = vllm.generate("wide", prompts)
        assert tokens_of(answers) == tokens
        for prompt, answer in zip(prompts, answers, strict=True):
            stored.add(prompt, answer["tokens"])
        seen = vllm.call("wide", "metrics")
        assert seen.get("save_failures", 0) == seen.get("dropped_blocks", 0) == 0, vllm.host.log.read_text() + node.log()
        vllm.stop("wide")

        # All but the first 4 blocks of each prompt are damaged for the second rank.
        good, size = 4, 2**15  # of a rank's block
        numbers = namespaces(node)
        node.stop()
        damage(node, next(number for name, number in numbers.items() if name.endswith("/tp2.1")), depth=good)
        node.start()

        vllm.start("again", connector(node, **load), **RANKS)
        cached = [stored.cached(p) for p in prompts]
        blocks = [n // BLOCK for n in cached]
        before = dict.fromkeys(vllm.call("again", "metrics"), 0)
        lost = sum(n - min(n, good) for n in blocks)
        for failed in (lost, 0):  # the blocks were computed and are stored again
            answers = vllm.generate("again", prompts)
            assert tokens_of(answers) == tokens
            assert [a["cached"] for a in answers] == cached
            seen = vllm.call("again", "metrics")
            events = {name: n - before[name] for name, n in seen.items()}
            if load:  # requests of one step share the blocks that one of them loads
                assert 0 < events["hit_tokens"] <= sum(cached)
                assert (events["failed_blocks"] > 0) == (failed > 0)
                assert events["loaded_bytes"] == (2 * events["hit_tokens"] // BLOCK - events["failed_blocks"]) * size
            else:
                assert (events["hit_tokens"], events["loads"]) == (sum(cached), 2 * len(prompts))
                assert (events["failed_blocks"], events["loaded_bytes"]) == (failed, (2 * sum(blocks) - failed) * size)
            before = seen
            assert vllm.call("again", "reset")

        # After a weight update no rank's blocks are found.
        assert vllm.call("again", "reset", connector=True)
        assert [a["cached"] for a in vllm.generate("again", prompts[:2])] == [0, 0]
        vllm.stop("again")

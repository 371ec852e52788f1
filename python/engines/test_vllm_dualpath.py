"""PenstockDualPath in vLLM's own engines: prefill and decode engines of a cluster, a real planner, and a real node."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from harness.faults import blocks, damage, namespaces
from harness.model import FIRST_TOKEN, VOCABULARY, make_deepseek, make_lfm2, make_llama
from harness.process import EngineError
from harness.sessions import Session
from harness.vllm import BLOCK, LFM2, OUTPUT, RANKS, Snapshots, Stored, Vllm, connector, dual_path, tokens_of

from penstock import Event, EventKind, Gateway, Group, GroupKind, Request, Store, _adapter, errors, testing

TIMEOUT = 300
BATCH = 10  # requests that are under way at once
LATENT_BLOCK = 16  # of vLLM's kernel for latent KV on CPUs
ALONE = {"enable_prefix_caching": False}
ENDS = (EventKind.DONE, EventKind.FAILED)


class Cluster:
    """Engines of a cluster by name. Names with p prefill, names with d decode. Those in ``wide`` have two ranks, those in
    ``caching`` a prefix cache."""

    def __init__(
        self,
        vllm: Vllm,
        node: testing.Node,
        planner: testing.Planner,
        names: list[str],
        *,
        wide: tuple[str, ...] = (),
        caching: tuple[str, ...] = (),
        shards: int | None = None,
        model: Path | None = None,
        layouts: dict[str, str] | None = None,
        hybrid: bool = False,
        **options: Any,
    ) -> None:
        self.layouts = layouts or {}
        self.vllm, self.node, self.planner = vllm, node, planner
        self.names = names
        self.wide = wide
        self.caching = caching
        self.shards = shards or (2 if wide else 1)
        self.model = model
        self.hybrid = hybrid
        self.options = {**ALONE, **options}
        for name in names:
            self.start(name)
        self.store = Store(node.address)
        definition = vllm.call(names[0], "namespace")
        self.groups = [Group(GroupKind(kind), *sizes) for kind, *sizes in definition.pop("groups")]
        self.ns = self.store.namespace(**definition, groups=self.groups, ids=True)
        self.gateway = Gateway(self.ns, planner.address)
        self.count = 0

    def start(self, name: str) -> None:
        connector = dual_path(self.node, self.planner, name, prefill=name[0] == "p", shards=self.shards, hybrid=self.hybrid)
        caching = name in self.caching or self.hybrid
        options = {**self.options, **(RANKS if name in self.wide else {}), "enable_prefix_caching": caching}
        if name in self.layouts:
            options["kv_cache_layout"] = self.layouts[name]
        self.vllm.start(name, connector, self.model, **options)

    def close(self) -> None:
        self.gateway.close()
        self.store.close()
        for name in self.names:
            self.vllm.stop(name)

    def serve(self, prompts: list[list[int]]) -> list[tuple[list[int], list[Event]]]:
        """Serve prompts at once, as a gateway does: each attempt is sent to both of its engines. Return tokens and events of each."""
        first = self.count
        self.count += len(prompts)
        requests = [self.gateway.submit(f"request {first + i}", tokens=p, output=OUTPUT) for i, p in enumerate(prompts)]
        events: dict[Request, list[Event]] = {r: [] for r in requests}
        tokens: dict[Request, list[int]] = {}
        sent: set[str] = set()
        end = time.monotonic() + TIMEOUT

        def last(request: Request) -> Event | None:
            """The event that decides what to do now: an attempt to be sent, or the end."""
            event = events[request][-1] if events[request] else None
            decides = event is not None and (event.kind in ENDS or (event.kind == EventKind.STARTED and event.attempt not in sent))
            return event if decides else None

        while True:
            while not all(last(r) for r in requests):
                assert time.monotonic() < end, events
                for event in self.gateway.wait(1):
                    events[event.request].append(event)
            starts = [(r, e) for r in requests if (e := last(r)) is not None and e.kind == EventKind.STARTED]
            if not starts:
                return [(tokens[r], events[r]) for r in requests]
            self._send(starts, dict(zip(requests, prompts, strict=True)), tokens)
            sent.update(e.attempt for _, e in starts)

    def _send(self, starts: list[tuple[Request, Event]], prompts: dict[Request, list[int]], tokens: dict[Request, list[int]]) -> None:
        what: dict[str, Any] = {}
        places: dict[str, list[Request]] = {}
        for request, event in starts:
            for name, output in ((event.prefill, 1), (event.decode, OUTPUT)):
                places.setdefault(name, []).append(request)
                _, arguments = what.setdefault(name, ["generate", {"prompts": [], "output": output, "attempts": [], "epoch": event.epoch}])
                arguments["prompts"].append(prompts[request])
                arguments["attempts"].append(event.attempt)
        answers = self.vllm.host.call("calls", what=what, timeout=600)
        for name, these in answers.items():
            assert [a["finish"] for a in these] == ["length"] * len(these)
            if name[0] == "d":
                tokens.update((r, a["tokens"]) for r, a in zip(places[name], these, strict=True))

    def stored(self, stored: Stored) -> None:
        """Wait until the node has all blocks of a model in each shard, and no others."""
        end = time.monotonic() + TIMEOUT
        while (have := blocks(self.node)) != self.shards * len(stored):
            assert time.monotonic() < end, (have, self.shards, len(stored))

    def read_bytes(self) -> int:
        """Return how many bytes of blocks the node has delivered."""
        with urllib.request.urlopen(f"http://{self.node.http}/metrics", timeout=60) as page:
            text = page.read().decode()
        return sum(int(float(line.split()[-1])) for line in text.splitlines() if line.startswith("penstock_read_payload_bytes_total{"))

    def events(self, name: str) -> dict[str, float]:
        """Return the events of all ranks of an engine."""
        seen: dict[str, float] = self.vllm.call(name, "metrics")
        return seen

    def check_quiet(self) -> None:
        """No attempt has failed, and nothing was lost."""
        for name in self.names:
            seen = self.events(name)
            assert seen["attempts_failed"] == seen["failed_blocks"] == seen["dropped_blocks"] == seen["unavailable"] == 0


@contextlib.contextmanager
def cluster(vllm: Vllm, names: list[str], *, block: int = BLOCK, schedule: tuple[str, ...] = (), **options: Any) -> Iterator[Cluster]:
    # No request waits for an engine that is busy with others.
    rates = ["--schedule-prefill-rate", "1000000", "--schedule-read-rate", "1000000", *schedule]
    with testing.node(capacity="1GiB", arena="64MiB") as node, testing.planner(block_tokens=block, args=rates) as planner:
        made = Cluster(vllm, node, planner, names, **options)
        try:
            yield made
        finally:
            made.close()


def check_sessions(
    c: Cluster, agents: list[Session], plain: list[list[list[int]]], stored: Stored, hits: list[int] | None = None
) -> Counter[str]:
    """All turns of sessions have the given tokens, and each finds what the turns before have stored.

    Return how many tokens each engine's machine has read. hits gets the number of blocks that each prompt finds.
    """
    read: Counter[str] = Counter()
    for k, want in enumerate(plain):
        for first in range(0, len(agents), BATCH):
            prompts = [s.turns[k].prompt for s in agents[first : first + BATCH]]
            for i, (tokens, events) in enumerate(c.serve(prompts)):
                assert tokens == want[first + i]
                assert events[-1].kind == EventKind.DONE
                assert [e.reason for e in events if e.kind == EventKind.REPLANNED] == []
                (started,) = [e for e in events if e.kind == EventKind.STARTED]
                assert started.read_by_prefill + started.read_by_decode == stored.cached(prompts[i])
                if hits is not None:
                    hits.append(stored.cached(prompts[i]) // BLOCK)
                read.update({started.prefill: started.read_by_prefill, started.decode: started.read_by_decode})
            for i, prompt in enumerate(prompts):
                stored.add(prompt, want[first + i])
            c.stored(stored)
    c.check_quiet()
    return read


@pytest.fixture(scope="module")
def plain(vllm: Vllm, agents: list[Session]) -> list[list[list[int]]]:
    """The tokens of an engine without Penstock, for each turn of each session."""
    vllm.start("alone", None)
    tokens = [[a["tokens"] for a in vllm.generate("alone", [s.turns[k].prompt for s in agents])] for k in range(len(agents[0].turns))]
    vllm.stop("alone")
    return tokens


def test_chunked_prefill(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]]) -> None:
    """Prompts are computed in several steps. test_dualpath_engines has whole sessions and faults."""
    with cluster(vllm, ["p0", "d0", "d1"], max_num_batched_tokens=96) as c:
        read = check_sessions(c, agents[:10], plain, Stored())
    assert all(read[name] for name in c.names), read  # the machines of both sides have read


def test_prefix_cache(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]]) -> None:
    """A decode engine of two ranks with a prefix cache has the tokens of an engine without Penstock. A turn's prompt is in its cache
    up to the end of the turn before."""
    sessions = agents[:5]
    with cluster(vllm, ["p0", "d0"], wide=("d0",), caching=("d0",)) as c:
        check_sessions(c, sessions, plain, Stored())
        again = sum(len(s.turns[k].prompt) // BLOCK * BLOCK for s in sessions for k in range(len(plain) - 1))
        assert c.events("d0")["resident_tokens"] >= again > 0
        with pytest.raises(EngineError, match="start a prefill engine with --no-enable-prefix-caching"):
            vllm.start("p1", dual_path(c.node, c.planner, "p1", prefill=True, shards=c.shards), enable_prefix_caching=True)


@pytest.mark.parametrize(
    ("prefill", "decode", "wide"),
    [("LBHNC", "BLHNC", ()), ("LHBNC", "BHLNC", ()), ("BHLNC", "LHBNC", ("d0",))],
    ids=["heads together", "heads apart", "heads apart, two ranks"],
)
def test_layouts(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]], prefill: str, decode: str, wide: tuple[str, ...]) -> None:
    """Prefill and decode engine have KV caches of other layouts. The blocks that they exchange and store have the same bytes."""
    with cluster(vllm, ["p0", "d0"], wide=wide, layouts={"p0": prefill, "d0": decode}, max_num_batched_tokens=96) as c:
        (group,) = c.groups
        assert group.layers == (8 if "HB" in prefill and not wide else 4)  # two heads in each of four layers
        check_sessions(c, agents[:6], plain, Stored())


@pytest.mark.parametrize("wide", [("p0",), ("d0",), ("p0", "d0")], ids=["2P1D", "1P2D", "2P2D"])
def test_ranks(vllm: Vllm, agents: list[Session], plain: list[list[list[int]]], wide: tuple[str, ...]) -> None:
    """Engines of two ranks, also on one side only: the tokens are those of an engine of one rank, and each rank's shard is stored.

    A block that is damaged in one shard is computed, and stored again.
    """
    count = 5
    stored = Stored()
    with cluster(vllm, ["p0", "d0"], wide=wide) as c:

        def check(k: int) -> list[list[Event]]:
            served = c.serve([s.turns[k].prompt for s in agents[:count]])
            assert [tokens for tokens, _ in served] == plain[k][:count]
            assert all(events[-1].kind == EventKind.DONE for _, events in served)
            return [events for _, events in served]

        for k in range(3):
            for i, events in enumerate(check(k)):
                assert [e.reason for e in events if e.kind == EventKind.REPLANNED] == []
                (started,) = [e for e in events if e.kind == EventKind.STARTED]
                assert started.read_by_prefill + started.read_by_decode == stored.cached(agents[i].turns[k].prompt)
            for i in range(count):
                stored.add(agents[i].turns[k].prompt, plain[k][i])
            c.stored(stored)
        c.check_quiet()

        damaged = next(number for name, number in namespaces(c.node).items() if name.endswith("/tp2.1"))
        c.node.kill()
        damage(c.node, damaged, depth=2)
        c.node.start()
        check(3)
        for i in range(count):
            stored.add(agents[i].turns[3].prompt, plain[3][i])
        check(3)

        epoch = c.ns.bump()
        for name in c.names:
            assert vllm.call(name, "new_weights", version=epoch) == [epoch] * (2 if name in wide else 1)
        for events in check(0):
            (matched,) = [e for e in events if e.kind == EventKind.MATCHED]
            assert (matched.hit, matched.epoch) == (0, epoch)


def turns_of(vllm: Vllm, model: Path, agents: list[Session]) -> list[list[list[int]]]:
    """Return the tokens of an engine without Penstock, for three turns of some sessions."""
    vllm.start("alone", None, model, **ALONE)
    tokens = [[a["tokens"] for a in vllm.generate("alone", [s.turns[k].prompt for s in agents])] for k in range(3)]
    vllm.stop("alone")
    return tokens


@pytest.fixture(scope="module")
def latent(vllm: Vllm, agents: list[Session], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[list[int]]]]:
    """A model whose KV is latent, and its tokens."""
    model = make_deepseek(tmp_path_factory.mktemp("latent"))
    return model, turns_of(vllm, model, agents[:4])


@pytest.mark.parametrize("wide", [("p0",), ("d0",)], ids=["2P1D", "1P2D"])
def test_latent_kv(vllm: Vllm, agents: list[Session], latent: tuple[Path, list[list[list[int]]]], wide: tuple[str, ...]) -> None:
    """Engines of one and of two ranks serve a model with latent KV, of which each block is stored once."""
    model, plain = latent
    with cluster(vllm, ["p0", "d0"], block=LATENT_BLOCK, wide=wide, shards=1, model=model) as c:
        check_sessions(c, agents[:4], plain, Stored(LATENT_BLOCK))
        assert len(namespaces(c.node)) == 1


def test_sliding_windows(vllm: Vllm, agents: list[Session], tmp_path: Path) -> None:
    """In three of four layers a token reads the last 64 tokens. Of these layers, storage delivers only the last two blocks of a prefix."""
    windows = ["sliding_attention"] * 3
    model = make_llama(tmp_path / "some", layer_types=[*windows, "full_attention"], sliding_window=64)
    plain = turns_of(vllm, model, agents[:4])
    stored = Stored()
    # Neither side reads a part of the other side, however busy the machine is.
    with cluster(vllm, ["p0", "d0"], model=model, schedule=("--schedule-patience", "120s")) as c:
        size = c.groups[0].token_bytes  # of a token in a layer
        assert c.groups == [Group(GroupKind.FULL, 1, size), Group(GroupKind.WINDOW, 3, size, 63)]
        hits: list[int] = []  # blocks of each prefix
        check_sessions(c, agents[:4], plain, stored, hits)
        assert max(hits) > 2
        assert c.read_bytes() == BLOCK * size * sum(hit + 3 * min(hit, 2) for hit in hits)

        # If a cached block is damaged, the model computes the whole prompt.
        (number,) = namespaces(c.node).values()
        c.node.kill()
        damage(c.node, number, depth=2)
        c.node.start()
        turns = [s.turns[2].prompt for s in agents[:4]]
        for _ in range(2):  # the second time, the blocks are stored again
            for (tokens, events), want in zip(c.serve(turns), plain[2], strict=True):
                assert tokens == want
                assert events[-1].kind == EventKind.DONE

        epoch = c.ns.bump()
        for name in c.names:
            assert vllm.call(name, "new_weights", version=epoch) == [epoch]
        for (tokens, events), want in zip(c.serve(turns), plain[2], strict=True):
            assert tokens == want
            assert [(e.hit, e.epoch) for e in events if e.kind == EventKind.MATCHED] == [(0, epoch)]

        with pytest.raises(EngineError, match="a prefix cache, and layers with a sliding window"):
            vllm.start("caching", dual_path(c.node, c.planner, "caching", prefill=False), model, enable_prefix_caching=True)


@pytest.fixture(scope="module")
def recurrent(
    vllm: Vllm, agents: list[Session], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[list[int]]], list[list[list[int]]]]:
    """A model with recurrent state in two of four layers, the prompts of three turns, and their tokens of an engine without Penstock and
    without a prefix cache."""
    model = make_lfm2(tmp_path_factory.mktemp("recurrent"))
    random = Random(1)

    def some(count: int) -> list[int]:
        return [random.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]

    # First turns without a full block, with one, with the end of a block at the end of the prompt, and with several steps.
    turns = [[s.turns[0].prompt for s in agents[:3]] + [some(n) for n in (5, BLOCK, BLOCK + 1, 2 * BLOCK, 4 * BLOCK + 1, 331)]]
    vllm.start("alone", None, model, **{**LFM2, **ALONE})
    plain: list[list[list[int]]] = []
    for k in range(3):
        plain.append([a["tokens"] for a in vllm.generate("alone", turns[k])])
        turns.append([[*p, *t, *some(n)] for p, t, n in zip(turns[k], plain[k], (40, 1, 100, 24, 19, 90, 20, 1, 50), strict=True)])
    vllm.stop("alone")
    return model, turns[:3], plain


@pytest.mark.parametrize("wide", [(), ("p0",), ("d0",)], ids=["1P1D", "2P1D", "1P2D"])
def test_recurrent_state(vllm: Vllm, recurrent: tuple[Path, list[list[list[int]]], list[list[list[int]]]], wide: tuple[str, ...]) -> None:
    """The engines of a model with recurrent state, also of two ranks, exchange the state at the last end of a block before the end of a
    prompt, and a prefix is found up to the last state that was stored. Each rank's shard of the state has half of the channels."""
    model, turns, plain = recurrent
    states, stored = Snapshots(), Stored()
    options = {**LFM2, "max_num_batched_tokens": 128}
    # Neither side reads a part of the other side, however busy the machine is.
    with cluster(vllm, ["p0", "d0"], wide=wide, model=model, hybrid=True, schedule=("--schedule-patience", "120s"), **options) as c:
        # With two shards, each of the two rows of a layer's state is a layer of the namespace.
        assert [(group.kind, group.layers) for group in c.groups] == [(GroupKind.FULL, 2), (GroupKind.STATE, 2 * c.shards)]
        block, state = (group.layers * group.token_bytes * c.shards for group in c.groups)
        assert state == 2 * 2 * 128 * 4  # layers, rows, channels, bytes of a float
        read = 0

        def serve(prompts: list[list[int]], want: list[list[int]], *, replans: bool = False) -> list[Event]:
            """Serve prompts at once, and check their tokens. Return the start of each, or its last one."""
            served = c.serve(prompts)
            assert [tokens for tokens, _ in served] == want
            for _, events in served:
                assert events[-1].kind == EventKind.DONE
                assert replans or [e.reason for e in events if e.kind == EventKind.REPLANNED] == []
            return [[e for e in events if e.kind == EventKind.STARTED][-1] for _, events in served]

        def add(k: int) -> None:
            for prompt, tokens in zip(turns[k], plain[k], strict=True):
                states.add(prompt, tokens)
                stored.add(prompt, tokens)
            c.stored(stored)

        for k in range(3):
            hits = [states.cached(prompt) for prompt in turns[k]]
            assert [e.read_by_prefill + e.read_by_decode for e in serve(turns[k], plain[k])] == hits
            read += sum(hit * block + (state if hit else 0) for hit in hits)
            add(k)
        assert max(hits) > 2 * BLOCK
        c.check_quiet()
        assert c.read_bytes() == read

        # The same prompt again: with all its blocks cached, the prefill engine computes none for the decode engine.
        again, want = [turns[2][1]], [plain[2][1]]
        assert states.cached(again[0]) == (len(again[0]) - 1) // BLOCK * BLOCK
        serve(again, want)

        if "p0" in wide:  # PenstockConnector in an engine of two ranks has the same shards
            interval = {"prefix_cache_retention_interval": BLOCK}
            vllm.start("shared", connector(c.node, namespace="dual"), model, **LFM2, **RANKS, **interval)
            answers = vllm.generate("shared", turns[2])
            assert tokens_of(answers) == plain[2]
            assert [a["cached"] for a in answers] == [states.cached(prompt) for prompt in turns[2]]
            vllm.stop("shared")

        # If a cached block is damaged in one shard, the model computes the whole prompt on all ranks.
        damaged = next(number for name, number in namespaces(c.node).items() if name.endswith(f"/tp{c.shards}.{c.shards - 1}"))
        c.node.kill()
        damage(c.node, damaged, depth=1)
        c.node.start()
        serve(turns[2], plain[2], replans=True)
        c.stored(stored)

        epoch = c.ns.bump()
        for name in c.names:
            assert vllm.call(name, "new_weights", version=epoch) == [epoch] * (2 if name in wide else 1)
        ((tokens, events),) = c.serve(again)
        assert (tokens, events[-1].kind) == (want[0], EventKind.DONE)
        assert [(e.hit, e.epoch) for e in events if e.kind == EventKind.MATCHED] == [(0, epoch)]

        if not wide:
            with pytest.raises(EngineError, match='in the cache mode "none"'):
                vllm.start("p1", dual_path(c.node, c.planner, "p1", prefill=True, hybrid=True), model, enable_prefix_caching=False)
            with pytest.raises(EngineError, match='set kv_connector to "PenstockDualPath"'):
                vllm.start("p1", dual_path(c.node, c.planner, "p1", prefill=True, hybrid=True), enable_prefix_caching=True)


def test_a_window_in_every_layer(vllm: Vllm, agents: list[Session], tmp_path: Path) -> None:
    """A model in which each token reads the last 64 tokens in all layers is stored as full attention: the engines keep all blocks of a
    request. Prompts are computed in several steps, after which the engine would free blocks."""
    model = make_llama(tmp_path / "every", layer_types=["sliding_attention"] * 4, sliding_window=64)
    plain = turns_of(vllm, model, agents[:6])
    stored = Stored()
    with cluster(vllm, ["p0", "d0"], model=model, caching=("d0",), max_num_batched_tokens=96) as c:
        assert [(group.kind, group.layers) for group in c.groups] == [(GroupKind.FULL, 4)]
        hits: list[int] = []
        check_sessions(c, agents[:6], plain, stored, hits)
        assert max(hits) > 2
        small = {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 96, **ALONE}
        why = r"InvalidError: every layer has a sliding window, .* room for 480 tokens, and max_model_len is 1024"
        with pytest.raises(EngineError, match=why):
            vllm.start("p1", dual_path(c.node, c.planner, "p1", prefill=True), model, **small)


@pytest.mark.parametrize(
    ("options", "extra", "why"),
    [
        ({**RANKS}, {"shards": 3}, "option 'shards' of PenstockDualPath is 3; want a multiple of tensor_parallel_size, which is 2"),
        ({}, {"shards": 4}, "cannot be cut into 4 shards"),
        (
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
            {},
            "pipeline_parallel_size is 2; the connector supports only tensor parallelism: start the engine with --pipeline-parallel-size 1",
        ),
    ],
    ids=["no multiple", "too many", "pipeline"],
)
def test_refused_ranks(vllm: Vllm, options: dict[str, Any], extra: dict[str, Any], why: str) -> None:
    """An engine does not start with ranks that it cannot serve, and the reason names the setting."""
    with testing.node() as node, testing.planner(block_tokens=BLOCK) as planner:
        with pytest.raises(EngineError) as raised:
            vllm.start("refused", dual_path(node, planner, "refused", prefill=True, **extra), **{**ALONE, **options})
        assert why in str(raised.value) + vllm.host.log.read_text()  # a rank in a process of its own logs the reason


@pytest.mark.filterwarnings("ignore")  # those of vLLM's imports
@pytest.mark.parametrize(
    ("hybrid", "kinds", "why"),
    [
        (False, ["FullAttentionSpec", "MambaSpec"], r'recurrent state \(MambaSpec\).* set kv_connector to "PenstockDualPathHybrid"'),
        (False, ["MambaSpec"], r"recurrent state \(MambaSpec\)"),
        (
            False,
            ["FullAttentionSpec", "SlidingWindowSpec"],
            "a KV cache group for each kind of layer; .* --no-disable-hybrid-kv-cache-manager",
        ),
        (
            True,
            ["FullAttentionSpec", "MambaSpec", "SlidingWindowSpec"],
            r"recurrent state \(MambaSpec\) and layers of SlidingWindowSpec; .* set kv_connector to \"PenstockConnector\"",
        ),
        (True, ["MLAAttentionSpec", "MambaSpec"], r"recurrent state \(MambaSpec\) and layers of MLAAttentionSpec; "),
        (True, ["MambaSpec"], r'groups of the model are MambaSpec; .* set kv_connector to "PenstockDualPath"'),
    ],
)
def test_refused_groups(hybrid: bool, kinds: list[str], why: str) -> None:
    """KV cache groups that the connector does not support are refused, and the error names the kind of the layers or the setting."""
    from penstock.vllm import dualpath

    groups = [SimpleNamespace(kv_cache_spec=type(kind, (), {})()) for kind in kinds]
    with pytest.raises(errors.InvalidError, match=why):
        dualpath._refuse_groups(SimpleNamespace(kv_cache_groups=groups), hybrid=hybrid)


@pytest.mark.filterwarnings("ignore")  # those of vLLM's imports
def test_keys_of_a_cache_salt() -> None:
    """The connector's salts of vLLM's own keys are those that the gateway computes (server/front/salt_test.go)."""
    from penstock.vllm import _engine, _extra

    vectors = json.loads((Path(__file__).parents[2] / "server" / "front" / "testdata" / "cache_salts.json").read_text())
    for vector in vectors:
        request = SimpleNamespace(lora_request=None, mm_features=[], prompt_embeds=None, cache_salt=vector["salt"])
        extra = _extra.Extras(_engine._keys, None).of(request)
        assert extra is not None
        assert _adapter.canonical(extra(0, BLOCK)) == vector["first"].encode()
        assert extra(BLOCK, 2 * BLOCK) is None
        assert _adapter.canonical(None) == vector["second"].encode()


@pytest.mark.filterwarnings("ignore")  # those of vLLM's imports
def test_ids_of_images(node: testing.Node) -> None:
    """The connector's ids of prompts with images, from vLLM's own keys, are those that the gateway computes (server/front/salt_test.go)."""
    from penstock.vllm import _engine, _extra

    vectors = json.loads((Path(__file__).parents[2] / "server" / "front" / "testdata" / "image_salts.json").read_text())
    block = 4
    with Store(node.address) as store:
        ns = store.namespace("images", block_tokens=block, layers=1, token_bytes=8, ids=True)
        for vector in vectors:
            lora = SimpleNamespace(lora_name="a", lora_path="/a", is_3d_lora_weight=False) if vector["adapter"] else None
            prefix = "a:" if lora else ""  # with enable_tower_connector_lora, the adapter's name
            images = [
                SimpleNamespace(
                    identifier=prefix + i["hash"],
                    mm_hash=i["hash"],
                    mm_position=SimpleNamespace(offset=i["offset"], length=i["length"]),
                )
                for i in vector["images"]
            ]
            request = SimpleNamespace(
                request_id="r", lora_request=lora, mm_features=images, prompt_embeds=None, cache_salt=vector["salt"] or None
            )
            digest: Future[str] = Future()
            digest.set_result("".join(vector["adapter"][:1]))
            adapters: Any = SimpleNamespace(digest=lambda lora, digest=digest: digest)
            extras = _extra.Extras(_engine._keys, adapters, tuple(vector["adapter"][2:]))
            assert extras.ready(request)
            chain = _adapter.Chain(ns, block)
            chain.extend(range(vector["tokens"]), extras.of(request))
            ids = [bytes(chain.ids[i : i + chain.SIZE]).hex() for i in range(0, len(chain.ids), chain.SIZE)]
            assert ids == vector["ids"], vector["name"]
            assert _adapter.canonical(vector["adapter"]).decode() == (vector["identity"] or "()")

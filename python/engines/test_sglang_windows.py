"""SGLang's engine with a model of which every second layer has a sliding window: a second KV pool, of which only the ends of
prompts are kept.

The engines run one after the other in new processes, on one node. The tests run in the order of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.faults import damage, namespaces
from harness.model import make_spark
from harness.sessions import Session
from harness.sglang import PAGE, SGLang, loaded, page_keys, storage, tokens, views, whole

from penstock import Namespace, Store, testing

WINDOW = 4 * PAGE
Prompts = list[list[int]]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_spark(tmp_path_factory.mktemp("windowed"), window=WINDOW)


@pytest.fixture(scope="module")
def turns(agents: list[Session]) -> list[Prompts]:
    """The prompts of some sessions' first turns, of their second turns, and so on."""
    return [[turn.prompt for turn in turn_of_each] for turn_of_each in zip(*(session.turns for session in agents[:8]), strict=True)]


@pytest.fixture(scope="module")
def engine(sglang: SGLang) -> Iterator[SGLang]:
    yield sglang
    sglang.stop()


@pytest.fixture(scope="module")
def want(engine: SGLang, windowed: Path, turns: list[Prompts]) -> list[Prompts]:
    """The tokens of all turns without Penstock, with the KV of all layers in one pool."""
    engine.start(windowed, None, disable_hybrid_swa_memory=True)
    rounds = [tokens(engine.generate(prompts)) for prompts in turns]
    assert len({tuple(t) for round_ in rounds for t in round_}) > len(turns[0]), "the model's tokens differ from prompt to prompt"
    return rounds


def pools(node: testing.Node, store: Store) -> tuple[Namespace, Namespace]:
    """The namespaces of the layers that read all tokens, and of those with a window."""
    found = {name.rpartition("/")[2]: ns for name, ns in views(node, store).items()}
    assert set(found) == {"kv-tp0of1", "swa-tp0of1"}
    return found["kv-tp0of1"], found["swa-tp0of1"]


def restorable(kv: Namespace, swa: Namespace, prompt: list[int]) -> int:
    """The longest prefix in tokens of which all pages are stored, and those in its last window also for the layers with a window."""
    keys = page_keys(prompt)
    window = swa.exists(keys).done()
    pages = WINDOW // PAGE
    lengths = range(1, kv.match(keys).prefix + 1)
    return max((n for n in lengths if all(window[max(0, n - pages) : n])), default=0) * PAGE


def test_both_pools_are_stored(engine: SGLang, windowed: Path, kept: testing.Node, turns: list[Prompts], want: list[Prompts]) -> None:
    engine.start(windowed, storage(kept))
    rounds = [engine.generate(prompts) for prompts in turns]
    assert [tokens(answers) for answers in rounds] == want
    assert not any(any(loaded(answers)) for answers in rounds), "the node was empty"
    answers = engine.fresh(turns[-1])
    assert (tokens(answers), loaded(answers)) == (want[-1], [whole(p) for p in turns[-1]])
    with Store(kept.address) as store:
        kv, swa = pools(kept, store)
        stored = [sum(ns.exists(keys).done()) for keys in map(page_keys, turns[-1]) for ns in (kv, swa)]
        assert sum(stored[1::2]) < sum(stored[::2]), "pages outside of all windows are not kept"
        assert [restorable(kv, swa, p) for p in turns[-1]] == [whole(p) for p in turns[-1]]


def test_a_fresh_engine(engine: SGLang, windowed: Path, kept: testing.Node, turns: list[Prompts], want: list[Prompts]) -> None:
    engine.start(windowed, storage(kept))
    answers = engine.generate(turns[-1])
    assert tokens(answers) == want[-1]
    assert [a["cached"] for a in answers] == [{"device": 0, "host": 0, "storage": whole(p)} for p in turns[-1]]


def test_a_window_that_lacks_a_page(engine: SGLang, kept: testing.Node, turns: list[Prompts], want: list[Prompts]) -> None:
    """The prefix ends where the last whole window is, at the end of an earlier turn, and not where the other pool ends."""
    prompts = turns[-1]
    assert engine.process.call("flush")
    with Store(kept.address) as store:
        kv, swa = pools(kept, store)
        for prompt in prompts:
            assert swa.delete(page_keys(prompt)[-2:-1]).ok == 1
        expected = [restorable(kv, swa, p) for p in prompts]
        assert all(n < whole(p) - PAGE for n, p in zip(expected, prompts, strict=True))
        assert any(expected), "a session has a window of an earlier turn"
        answers = engine.generate(prompts)
        assert (tokens(answers), loaded(answers)) == (want[-1], expected)
    answers = engine.fresh(prompts)
    assert (tokens(answers), loaded(answers)) == (want[-1], [whole(p) for p in prompts]), "the pages are stored again"


@pytest.mark.parametrize("pool", ["swa", "kv"])
def test_a_damaged_pool(engine: SGLang, kept: testing.Node, turns: list[Prompts], want: list[Prompts], pool: str) -> None:
    """Neither pool is used without the other."""
    (number,) = [number for name, number in namespaces(kept).items() if name.endswith(f"/{pool}-tp0of1")]
    engine.detach()
    kept.stop()
    assert damage(kept, number) > 0
    kept.start()
    engine.attach(storage(kept))
    answers = engine.fresh(turns[-1])
    assert (tokens(answers), loaded(answers)) == (want[-1], [0] * len(turns[-1]))
    answers = engine.fresh(turns[-1])
    assert (tokens(answers), loaded(answers)) == (want[-1], [whole(p) for p in turns[-1]]), "the pages are stored again"

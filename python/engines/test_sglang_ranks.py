"""SGLang's engine with two tensor-parallel ranks. Each is a process with a backend of its own, and has half of the heads, or the same
latent KV as the other.

The engines run one after the other in new processes, on one node. The tests run in the order of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.faults import damage, namespaces
from harness.model import make_minicpm
from harness.sessions import Session
from harness.sglang import PAGE, Follower, SGLang, loaded, page_keys, storage, tokens, views, whole

from penstock import Namespace, Store, testing

HEADS, HEAD_BYTES, LAYERS = 2, 32 * 4, 4  # of the model
RANKS = [f"/kv-tp{rank}of2" for rank in range(2)]
"""How the names of the ranks' namespaces end."""

Prompts = list[list[int]]


@pytest.fixture(scope="module")
def pair(sglang: SGLang, model: Path) -> Iterator[SGLang]:
    """An engine of two ranks, which starts without Penstock."""
    sglang.start(model, None, tp_size=2)
    yield sglang
    sglang.stop()


def longest(agents: list[Session]) -> Prompts:
    """The longest prompts of sessions, which share no prefix."""
    return [max((turn.prompt for turn in session.turns), key=len) for session in agents]


@pytest.fixture(scope="module")
def few(agents: list[Session]) -> Prompts:
    return longest(agents[:6])


@pytest.fixture(scope="module")
def others(agents: list[Session]) -> Prompts:
    """Prompts that no engine of two ranks stores."""
    return longest(agents[12:15])


@pytest.fixture(scope="module")
def want(pair: SGLang, few: Prompts) -> Prompts:
    """The tokens of two ranks without Penstock."""
    answers = pair.generate(few)
    assert loaded(answers) == [0] * len(few)
    assert len({tuple(t) for t in tokens(answers)}) == len(few), "the model's tokens differ from prompt to prompt"
    return tokens(answers)


def halves(found: dict[str, Namespace]) -> list[Namespace]:
    """The namespaces of the two ranks, in the order of the ranks."""
    return [ns for end in RANKS for name, ns in found.items() if name.endswith(end)]


def wait(node: testing.Node, namespaces: list[Namespace], prompts: Prompts) -> None:
    """Wait until all pages of the prompts are stored in all namespaces."""
    follower = Follower(node)
    for namespace in namespaces:
        follower.wait(namespace, prompts)
    follower.close()


def test_each_rank_stores_its_heads(pair: SGLang, kept: testing.Node, few: Prompts, want: Prompts) -> None:
    pair.attach(storage(kept))
    answers = pair.fresh(few)
    assert (tokens(answers), loaded(answers)) == (want, [0] * len(few)), "the node was empty"
    with Store(kept.address) as store:
        found = views(kept, store)
        assert len(found) == len(halves(found)) == 2
        for namespace in halves(found):
            assert namespace.value_bytes == PAGE * LAYERS * (HEADS // 2) * HEAD_BYTES * 2
        wait(kept, halves(found), few)
        values = [bytearray(ns.value_bytes) for ns in halves(found)]
        for namespace, value in zip(halves(found), values, strict=True):
            assert namespace.get(page_keys(few[0])[:1], [value]).ok == 1
        assert values[0] != values[1], "the ranks have different heads"


def test_a_fresh_engine(pair: SGLang, model: Path, kept: testing.Node, few: Prompts, want: Prompts) -> None:
    pair.start(model, storage(kept), tp_size=2)
    answers = pair.generate(few)
    assert tokens(answers) == want
    assert [a["cached"] for a in answers] == [{"device": 0, "host": 0, "storage": whole(p)} for p in few]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_lacks_pages(pair: SGLang, kept: testing.Node, few: Prompts, want: Prompts, rank: int) -> None:
    """Both ranks load the prefix that both have, and the rank stores the pages again that it lacked."""
    have = [1 + (3 * i + rank) % (whole(p) // PAGE) for i, p in enumerate(few)]  # pages
    with Store(kept.address) as store:
        ranks = halves(views(kept, store))
        for prompt, n in zip(few, have, strict=True):
            lost = page_keys(prompt)[n:]
            assert ranks[rank].delete(lost).ok == len(lost)
        answers = pair.fresh(few)
        assert (tokens(answers), loaded(answers)) == (want, [n * PAGE for n in have])
        wait(kept, ranks, few)
    answers = pair.fresh(few)
    assert (tokens(answers), loaded(answers)) == (want, [whole(p) for p in few])


def test_a_rank_whose_pages_are_damaged(pair: SGLang, kept: testing.Node, few: Prompts, want: Prompts) -> None:
    """A load that fails on one rank ends the prefix on both. The pages are chains, so that the damage is behind a prefix of each."""
    good = 5
    chained = storage(kept, chained=True, hicache_storage_pass_prefix_keys=True)
    with Store(kept.address) as store:
        before = views(kept, store)
        pair.detach()
        pair.attach(chained)
        answers = pair.fresh(few)
        assert (tokens(answers), loaded(answers)) == (want, [0] * len(few)), "chains have a namespace of their own"
        ranks = halves({name: ns for name, ns in views(kept, store).items() if name not in before})
        wait(kept, ranks, few)
        assert loaded(pair.fresh(few)) == [whole(p) for p in few]
    number = namespaces(kept)[ranks[1].name]
    pair.detach()
    kept.stop()
    assert damage(kept, number, depth=good) > 0
    kept.start()
    pair.attach(chained)
    answers = pair.fresh(few)
    assert (tokens(answers), loaded(answers)) == (want, [min(whole(p), good * PAGE) for p in few])


def test_another_number_of_ranks(pair: SGLang, model: Path, kept: testing.Node, few: Prompts, others: Prompts, want: Prompts) -> None:
    """An engine of one rank finds nothing of two ranks, and two ranks find nothing of its."""
    pair.start(model, storage(kept), tp_size=1)
    answers = pair.generate([*few, *others])
    assert loaded(answers) == [0] * len(answers)
    with Store(kept.address) as store:
        (alone,) = [ns for name, ns in views(kept, store).items() if name.endswith("/kv-tp0of1")]
        wait(kept, [alone], [*few, *others])
    assert loaded(pair.fresh(others)) == [whole(p) for p in others]

    pair.start(model, storage(kept), tp_size=2)
    answers = pair.generate([*few, *others])
    assert loaded(answers) == [*(whole(p) for p in few), *[0] * len(others)]
    assert tokens(answers)[: len(few)] == want


def test_latent_kv(pair: SGLang, kept: testing.Node, few: Prompts, tmp_path: Path) -> None:
    """Rank 0 stores what both ranks have, and both load it."""
    latent = make_minicpm(tmp_path)
    all_pages = [whole(p) for p in few]
    with Store(kept.address) as store:
        before = views(kept, store)
        pair.start(latent, None, tp_size=2)
        want = tokens(pair.generate(few))
        assert len({tuple(t) for t in want}) == len(few), "the model's tokens differ from prompt to prompt"
        pair.attach(storage(kept))
        answers = pair.fresh(few)
        assert (tokens(answers), loaded(answers)) == (want, [0] * len(few)), "no page is of this model"
        ((name, both),) = [(name, ns) for name, ns in views(kept, store).items() if name not in before]
        assert name.endswith("/kv-tp2")
        wait(kept, [both], few)

        pair.start(latent, storage(kept), tp_size=2)
        answers = pair.generate(few)
        assert tokens(answers) == want
        assert [a["cached"] for a in answers] == [{"device": 0, "host": 0, "storage": n} for n in all_pages]

        for prompt in few:
            assert both.delete(page_keys(prompt)[3:4]).ok == 1
        answers = pair.fresh(few)
        assert (tokens(answers), loaded(answers)) == (want, [3 * PAGE] * len(few))
        wait(kept, [both], few)
    answers = pair.fresh(few)
    assert (tokens(answers), loaded(answers)) == (want, all_pages), "rank 0 has stored the pages again"

"""SGLang's engine with a model of which every second layer has recurrent state: a pool of snapshots beside the KV of the other layers.

SGLang makes a snapshot where a prompt ends, and where its answer ends. Its kernels are its own, run by Triton's interpreter. On a CPU a
page of such a model has one token. The engines run one after the other in new processes, on one node. The tests run in the order of this
file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from harness.faults import damage, namespaces
from harness.model import FIRST_TOKEN, VOCABULARY, make_lfm2
from harness.sglang import OUTPUT, SGLang, loaded, page_keys, storage, tokens, views

from penstock import Namespace, Store, testing

OPTIONS: dict[str, Any] = {"page": 1, "max_mamba_cache_size": 128}
Prompts = list[list[int]]


class Turn(NamedTuple):
    """Prompts, and their tokens without Penstock. A prompt of a later turn continues the sequence."""

    prompts: Prompts
    tokens: Prompts


def snapshots(prompt: list[int]) -> list[int]:
    """After how many tokens SGLang makes a snapshot. The last token of an answer is never computed."""
    return [len(prompt), len(prompt) + OUTPUT - 1]


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lfm2(tmp_path_factory.mktemp("recurrent"))


@pytest.fixture(scope="module")
def engine(sglang: SGLang) -> Iterator[SGLang]:
    yield sglang
    sglang.stop()


def some(random: Random, count: int) -> list[int]:
    return [random.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]


@pytest.fixture(scope="module")
def turns(engine: SGLang, recurrent: Path) -> list[Turn]:
    """Three turns of three sessions."""
    engine.start(recurrent, None, **OPTIONS)
    random = Random(1)
    prompts, found = [some(random, count) for count in (40, 65, 85)], []
    for _ in range(3):
        found.append(Turn(prompts, tokens(engine.fresh(prompts))))
        prompts = [[*sequence, *answer, *some(random, 20)] for sequence, answer in zip(*found[-1], strict=True)]
    assert len({tuple(answer) for turn in found for answer in turn.tokens}) == 9, "the model's tokens differ from prompt to prompt"
    return found


def attached(node: testing.Node) -> dict[str, Any]:
    return storage(node, prefetch_threshold=1)


def states(node: testing.Node, store: Store) -> Namespace:
    """The namespace of the snapshots."""
    found = {name.rpartition("/")[2]: ns for name, ns in views(node, store).items()}
    assert set(found) == {"kv-tp0of1", "mamba-tp0of1"}
    return found["mamba-tp0of1"]


def test_snapshots_are_stored(engine: SGLang, recurrent: Path, kept: testing.Node, turns: list[Turn]) -> None:
    engine.start(recurrent, attached(kept), **OPTIONS)
    expected = [0] * 3
    for turn in turns:
        answers = engine.fresh(turn.prompts)
        assert (tokens(answers), loaded(answers)) == (turn.tokens, expected)
        expected = [snapshots(prompt)[-1] for prompt in turn.prompts]
    assert engine.process.call("flush")  # when all stores have ended
    with Store(kept.address) as store:
        namespace = states(kept, store)
        for i, sequence in enumerate([*p, *t] for p, t in zip(*turns[-1], strict=True)):
            stored = namespace.exists(page_keys(sequence, page=1)).done()
            assert [n for n, has in enumerate(stored, 1) if has] == [n for turn in turns for n in snapshots(turn.prompts[i])]


def test_a_fresh_engine(engine: SGLang, recurrent: Path, kept: testing.Node, turns: list[Turn]) -> None:
    """A prefix is loaded up to its last snapshot: the end of the last answer, or of a prompt that is continued in another way."""
    engine.start(recurrent, attached(kept), **OPTIONS)
    answers = engine.generate(turns[2].prompts)
    assert tokens(answers) == turns[2].tokens
    assert [a["cached"] for a in answers] == [{"device": 0, "host": 0, "storage": snapshots(p)[1]} for p in turns[1].prompts]

    forks = [[*prompt, *some(Random(2), 20)] for prompt in turns[1].prompts]
    answers = engine.fresh(forks)
    assert loaded(answers) == [len(p) for p in turns[1].prompts]
    engine.detach()
    assert tokens(engine.fresh(forks)) == tokens(answers)
    engine.attach(attached(kept))


def test_a_snapshot_that_is_missing(engine: SGLang, kept: testing.Node, turns: list[Turn]) -> None:
    """The prefix ends at the snapshot before."""
    assert engine.process.call("flush")
    with Store(kept.address) as store:
        namespace = states(kept, store)
        for prompt, before in zip(turns[2].prompts, turns[1].prompts, strict=True):
            last = snapshots(before)[1]
            assert namespace.delete(page_keys(prompt, page=1)[last - 1 : last]).ok == 1
        answers = engine.generate(turns[2].prompts)
    assert (tokens(answers), loaded(answers)) == (turns[2].tokens, [len(p) for p in turns[1].prompts])


@pytest.mark.parametrize("pool", ["mamba", "kv"])
def test_a_damaged_pool(engine: SGLang, kept: testing.Node, turns: list[Turn], pool: str) -> None:
    """Neither pool is used without the other. What was found to be damaged is stored again when the engine computes it."""
    (number,) = [number for name, number in namespaces(kept).items() if name.endswith(f"/{pool}-tp0of1")]
    engine.detach()
    kept.stop()
    assert damage(kept, number) > 0
    kept.start()
    engine.attach(attached(kept))
    answers = engine.fresh(turns[2].prompts)
    assert (tokens(answers), loaded(answers)) == (turns[2].tokens, [0] * 3)
    assert tokens(engine.fresh(turns[1].prompts)) == turns[1].tokens  # which ends where the next turn's prefix does
    answers = engine.fresh(turns[2].prompts)
    assert (tokens(answers), loaded(answers)) == (turns[2].tokens, [snapshots(p)[1] for p in turns[1].prompts])

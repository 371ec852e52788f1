"""SGLang's engine with Penstock as HiCache's storage: the same tokens, the expected pages, whatever happens to the node.

Two engines serve all tests, which run in the order of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.faults import damage, node_of_another_version, until, while_stopped
from harness.sessions import Session
from harness.sglang import OUTPUT, PATIENCE, Follower, SGLang, loaded, storage, tokens, views, whole

from penstock import Namespace, Store, testing

Rounds = list[list[list[int]]]  # of each turn, of each session: token ids


@pytest.fixture(scope="module")
def turns(agents: list[Session]) -> Rounds:
    """The prompts of all sessions' first turns, of their second turns, and so on."""
    return [[turn.prompt for turn in turn_of_each] for turn_of_each in zip(*(session.turns for session in agents), strict=True)]


@pytest.fixture(scope="module")
def few(agents: list[Session]) -> list[list[int]]:
    """The longest prompts of some sessions, which share no prefix."""
    return [max((turn.prompt for turn in session.turns), key=len) for session in agents[:6]]


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLang]:
    """An engine that starts without Penstock."""
    with SGLang(tmp_path_factory.mktemp("first") / "log") as engine:
        engine.start(model, None)
        yield engine


@pytest.fixture(scope="module")
def second(model: Path, kept: testing.Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLang]:
    """Another engine, that starts with Penstock."""
    with SGLang(tmp_path_factory.mktemp("second") / "log") as engine:
        engine.start(model, storage(kept))
        yield engine


@pytest.fixture(scope="module")
def want(first: SGLang, turns: Rounds) -> Rounds:
    """The tokens of all turns without Penstock."""
    rounds = [first.generate(prompts) for prompts in turns]
    assert not any(any(loaded(answers)) for answers in rounds)
    found = [tokens(answers) for answers in rounds]
    assert len({tuple(t) for round_ in found for t in round_}) > len(turns[0]), "the model's tokens differ from prompt to prompt"
    return found


@pytest.fixture(scope="module")
def want_few(turns: Rounds, few: list[list[int]], want: Rounds) -> list[list[int]]:
    known = {tuple(p): t for prompts, round_ in zip(turns, want, strict=True) for p, t in zip(prompts, round_, strict=True)}
    return [known[tuple(prompt)] for prompt in few]


def view(node: testing.Node, store: Store) -> Namespace:
    """The only namespace of the node."""
    (found,) = views(node, store).values()
    return found


def test_a_storage_that_is_attached(
    first: SGLang, kept: testing.Node, turns: Rounds, few: list[list[int]], want: Rounds, want_few: list[list[int]]
) -> None:
    """All sessions have the same tokens with Penstock; what they stored comes back after a flush, page for page."""
    first.attach(storage(kept))
    with Store(kept.address) as store:
        namespace = view(kept, store)
        assert first.process.call("flush")
        rounds = [first.generate(prompts) for prompts in turns]
        assert [tokens(answers) for answers in rounds] == want
        assert not any(any(loaded(answers)) for answers in rounds), "the node was empty"
        follower = Follower(kept)
        follower.wait(namespace, [prompt for prompts in turns for prompt in prompts])
        follower.close()
    answers = first.fresh(few)
    assert tokens(answers) == want_few
    assert [a["cached"] for a in answers] == [{"device": 0, "host": 0, "storage": whole(p)} for p in few]


def test_a_fresh_engine(second: SGLang, turns: Rounds, want: Rounds) -> None:
    """Every token that another engine has computed is cached for one that has just started."""
    for turn, (prompts, tokens_of_turn) in enumerate(zip(turns, want, strict=True)):
        answers = second.generate(prompts)
        assert tokens(answers) == tokens_of_turn
        assert [sum(a["cached"].values()) for a in answers] == [whole(p) for p in prompts]
        if not turn:
            assert loaded(answers) == [whole(p) for p in prompts]


def test_two_engines_at_once(first: SGLang, second: SGLang, few: list[list[int]], want_few: list[list[int]]) -> None:
    engines = (first, second)
    for engine in engines:
        assert engine.process.call("flush")
    for engine in engines:
        engine.process.submit("generate", prompts=few, output=OUTPUT)
    for engine in engines:
        answers = engine.process.result("generate", timeout=PATIENCE)
        assert tokens(answers) == want_few
        assert loaded(answers) == [whole(p) for p in few]


def test_updated_weights(
    first: SGLang, second: SGLang, model: Path, updated_model: Path, few: list[list[int]], want_few: list[list[int]]
) -> None:
    """Nothing that was computed with other weights is loaded, whether the update has a version or not."""
    first.detach()
    first.update(updated_model, None)
    want_new = tokens(first.generate(few))
    first.process.kill()
    assert want_new != want_few

    second.update(updated_model, "2")
    answers = second.generate(few)
    assert (tokens(answers), loaded(answers)) == (want_new, [0] * len(few))
    second.update(model, "default")
    answers = second.generate(few)
    assert (tokens(answers), loaded(answers)) == (want_few, [whole(p) for p in few]), "the first weights find what they stored"
    second.update(updated_model, None)
    answers = second.generate(few)
    assert (tokens(answers), loaded(answers)) == (want_new, [0] * len(few)), "an update without a version begins another epoch"
    second.update(model, None)
    answers = second.generate(few)
    assert (tokens(answers), loaded(answers)) == (want_few, [0] * len(few))


def test_a_cleared_storage(second: SGLang, kept: testing.Node, few: list[list[int]], want_few: list[list[int]]) -> None:
    with Store(kept.address) as store:
        namespace = view(kept, store)
        follower = Follower(kept)
        follower.wait(namespace, few)
        assert loaded(second.fresh(few)) == [whole(p) for p in few]
        assert second.process.call("clear")
        answers = second.fresh(few)
        assert (tokens(answers), loaded(answers)) == (want_few, [0] * len(few))
        namespace.refresh()
        follower.wait(namespace, few)
        follower.close()
    assert loaded(second.fresh(few)) == [whole(p) for p in few]


def test_faults_of_the_node(second: SGLang, kept: testing.Node, few: list[list[int]], want_few: list[list[int]]) -> None:
    """A node that stands still, dies, or has damaged its bytes costs no request and no token."""
    second.detach()
    short = storage(kept, timeout=1, connect_timeout=1, retry_interval=1)
    second.attach(short)

    def run() -> dict[str, int]:
        """Empty the caches on the device and the host, generate, and return how many tokens came from the node."""
        answers = second.fresh(few)
        assert tokens(answers) == want_few
        return {"loaded": sum(loaded(answers))}

    until(run, "loaded")
    assert second.process.call("flush")
    second.process.submit("generate", prompts=few, output=OUTPUT)
    kept.pause()
    assert tokens(second.process.result("generate", timeout=PATIENCE)) == want_few
    assert all(events["loaded"] == 0 for events in while_stopped(kept, run))
    until(run, "loaded")

    second.detach()
    second.attach(storage(kept, timeout=5, connect_timeout=5))
    assert second.process.call("clear")
    assert second.process.call("flush")
    with Store(kept.address) as store:
        epoch = view(kept, store).epoch
        follower = Follower(kept)
        second.process.submit("generate", prompts=few, output=OUTPUT)
        follower.wait_for_any(epoch)
    kept.kill()
    follower.close()
    assert tokens(second.process.result("generate", timeout=PATIENCE)) == want_few
    assert tokens(second.fresh(few)) == want_few

    kept.start()
    second.detach()
    second.attach(storage(kept))
    with Store(kept.address) as store:
        namespace = view(kept, store)
        assert tokens(second.fresh(few)) == want_few
        follower = Follower(kept)
        follower.wait(namespace, few)
        follower.close()
    kept.stop()
    assert damage(kept) > 0
    kept.start()
    second.detach()
    second.attach(storage(kept))
    answers = second.fresh(few)
    assert tokens(answers) == want_few
    assert sum(loaded(answers)) < sum(whole(p) for p in few), "no load has met a damaged page"


def test_a_full_node(second: SGLang, turns: Rounds, want: Rounds) -> None:
    """The node has not room for the pages of one turn of all sessions, and evicts pages that lookups may just have found."""
    second.detach()
    with testing.node(capacity="16MiB", arena="8MiB") as node:
        second.attach(storage(node))
        for k in (2, 3, 3):
            prompts = turns[k][:30]
            answers = second.fresh(prompts)
            assert tokens(answers) == want[k][:30]
        assert sum(loaded(answers)) < sum(whole(p) for p in prompts)
        second.detach()


def test_nodes_that_refuse(second: SGLang, few: list[list[int]], want_few: list[list[int]]) -> None:
    """A wrong token, and a node of another version: the engine serves without the cache, and logs it once."""
    with testing.node(token="a token of the test") as node, node_of_another_version() as other:
        for backend, why in ((storage(node, token="another token of it"), "bearer token"), (storage(other), "run the same release")):
            before = len(second.log.read_text())
            second.attach(backend)
            for _ in range(2):
                answers = second.fresh(few)
                assert (tokens(answers), loaded(answers)) == (want_few, [0] * len(few))
            second.detach()
            lines = [line for line in second.log.read_text()[before:].splitlines() if why in line]
            assert len(lines) == 1, lines

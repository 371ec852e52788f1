"""SGLang's engine with Penstock as HiCache's storage: the same tokens, the expected pages, whatever happens to the node.

Two engines serve all tests, which run in the order of this file.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.faults import damage
from harness.process import HERE, Engine
from harness.sessions import Session

from penstock import Namespace, Store, testing
from penstock._program import program

PAGE = 16
OUTPUT = 8
# Longer than the slowest engine of a busy machine needs, and shorter than a test that hangs.
PATIENCE = 900

Rounds = list[list[list[int]]]  # of each turn, of each session: token ids


def storage(node: testing.Node, **more: Any) -> dict[str, Any]:
    """The configuration of Penstock, as in docs/engines.md."""
    return {
        "backend_name": "penstock", "module_path": "penstock.sglang", "class_name": "PenstockHiCache", "interface_v1": 1,
        "prefetch_threshold": PAGE, "servers": node.address, **more,
    }  # fmt: skip


class SGLang:
    """An engine, with the model under one name: its path is another on each machine."""

    def __init__(self, model: Path, log: Path, backend: dict[str, Any] | None) -> None:
        path = [str(HERE), str(HERE / "sglang_cpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {"model": str(model), "page": PAGE, "storage": backend}
        self.process = Engine("sglang_driver.py", settings, log=log, env={"PYTHONPATH": os.pathsep.join(path)}, start=PATIENCE)
        self.log = log

    def generate(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.process.call("generate", prompts=prompts, output=OUTPUT, timeout=PATIENCE)
        return answers

    def fresh(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Generate with empty caches on the device and the host."""
        assert self.process.call("flush")
        return self.generate(prompts)

    def attach(self, backend: dict[str, Any]) -> None:
        assert self.process.call("attach", storage=backend) == ""

    def detach(self) -> None:
        assert self.process.call("detach")

    def update(self, model: Path, version: str | None) -> None:
        assert self.process.call("update", model=str(model), version=version, timeout=PATIENCE) == ""


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def loaded(answers: list[dict[str, Any]]) -> list[int]:
    """How many tokens of each prompt came from the storage."""
    return [answer["cached"]["storage"] for answer in answers]


def whole(prompt: list[int]) -> int:
    """How many tokens of a prompt can be cached: its whole pages, but for the last token, which is computed."""
    return (len(prompt) - 1) // PAGE * PAGE


def page_keys(prompt: list[int]) -> list[str]:
    """The keys of a prompt's pages for the first version of the weights, as docs/engines.md has them."""
    salt = hashlib.sha256(b"default").hexdigest()[:16]
    found, prior = [], b""
    for start in range(0, whole(prompt), PAGE):
        page = b"".join(token.to_bytes(4, "little") for token in prompt[start : start + PAGE])
        prior = hashlib.sha256(prior + page).digest()
        found.append(f"{salt}:{prior.hex()}")
    return found


class Follower:
    """Waits for blocks on a node, by its events."""

    def __init__(self, node: testing.Node) -> None:
        command = [str(program()), "events", "--server", node.address, "--format", "json", "--after", "1", "--timeout", f"{PATIENCE}s"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._lines = b""

    def events(self) -> list[dict[str, Any]]:
        """Return the next events; none if there is none for a second."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        if select.select([fd], [], [], 1)[0]:
            data = os.read(fd, 1 << 16)
            assert data, "penstock events has ended"
            self._lines += data
        *lines, self._lines = self._lines.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, namespace: Namespace, prompts: list[list[int]]) -> None:
        """Wait until all pages of the prompts are stored."""
        for prompt in prompts:
            keys = page_keys(prompt)
            while keys and namespace.match(keys).prefix < len(keys):
                self.events()  # an event may come before a look-up finds its blocks

    def wait_for_any(self, epoch: int) -> None:
        """Wait until a block of this epoch is stored."""
        while not any(event["kind"] == "block_stored" and event["epoch"] == epoch for event in self.events()):
            pass

    def close(self) -> None:
        self._process.kill()  # it blocks on its full standard output, which the test does not read
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def kept() -> Iterator[testing.Node]:
    """The node of all tests."""
    with testing.node(capacity="1GiB", arena="64MiB") as n:
        yield n


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
    engine = SGLang(model, tmp_path_factory.mktemp("first") / "log", None)
    yield engine
    engine.process.kill()


@pytest.fixture(scope="module")
def second(model: Path, kept: testing.Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLang]:
    """Another engine, that starts with Penstock."""
    engine = SGLang(model, tmp_path_factory.mktemp("second") / "log", storage(kept))
    yield engine
    engine.process.kill()


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
    """The only namespace of the node, as the engine made it."""
    command = [str(program()), "ns", "list", "--server", node.address, "--format", "json"]
    (it,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["namespaces"]
    geometry = it["geometry"]
    (group,) = geometry["groups"]
    assert geometry["block_tokens"] == PAGE
    return store.namespace(
        it["name"], block_tokens=geometry["block_tokens"], layers=group["layers"], token_bytes=group["token_bytes"],
        flat=it["index"] == "flat", dtype=geometry["dtype"], layout=geometry["layout"],
    )  # fmt: skip


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

    kept.pause()
    assert tokens(second.fresh(few)) == want_few
    kept.resume()

    second.detach()
    second.attach(storage(kept))
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

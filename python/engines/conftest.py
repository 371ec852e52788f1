from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.model import make_llama
from harness.process import Engine
from harness.sessions import Session, sessions, turn
from harness.sglang import SGLang
from harness.vllm import Vllm, tokens_of

from penstock import testing


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny Llama model."""
    return make_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def updated_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model after a weight update: the same shape, other weights."""
    return make_llama(tmp_path_factory.mktemp("updated"), seed=1)


@pytest.fixture(scope="session")
def agents() -> list[Session]:
    """Fifty sessions of coding agents, of four turns each."""
    return sessions(50)


@pytest.fixture(scope="session")
def vllm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """A process that has imported vLLM and makes engines of the tiny model."""
    with Engine("vllm_driver.py", {}, log=tmp_path_factory.mktemp("vllm") / "log") as host:
        yield Vllm(host, model)


@pytest.fixture(scope="session")
def alone(vllm: Vllm) -> Vllm:
    """The same, with an engine "plain" that has no Penstock."""
    vllm.start("plain", None)
    return vllm


@pytest.fixture(scope="session")
def plain(alone: Vllm, agents: list[Session]) -> list[list[list[int]]]:
    """The tokens of an engine without Penstock, for each turn of each session."""
    tokens = [tokens_of(alone.generate("plain", turn(agents, k))) for k in range(len(agents[0].turns))]
    assert len({tuple(t) for one in tokens for t in one}) > len(agents)  # the model does not repeat itself
    return tokens


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLang]:
    """A process that has imported SGLang and makes engines of one or two ranks."""
    with SGLang(tmp_path_factory.mktemp("sglang") / "log") as host:
        yield host


@pytest.fixture(scope="module")
def kept() -> Iterator[testing.Node]:
    """A node with room for the KV of engines, for all tests of a module."""
    with testing.node(capacity="1GiB", arena="64MiB") as n:
        yield n


@pytest.fixture
def node() -> Iterator[testing.Node]:
    """A node of the test's own, to harm."""
    with testing.node() as n:
        yield n

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.faults import damage, namespaces
from harness.model import FIRST_TOKEN, VOCABULARY
from harness.process import Engine, EngineError
from harness.sessions import Session, sessions

from penstock import Namespace, Store, testing


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Engine]:
    with Engine("echo_driver.py", {"greeting": "hello"}, log=tmp_path / "log", start=60) as engine:
        yield engine
        engine.kill()


class TestEngine:
    def test_calls(self, echo: Engine) -> None:
        large = "x" * 200_000  # more than a pipe holds
        assert echo.call("echo", value=large) == ["hello", large]
        with pytest.raises(EngineError, match="ordered to fail"):
            echo.call("fail")
        with pytest.raises(EngineError, match="KeyError: 'nothing'"):
            echo.call("nothing")
        assert echo.call("echo", value=1) == ["hello", 1]
        echo.close()
        assert "echo 1" in echo.log.read_text()

    def test_death(self, echo: Engine) -> None:
        with pytest.raises(EngineError, match="exit code -9"):
            echo.call("die")

    def test_silence(self, echo: Engine) -> None:
        with pytest.raises(EngineError, match="hang took longer than"):
            echo.call("hang", timeout=0.1)


def test_sessions(agents: list[Session]) -> None:
    assert len(agents) == 50
    assert agents == sessions(50)
    shared = 0
    for session in agents:
        assert len(session.turns) == 4
        assert 256 <= max(len(t.prompt) for t in session.turns) <= 513
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            assert all(FIRST_TOKEN <= token < VOCABULARY for token in after.prompt)
            shared += before.prompt == after.prompt[: len(before.prompt)]
    assert shared > 100  # of 150: most turns continue the one before


def test_damage() -> None:
    keys = [b"%d" % i for i in range(8)]
    with testing.node() as node:

        def open_(store: Store, name: str) -> Namespace:
            return store.namespace(name, block_tokens=16, layers=4, token_bytes=64)

        def count(name: str) -> int:
            """Return how many of the values can be read."""
            with Store(node.address) as store:
                ns = open_(store, name)
                return ns.get(keys, [bytearray(ns.value_bytes) for _ in keys]).ok

        with Store(node.address) as store:
            for name in ("left", "right"):
                ns = open_(store, name)
                assert ns.put(keys, [bytes([i + 1]) * ns.value_bytes for i in range(8)]).ok == 8
        with pytest.raises(ValueError, match="runs"):
            damage(node)
        numbers = namespaces(node)
        assert sorted(numbers) == ["left", "right"]
        node.stop()
        assert damage(node, numbers["left"], depth=3) >= 5
        node.start()
        assert (count("left"), count("right")) == (3, 8)
        node.stop()
        damage(node)
        node.start()
        assert (count("left"), count("right")) == (0, 0)

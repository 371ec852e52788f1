from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import Namespace, Store
from penstock import testing as penstock_testing

# Only what hangs takes so long.
TIMEOUT = 120

Run = Callable[..., str]
MakeNamespace = Callable[..., Namespace]


@pytest.fixture(scope="session")
def node() -> Iterator[penstock_testing.Node]:
    """One node for all tests that do not harm it."""
    with penstock_testing.node() as n:
        yield n


@pytest.fixture
def store(node: penstock_testing.Node) -> Iterator[Store]:
    with Store(node.address) as s:
        yield s


_numbers = itertools.count()


@pytest.fixture
def make(store: Store) -> MakeNamespace:
    """Makes namespaces of the test's own: values of 2 layers of 256 bytes, unless it says otherwise."""

    def of(**definition: object) -> Namespace:
        defaults = {"block_tokens": 4, "layers": 2, "token_bytes": 64}
        if "groups" in definition:
            defaults = {"block_tokens": 4}
        return store.namespace(f"test/{next(_numbers)}", **{**defaults, **definition})  # type: ignore[arg-type]

    return of


@pytest.fixture
def ns(make: MakeNamespace) -> Namespace:
    return make()


@pytest.fixture
def run(node: penstock_testing.Node, tmp_path: Path) -> Run:
    """Runs a script in a process of its own and returns what it printed. NODE is the node's address in it."""

    def script(text: str, *, code: int = 0) -> str:
        file = tmp_path / "script.py"
        file.write_text(f"import sys\nNODE = sys.argv[1]\n{text}")
        command = [sys.executable, "-W", "error::ResourceWarning", str(file), node.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
        for word in ("Traceback", "Exception", "Fatal", "Warning"):
            assert code or word not in done.stderr, done.stderr
        return done.stdout

    return script


def value(ns: Namespace, seed: int) -> bytes:
    """The bytes of a block, different for each seed."""
    return bytes((seed * 31 + i * 7) % 251 for i in range(ns.value_bytes))

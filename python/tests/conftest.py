from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock import Namespace, Store
from penstock import testing as penstock_testing

# The time limit of a script, in seconds. Only a script that hangs reaches it.
TIMEOUT = 120

# Each script of the fixture run begins with these lines.
PREAMBLE = """
import sys
import penstock
NODE = sys.argv[1]
def use(address):
    with penstock.Store(address) as store:
        ns = store.namespace("process", block_tokens=4, layers=2, token_bytes=64, flat=True)
        ns.put(["a"], [bytes(ns.value_bytes)])
        into = [bytearray(ns.value_bytes)]
        assert ns.get(["a"], into).ok == 1
        return ns.match(["a"]).prefix
"""

Run = Callable[..., str]
MakeNamespace = Callable[..., Namespace]


def certificate(directory: Path, *, name: str, of: dict[str, Path] | None = None) -> dict[str, Path]:
    """Return the options of a Traffic with a new certificate for 127.0.0.1, which the CA of other options signs, or a new CA."""
    if shutil.which("openssl") is None:
        assert os.environ.get("CI") != "true", "this test needs openssl, which continuous integration must have"
        pytest.skip("this test needs openssl, which is not in PATH")
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]

    def make(file: str, *arguments: str) -> None:
        out = directory / file
        subprocess.run(
            [*new, "-keyout", f"{out}.key", "-out", f"{out}.crt", "-subj", f"/CN={file}", *arguments], check=True, capture_output=True
        )

    ca = directory / f"ca of {name}.crt" if of is None else of["ca_file"]
    if of is None:
        make(f"ca of {name}")
    make(
        name, "-CA", str(ca), "-CAkey", str(ca.with_suffix(".key")), "-addext", "subjectAltName=IP:127.0.0.1",
        "-addext", "extendedKeyUsage=serverAuth,clientAuth", "-addext", "basicConstraints=critical,CA:FALSE",
    )  # fmt: skip
    return {"ca_file": ca, "cert_file": directory / f"{name}.crt", "key_file": directory / f"{name}.key"}


@pytest.fixture(scope="session")
def node() -> Iterator[penstock_testing.Node]:
    """The node of all tests that neither pause nor kill it."""
    with penstock_testing.node() as n:
        yield n


@pytest.fixture
def store(node: penstock_testing.Node) -> Iterator[Store]:
    with Store(node.address) as s:
        yield s


_numbers = itertools.count()


@pytest.fixture
def make(store: Store) -> MakeNamespace:
    """A function that creates a namespace for the test. By default a value has 2 layers of 256 bytes."""

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
    """A function that runs PREAMBLE and a script in a new process and returns its output. NODE is the node's address."""

    def script(text: str, *, code: int = 0) -> str:
        file = tmp_path / "script.py"
        file.write_text(PREAMBLE + text)
        command = [sys.executable, "-W", "error::ResourceWarning", str(file), node.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
        for word in ("Traceback", "Exception", "Fatal", "Warning"):
            assert code or word not in done.stderr, done.stderr
        return done.stdout

    return script


def value(ns: Namespace, seed: int) -> bytes:
    """Return the value of a block, different for each seed."""
    return bytes((seed * 31 + i * 7) % 251 for i in range(ns.value_bytes))


@contextlib.contextmanager
def paused(**options: Any) -> Iterator[tuple[penstock_testing.Node, Store, Namespace]]:
    """Run a paused node, and open a store and a namespace on it. The key "a" has value 0."""
    with penstock_testing.node() as n, Store(n.address, **options) as s:
        ns = s.namespace("a", block_tokens=4, layers=2, token_bytes=64)
        ns.put(["a"], [value(ns, 0)])
        n.pause()
        yield n, s, ns


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run work(0) to work(count - 1) concurrently, each in a thread, and raise the first exception."""
    start = threading.Barrier(count)

    def one(i: int) -> None:
        start.wait()
        work(i)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(one, range(count)))

"""Stores that discover the members of a cluster, beside the command block, which is a Go client."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import InvalidError, Namespace, Store, _adapter, testing

WAIT = 60  # the time limit of a wait, in seconds; only a defect reaches it
SEQUENCES = 8


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    """Return whether a GET of url has the status 200."""
    try:
        with urllib.request.urlopen(url, timeout=WAIT):
            return True
    except OSError:
        return False


def _await(what: str, condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    until, tick = time.monotonic() + WAIT, threading.Event()
    while not condition():
        assert time.monotonic() < until, f"not reached: {what}"
        tick.wait(0.02)


def _start_etcd(program: str, directory: Path) -> tuple[subprocess.Popen[bytes], str] | None:
    """Start etcd and wait until it is healthy. Return None if another process has taken a port meanwhile."""
    client, peer = f"127.0.0.1:{_free_port()}", f"http://127.0.0.1:{_free_port()}"
    data = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else directory  # etcd syncs each write
    data = data / f"penstock-etcd-{os.getpid()}-{client.rpartition(':')[2]}"
    command = [program, "--name", "m", "--data-dir", str(data), "--listen-client-urls", f"http://{client}"]
    command += ["--advertise-client-urls", f"http://{client}", "--listen-peer-urls", peer]
    command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"m={peer}"]
    with (directory / "etcd.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    _await("etcd is healthy or has ended", lambda: _answers(f"http://{client}/health") or process.poll() is not None)
    if process.poll() is not None:
        shutil.rmtree(data, ignore_errors=True)
        return None
    return process, client


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an etcd."""
    program = shutil.which("etcd")
    if program is None:
        assert os.environ.get("CI") != "true", "this test needs etcd (etcd-server), which continuous integration must have"
        pytest.skip("this test needs etcd, which is not in PATH")
    directory = tmp_path_factory.mktemp("etcd")
    started = None
    for _ in range(5):
        if (started := _start_etcd(program, directory)) is not None:
            break
    assert started is not None, (directory / "etcd.log").read_text()
    process, client = started
    yield client
    process.kill()
    process.wait()
    for data in (Path("/dev/shm"), directory):
        shutil.rmtree(data / f"penstock-etcd-{os.getpid()}-{client.rpartition(':')[2]}", ignore_errors=True)


@contextlib.contextmanager
def _member(etcd: str, prefix: str, name: str) -> Iterator[testing.Node]:
    """Run a member of a cluster, and wait until it serves."""
    with testing.node(args=["--node", name, "--cluster-etcd", etcd, "--cluster-prefix", prefix]) as n:
        _await(f"the node {name} serves", lambda: _answers(f"http://{n.http}/readyz"))
        yield n


def _namespace(store: Store) -> Namespace:
    return store.namespace("m", block_tokens=4, layers=2, token_bytes=64, ids=True)


def _tokens(sequence: int) -> list[int]:
    return [1000 + sequence, 1, 2, 3]


def _value(sequence: int) -> bytes:
    return bytes((sequence * 31 + i * 7) % 251 for i in range(512))


def _put(ns: Namespace, sequences: range) -> int:
    return sum(ns.put(ns.chain(_tokens(i)), [_value(i)]).ok for i in sequences)


def _get(ns: Namespace, sequences: range) -> int:
    """Return how many of the sequences are hits. Each hit has the bytes of its sequence."""
    hits = 0
    for i in sequences:
        into = bytearray(512)
        if ns.get(ns.chain(_tokens(i)), [into]).ok:
            assert into == _value(i), f"sequence {i} has other bytes"
            hits += 1
    return hits


def _block(verb: str, node: testing.Node, directory: Path, sequence: int) -> bool:
    """Run penstock block put or get for one sequence, and return whether it is a success."""
    tokens, data = directory / "tokens", directory / "data"
    tokens.write_text("\n".join(map(str, _tokens(sequence))))
    file = ["--data-file", str(data)] if verb == "put" else ["--out", str(data)]
    if verb == "put":
        data.write_bytes(_value(sequence))
    command = [sys.executable, "-m", "penstock", "block", verb, "m", "--discover", "--server", node.address, "--tokens-file", str(tokens)]
    done = subprocess.run([*command, *file], capture_output=True, text=True, timeout=2 * WAIT)
    assert done.returncode in (0, 3), done.stderr  # 3 is a miss
    assert verb == "put" or done.returncode == 3 or data.read_bytes() == _value(sequence)
    return done.returncode == 0


def test_store_and_command_find_each_others_blocks(etcd: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A node that joins is used, and one that leaves is a miss."""
    first, second, third = range(SEQUENCES), range(SEQUENCES, 2 * SEQUENCES), range(2 * SEQUENCES, 3 * SEQUENCES)
    with contextlib.ExitStack() as nodes:
        a = nodes.enter_context(_member(etcd, "/discover", "a"))
        leaves = nodes.enter_context(contextlib.ExitStack())
        b = leaves.enter_context(_member(etcd, "/discover", "b"))
        with Store([a.address], discover=True) as store:
            ns = _namespace(store)
            assert _put(ns, first) == SEQUENCES
            assert all(_block("get", b, tmp_path, i) for i in first)
            assert all(_block("put", b, tmp_path, i) for i in second)
            assert _get(ns, second) == SEQUENCES
            adapter = _adapter.options(_adapter.Connection, {"servers": b.address}, where="a test", environ={"PENSTOCK_DISCOVER": "true"})
            with adapter.open() as other:
                assert _get(_namespace(other), first) == SEQUENCES

            with caplog.at_level(logging.WARNING, "penstock"), Store([a.address]) as alone:
                assert 0 < _get(_namespace(alone), first) < SEQUENCES
            assert caplog.text.count("set discover in all clients") == 1

            c = nodes.enter_context(_member(etcd, "/discover", "c"))
            _await("the store has the new node", lambda: len(store.stats()["Nodes"]) == 3)
            assert _put(ns, third) == SEQUENCES
            assert all(_block("get", b, tmp_path, i) for i in third)
            with Store([c.address]) as alone:
                assert _get(_namespace(alone), third) > 0, "no sequence is on the node that has joined"

            leaves.close()
            assert 0 < _get(ns, third) < SEQUENCES


def test_discover_needs_a_cluster(node: testing.Node) -> None:
    with pytest.raises(InvalidError, match=r"cluster\.etcd is empty"):
        Store(node.address, discover=True)

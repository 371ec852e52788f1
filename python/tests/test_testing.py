"""Tests of penstock.testing.node: starting and stopping nodes, and removing their processes and files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from conftest import Run, value

from penstock import Store, testing


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_node_serves_and_is_removed() -> None:
    with testing.node() as n:
        assert n.running
        assert alive(n.pid)
        with urllib.request.urlopen(f"http://{n.http}/readyz", timeout=60) as reply:
            assert reply.status == 200
        assert '"msg":"ready"' in n.log()
        with pytest.raises(testing.NodeError, match="already running"):
            n.start()
    assert not n.running
    assert not alive(n.pid)
    assert not n.data.parent.exists()


def test_a_restart_keeps_data_and_address() -> None:
    with testing.node() as n:
        address = n.address
        for end in (n.stop, n.kill):
            with Store(n.address) as store:
                ns = store.namespace("a", block_tokens=4, layers=2, token_bytes=64)
                stored = ns.match(["a"]).prefix
                ns.put(["a"], [value(ns, 0)])
            end()
            assert not n.running
            n.start()
            assert n.address == address
        assert stored == 1, "the value stored before stop is missing"


def test_a_node_that_cannot_start() -> None:
    with pytest.raises(testing.NodeError, match="nonsense"), testing.node(args=["--nonsense"]):
        pass


def test_the_node_ignores_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CAPACITY", "nonsense")
    with testing.node():
        pass


def test_a_paused_node_is_stopped() -> None:
    with testing.node() as n:
        n.pause()
    assert not alive(n.pid)


def test_an_exception_ends_the_node() -> None:
    with pytest.raises(ZeroDivisionError), testing.node() as n:
        raise ZeroDivisionError
    assert not alive(n.pid)
    assert not n.data.parent.exists()


def test_the_node_ends_when_the_test_is_killed() -> None:
    script = "import sys, penstock.testing as t\nwith t.node() as n:\n    print(n.pid, n.data.parent, flush=True)\n    sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as test:
        assert test.stdout is not None
        pid, directory = test.stdout.readline().split()
        assert alive(int(pid))
        test.send_signal(signal.SIGKILL)
        test.wait()
        # The node's parent process, a shell, kills the node and removes the directory.
        while alive(int(pid)) or os.path.exists(directory):
            os.sched_yield()


def test_python_m_penstock_runs_the_program(run: Run) -> None:
    for command in ([sys.executable, "-m", "penstock"], [os.path.join(os.path.dirname(sys.executable), "penstock")]):
        out = subprocess.run([*command, "version"], capture_output=True, text=True, check=True, timeout=60).stdout
        assert "disk format" in out
        refused = subprocess.run([*command, "nonsense"], capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2

"""Tests of threads, signals, forks and the end of the process."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
import sys
import threading
from ctypes import byref
from pathlib import Path
from typing import Any

import pytest
from conftest import TIMEOUT, MakeNamespace, Run, in_threads, paused, value

from penstock import ClosedError, Namespace, Store, _abi, testing


def test_threads(make: MakeNamespace) -> None:
    ns = make(flat=True)

    def work(t: int) -> None:
        for i in range(50):
            key, data = f"{t} {i}", value(ns, t * 50 + i)
            assert ns.put([key], [data]).ok == 1
            into = bytearray(ns.value_bytes)
            assert ns.get([key], [into]).ok == 1
            assert into == data

    in_threads(8, work)


def test_threads_wait_for_one_job(make: MakeNamespace) -> None:
    """Each thread that waits for a job gets its result, although the library returns the completion once."""
    ns = make(flat=True)
    jobs = [ns.jobs.exists([f"{i}"]) for i in range(300)]
    start = threading.Barrier(4)

    def work(_: int) -> None:
        start.wait()
        for job in jobs:
            assert job.wait().ok == 0

    in_threads(4, work)


def test_tenant_in_two_processes(tmp_path: Path) -> None:
    """Two processes of a tenant open its namespace, which has a random salt, and find each other's blocks."""
    roles, token = tmp_path / "roles.yaml", tmp_path / "token"
    token.write_text("0123456789abcdef of a tenant")
    digest = hashlib.sha256(token.read_bytes()).hexdigest()
    grants = "[{roles: [read, write, admin], namespaces: [a/*]}]"
    roles.write_text(f"principals: [{{name: a, tokens: [sha256:{digest}], grants: {grants}}}]")
    script = """
import sys
from penstock import Store
with Store(sys.argv[1], token_file=sys.argv[2]) as store:
    for name, options in (("chained", {"ids": True}), ("flat", {"flat": True})):
        ns = store.namespace("a/" + name, block_tokens=4, layers=2, token_bytes=64, **options)
        keys = ns.chain(range(8)) if name == "chained" else [b"k", b"l"]
        before = ns.match(keys).prefix if name == "chained" else ns.exists(keys).ok
        ns.put(keys, [bytes([i]) * ns.value_bytes for i in range(2)])
        print(before, keys[0].hex())
"""
    with testing.node(args=["--auth-roles-file", str(roles)]) as n:
        run = [sys.executable, "-c", script, n.address, str(token)]
        runs = [subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT) for _ in range(2)]
    assert [r.returncode for r in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    first, second = (r.stdout.split() for r in runs)
    assert [first[0], first[2]] == ["0", "0"]
    assert [second[0], second[2]] == ["2", "2"]
    assert first[1] == second[1]  # the ids of the chained namespace


def test_other_threads_run_while_a_call_waits() -> None:
    with paused() as (_, store, ns):
        outcome: list[BaseException | object] = []

        def wait() -> None:
            try:
                outcome.append(ns.get(["a"], [bytearray(ns.value_bytes)], timeout=60))
            except BaseException as e:
                outcome.append(e)

        waiting = threading.Thread(target=wait)
        waiting.start()
        ticks = 0
        while ticks < 100_000:  # if the call held the interpreter's lock, this loop would stop for a minute
            ticks += 1
        assert waiting.is_alive()
        assert not outcome
        store.close()
        waiting.join()
        assert isinstance(outcome[0], ClosedError)


class _LateLibrary:
    """The library, but penstock_submit_wait returns after penstock_close, with the completion of a cancelled job."""

    def __init__(self, store: Store) -> None:
        self._core = store._core
        self._lib = self._core.lib

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def penstock_submit_wait(self, ns: int, op: int, batch: Any, codes: int, ms: int, job: Any, out: Any, error: Any) -> int:
        self._lib.penstock_submit_wait(ns, op, batch, codes, 0, job, byref(_abi.CResult()), error)
        self._core.ended.wait()
        out._obj.job, out._obj.error.code, out._obj.error.message = job._obj.value, _abi.ERR_CANCELED, b"context canceled"
        return _abi.OK


def test_a_completion_that_is_returned_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    with paused() as (_, store, ns):
        monkeypatch.setattr(store._core, "lib", _LateLibrary(store))
        outcome: list[BaseException] = []

        def wait() -> None:
            with pytest.raises(ClosedError) as e:
                ns.get(["a"], [bytearray(ns.value_bytes)], timeout=60)
            outcome.append(e.value)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not any(job.id for job in list(store._core.starting)):
            os.sched_yield()
        store.close()
        waiting.join()
        assert len(outcome) == 1


def test_ctrl_c_ends_a_call_that_waits() -> None:
    with paused(dead_for=0.1) as (n, store, ns):
        into = bytearray(ns.value_bytes)

        def when_it_waits() -> None:
            while not store._core.jobs:
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGINT)

        interrupt = threading.Thread(target=when_it_waits)
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            ns.get(["a"], [into], timeout=60)
        interrupt.join()
        into.append(0)  # the job has ended, so the buffer is no longer exported
        n.resume()
        again = bytearray(ns.value_bytes)
        while ns.get(["a"], [again]).ok != 1:
            pass  # until the client connects to the node again
        assert again == value(ns, 0)


def test_an_import_loads_no_library(run: Run) -> None:
    out = run("import penstock.testing\nwith open('/proc/self/maps') as f:\n    print('libpenstock' in f.read())")
    assert out == "False\n"


def test_a_child_of_a_process_that_had_opened_a_store(run: Run) -> None:
    """Each call in the child raises ForkedError. The child can close and exit. The parent is not affected."""
    out = run(
        """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork in a process with threads
store = penstock.Store(NODE)
ns = store.namespace("process", block_tokens=4, layers=2, token_bytes=64, flat=True)
ns.put(["a"], [bytes(ns.value_bytes)])
lease = ns.match(["a"], lease=30).lease
memory = store.register(bytearray(10))
job = ns.jobs.exists(["a"])
child = os.fork()
if child == 0:
    for call in (lambda: ns.match(["a"]), lambda: penstock.Store(NODE), lambda: ns.bump(), job.wait, store.drain, lambda: lease.renew(1)):
        try:
            call()
        except penstock.ForkedError as e:
            assert "spawn" in str(e), e
        else:
            sys.exit(3)
    job.cancel(); lease.release(); memory.close(); store.close()
    del store, ns
    sys.exit(7)  # runs the atexit functions
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert ns.exists(["a"]).ok == 1
job.wait(); lease.release(); memory.close(); store.close()
print("the parent works")
"""
    )
    assert out == "the parent works\n"


def test_children_of_a_process_that_had_not(run: Run) -> None:
    out = run(
        """
import os, sys
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        sys.exit(use(NODE))
    children.append(child)
assert [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children] == [1, 1, 1]
print(use(NODE))
"""
    )
    assert out == "1\n"


def test_multiprocessing(run: Run) -> None:
    out = run(
        """
import multiprocessing
def pool(method):
    with multiprocessing.get_context(method).Pool(2) as pool:
        print(method, pool.map(use, [NODE] * 4))
        pool.close()
        pool.join()
if __name__ == "__main__":
    pool("fork")
    pool("spawn")
    pool("forkserver")
    print(use(NODE))
    pool("spawn")  # after this process has loaded the library
"""
    )
    assert out == "fork [1, 1, 1, 1]\nspawn [1, 1, 1, 1]\nforkserver [1, 1, 1, 1]\n1\nspawn [1, 1, 1, 1]\n"


def test_a_store_is_not_sent_to_another_process(store: Store) -> None:
    import pickle

    with pytest.raises(TypeError, match="open a Store there"):
        pickle.dumps(store)


def test_signal_handlers_of_python_run(run: Run) -> None:
    """Python's signal handlers run, and child processes can be waited for."""
    out = run(
        """
import os, signal, subprocess
seen = []
signal.signal(signal.SIGCHLD, lambda *a: seen.append("chld"))
signal.signal(signal.SIGINT, lambda *a: seen.append("int"))
signal.signal(signal.SIGTERM, lambda *a: seen.append("term"))
store = penstock.Store(NODE)
before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM)]
assert subprocess.run(["/bin/true"]).returncode == 0
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getpid(), signal.SIGTERM)
assert seen == ["chld", "int", "term"], seen
store.close()
assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM)] == before
print("ok")
"""
    )
    assert out == "ok\n"


def test_the_library_changes_no_other_signals(run: Run) -> None:
    """The kernel's masks of caught and ignored signals change only for the signals that penstock.h lists."""
    out = run(
        """
import signal
def masks():
    with open("/proc/self/status") as f:
        return {k: int(v, 16) for k, v in (line.split(":") for line in f if line.startswith(("SigIgn", "SigCgt")))}
before = masks()
use(NODE)
after = masks()
taken = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGPIPE, signal.SIGURG}
changed = {s for s in range(1, 32) for k in before if (before[k] ^ after[k]) >> (s - 1) & 1}
print(sorted(int(s) for s in changed - taken))
"""
    )
    assert out == "[]\n"


def test_faulthandler_reports_a_fault(run: Run) -> None:
    with pytest.raises(AssertionError, match=r"(?s)Fatal Python error: Segmentation fault.*Current thread"):
        run("import faulthandler\nfaulthandler.enable()\nuse(NODE)\nfaulthandler._sigsegv()")


def test_a_broken_pipe_is_an_exception(run: Run) -> None:
    out = run(
        """
import os
use(NODE)
r, w = os.pipe()
os.close(r)
try:
    os.write(w, b"x")
except BrokenPipeError:
    print("BrokenPipeError")
"""
    )
    assert out == "BrokenPipeError\n"


def test_a_process_that_ends_without_closing(run: Run) -> None:
    run(
        """
import logging
logging.basicConfig(level=logging.DEBUG, filename="/dev/null")
store = penstock.Store(NODE)
ns = store.namespace("process", block_tokens=4, layers=2, token_bytes=64, flat=True)
into = bytearray(ns.value_bytes)
jobs = [ns.jobs.get(["a"], [bytearray(ns.value_bytes)]) for _ in range(20)]
"""
    )


def test_a_store_without_references_is_closed(run: Run) -> None:
    out = run(
        """
import gc, warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    store = penstock.Store(NODE)
    core = store._core
    del store
    gc.collect()
print(len(seen), seen[0].category.__name__)
del seen[:]  # a warning has a reference to the store
gc.collect()
print(core.usable())
"""
    )
    assert out == "1 ResourceWarning\nFalse\n"


def test_a_namespace_keeps_its_store_open(node: testing.Node) -> None:
    ns = Store(node.address).namespace("kept", block_tokens=4, layers=2, token_bytes=64)
    gc.collect()
    assert ns.match(["a"]).prefix == 0
    ns._store.close()


def test_a_signal_handler_may_close_the_store(run: Run) -> None:
    out = run(
        """
import os, signal
store = penstock.Store(NODE)
ns = store.namespace("process", block_tokens=4, layers=2, token_bytes=64, flat=True)
signal.signal(signal.SIGALRM, lambda *a: store.close())
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    while True:
        ns.exists(["a"])
except penstock.ClosedError:
    print("closed")
"""
    )
    assert out == "closed\n"


def test_logging(run: Run) -> None:
    out = run(
        """
import logging, threading, penstock
lines = []
came = threading.Event()
class Handler(logging.Handler):
    def emit(self, record):
        lines.append((record.name, record.levelname, record.getMessage()))
        came.set()
logging.getLogger("penstock").addHandler(Handler())
with penstock.Store("127.0.0.1:1"):  # no process listens there, which the library logs as a warning
    assert came.wait(60)
print(lines[0][0], lines[0][1], "127.0.0.1:1" in lines[0][2])
"""
    )
    assert out == "penstock WARNING True\n"


def test_close_is_safe_from_every_thread(ns: Namespace, node: testing.Node) -> None:
    store = Store(node.address)
    in_threads(8, lambda _: store.close())
    assert store.closed

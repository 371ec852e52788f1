"""A real storage node, and a real planner, for tests.

>>> from penstock.testing import node
>>> with node() as n:
...     print(n.address.startswith("127.0.0.1:"))
True
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from penstock._program import program

__all__ = ["Node", "NodeError", "Planner", "Server", "node", "planner"]

_log = logging.getLogger("penstock.testing")

# Ctrl-C must reach this process only, which then stops the node, so the node has a process group of its own. A session of its own is a
# group of the kernel's scheduler too, and may get no CPU for seconds beside an engine (docs/faults.md, Late heartbeats).
_OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}

# The node's parent is this shell script. It kills the node when its standard input ends without a line, which happens
# when this process ends in any way. If this process stops the node itself, it writes a line first. Only the node holds
# the write end of its standard error, so the end of that pipe means that the node has ended.
_SUPERVISOR = """
directory=$1; shift
exec 3<&0
"$@" </dev/null >&2 3<&- &
echo $!
exec >&- 2>&-
read -r _ <&3 || { kill -KILL $!; orphan=1; }
wait $!; code=$?
[ -z "$orphan" ] || rm -rf -- "$directory"
exit $code
"""

_LOG_LINES = 1000  # the greatest number of lines that Node.log returns


class NodeError(RuntimeError):
    """The node did not start or did not stop. The text ends with the node's log."""


class Server:
    """A program of Penstock as a child process. Only one thread at a time may call the methods."""

    _COMMAND: str
    # The flags with an address, and the names of these addresses in the log line "ready". The first one is ``address``.
    _LISTEN: ClassVar[dict[str, str]]

    def __init__(self, directory: Path, *, args: Sequence[str], timeout: float) -> None:
        self._directory = directory
        self._args = list(args)
        self._timeout = timeout
        self._listen = ["127.0.0.1:0"] * len(self._LISTEN)
        self._shell: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._reader: threading.Thread | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self._settled = threading.Event()  # the node is ready, or has ended before that
        self._ready: dict[str, Any] | None = None
        self._pid = 0

    @property
    def address(self) -> str:
        """The ``host:port`` of gRPC, for a Store, a Leader or a Gateway. ``start`` does not change it."""
        return self._listen[0]

    @property
    def http(self) -> str:
        """The ``host:port`` of ``/metrics`` and ``/healthz``."""
        return self._listen[-1]

    @property
    def pid(self) -> int:
        """The process id of the node, or of the last one if none is running."""
        return self._pid

    @property
    def running(self) -> bool:
        """Whether the process exists. It also exists while it is paused."""
        return self._reader is not None and self._reader.is_alive()

    def log(self) -> str:
        """Return the last lines of the node's log, one JSON object per line."""
        return "\n".join(list(self._lines))

    def start(self) -> None:
        """Start the node and wait until it is ready. A node that ran before keeps its data and ports.

        Raises NodeError if the node ends before it is ready, or takes longer than the timeout.
        """
        if self._shell is not None:
            raise NodeError(f"the node is already running as process {self._pid}")
        command = [str(program()), self._COMMAND, "--log-format", "json"]
        for flag, at in zip(self._LISTEN, self._listen, strict=True):
            command += [flag, at]
        command += self._args
        # Settings in the environment of the tests must not apply to this node.
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        self._ready = None
        self._settled.clear()
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SUPERVISOR, "sh", str(self._directory), *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environ, **_OWN_GROUP,
        )  # fmt: skip
        assert self._shell.stdout is not None
        with self._shell.stdout as out:
            self._pid = int(out.readline())
        self._reader = threading.Thread(target=self._follow, args=(self._shell,), name="penstock-node-log", daemon=True)
        self._reader.start()
        try:
            settled = self._settled.wait(self._timeout)
        except BaseException:  # KeyboardInterrupt
            self.kill()
            raise
        if self._ready is None:
            self.kill()
            why = "ended before it was ready" if settled else f"was not ready after {self._timeout} s"
            raise NodeError(f"penstock {self._COMMAND} {why}:\n{self.log()}")
        self._listen = [self._ready[k] for k in self._LISTEN.values()]

    def _follow(self, shell: subprocess.Popen[bytes]) -> None:
        assert shell.stderr is not None
        for raw in shell.stderr:
            line = raw.decode(errors="replace").rstrip("\n")
            self._lines.append(line)
            _log.debug("%s", line)
            if self._ready is None and '"msg":"ready"' in line:
                self._ready = json.loads(line)
                self._settled.set()
        self._settled.set()

    def signal(self, number: int) -> None:
        """Send a signal to the node if it is running."""
        # The shell has not waited for the node yet, so the process id is not reused.
        if self.running:
            os.kill(self._pid, number)

    def pause(self) -> None:
        """Stop the process with SIGSTOP, and wait until it has stopped. It keeps its connections but does not answer."""
        self.signal(signal.SIGSTOP)
        # The kernel stops one thread after the other, and a thread that is not stopped yet may still answer.
        while self.running and not _stopped(self._pid):
            os.sched_yield()

    def resume(self) -> None:
        """Continue after ``pause``."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the node with SIGKILL. ``start`` starts it again on the same data."""
        self._end(signal.SIGKILL, self._timeout)

    def stop(self) -> None:
        """End the node with SIGTERM, so that it drains and syncs its volume.

        Raises NodeError if the node does not end within its timeout and is killed, or if its exit code is not 0.
        """
        code = self._end(signal.SIGTERM, self._timeout)
        if code:
            raise NodeError(f"penstock {self._COMMAND} exited with code {code}:\n{self.log()}")

    def _end(self, number: int, within: float) -> int:
        shell, self._shell = self._shell, None
        if shell is None or os.getpid() != self._owner:
            return 0
        self.signal(signal.SIGCONT)
        self.signal(number)
        assert shell.stdin is not None
        assert shell.stderr is not None
        assert self._reader is not None
        try:
            shell.stdin.write(b"\n")
            shell.stdin.close()
            return shell.wait(within)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            shell.wait()
            raise NodeError(f"penstock {self._COMMAND} did not end within {within} s and was killed:\n{self.log()}") from None
        finally:
            self._reader.join()
            shell.stderr.close()


class Node(Server):
    """A storage node as a child process, with a directory of its own. Use ``node()`` to start one."""

    _COMMAND = "serve"
    _LISTEN: ClassVar[dict[str, str]] = {"--listen": "listen", "--data-listen": "data_listen", "--http": "http"}

    def __init__(self, directory: Path, *, args: Sequence[str], timeout: float) -> None:
        self.data = directory / "data"
        """The directory of the node's volume."""
        super().__init__(directory, args=["--data", str(self.data), "--node", "test", *args], timeout=timeout)


class Planner(Server):
    """A planner as a child process. Use ``planner()`` to start one. It has no state on disk."""

    _COMMAND = "planner"
    _LISTEN: ClassVar[dict[str, str]] = {"--listen": "grpc", "--http": "http"}


def _stopped(pid: int) -> bool:
    """Report whether each thread of a process has stopped or ended."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                if (task / "stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
                    return False
    except FileNotFoundError:
        pass
    return True


_S = TypeVar("_S", bound=Server)


@contextlib.contextmanager
def _run(kind: type[_S], args: Sequence[str], token: str | None, timeout: float) -> Iterator[_S]:
    """Run a server until the block ends, in a temporary directory."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-node-"))
    if token is not None:
        secret = directory / "token"
        secret.touch(0o600)
        secret.write_text(token)
        args = ["--auth-token-file", str(secret), *args]
    s = kind(directory, args=args, timeout=timeout)
    (directory / "data").mkdir()
    owner = os.getpid()
    try:
        s.start()
        yield s
        s.stop()
    finally:
        if os.getpid() == owner:  # a forked child that leaves this block must not end the server
            s.kill()
            shutil.rmtree(directory, ignore_errors=True)


def node(
    *,
    capacity: str = "256MiB",
    arena: str = "64MiB",
    token: str | None = None,
    args: Sequence[str] = (),
    timeout: float = 60,
) -> contextlib.AbstractContextManager[Node]:
    """Run a storage node until the block ends, in a temporary directory, on free ports of this host.

    ``capacity`` and ``arena`` are the values of these flags of ``penstock serve``; ``args`` are further flags. With a
    ``token``, of at least 16 characters, the node refuses callers without the token. The node also ends when this process
    is killed. ``timeout`` bounds the start and the stop of the node, in seconds.

    On a busy machine a node or its disk may wait for many seconds. Unlike a node in production, this node does not take its
    volume for hung then (``--limits-hung-after``), and its reads wait (``--limits-read-wait``).
    """
    flags = ["--capacity", capacity, "--arena", arena, "--index-cache", "8MiB", "--free-floor", "16MiB"]
    flags += ["--prewrite=false", "--scrub-rate", "0B", "--limits-hung-after", "300s", "--limits-read-wait", "60s"]
    return _run(Node, [*flags, *args], token, timeout)


def planner(
    *, block_tokens: int = 16, token: str | None = None, args: Sequence[str] = (), timeout: float = 60
) -> contextlib.AbstractContextManager[Planner]:
    """Run a planner until the block ends, on free ports of this host, as ``node`` runs a node.

    ``block_tokens`` is that of the namespace; ``args`` are further flags of ``penstock planner``.
    """
    return _run(Planner, ["--schedule-block-tokens", str(block_tokens), *args], token, timeout)

"""The commands of README.md and of pages in docs, run as a user runs them.

A test takes a block of shell commands from a page and replaces the values of the test in it: the model, the data
directory, the node's address. The rest runs as it stands.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[3]

# Longer than the slowest engine of a busy machine needs to start and to answer.
_PATIENCE = 900


def commands(word: str, page: str = "README.md") -> list[str]:
    """Return the commands of that block of a page which has the word in it."""
    found = [block for block in re.findall(r"^```sh\n(.*?)^```$", (ROOT / page).read_text(), re.S | re.M) if word in block]
    if len(found) != 1:
        raise ValueError(f"{page} has {len(found)} blocks of shell commands with {word!r}; want 1")
    complete, command = [], ""
    for line in found[0].replace("\\\n", "").splitlines(keepends=True):
        command += line
        with contextlib.suppress(ValueError):  # within a quotation
            shlex.split(command)
            complete.append(command.strip())
            command = ""
    return complete


def replace(command: str, values: Mapping[str, str]) -> str:
    """Return the command with values in place of words, all of which it must have."""
    for word, value in values.items():
        if word not in command:
            raise ValueError(f"{command!r} has no {word!r}")
        command = command.replace(word, value)
    return command


def install(command: str, directory: Path) -> None:
    """Run a pip install of the wheel and an engine in a directory that has the repository's bin. The engine is installed already."""
    (directory / "bin").symlink_to(ROOT / "bin")
    environ = {**_environ(), "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(["bash", "-c", command], cwd=directory, env=environ, check=True, timeout=_PATIENCE)


def _environ() -> dict[str, str]:
    """Return the tests' environment with the programs of this interpreter's environment first, and none of Penstock's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"}


_S = TypeVar("_S", bound="Server")


class Server:
    """A server that a command has started, with all of its processes. It is a context manager.

    It is ready when it has written a line with the word ``ready`` in it; ``line`` is that line.
    """

    def __init__(self, command: str, ready: str, *, log: Path, env: Mapping[str, str]) -> None:
        self.line = ""
        self.log = log
        self._word = ready
        self._ended = False
        self._settled = threading.Event()
        self._process = subprocess.Popen(
            ["bash", "-c", "exec " + command.rstrip("& \n")],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            cwd=log.parent, env={**_environ(), **env}, process_group=0,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()
        try:
            self._settled.wait(_PATIENCE)
            if not self.line:
                raise RuntimeError(f"{command}: no line with {ready!r}; the log ends with\n{self._tail()}")
        except BaseException:
            self.close()
            raise

    def _follow(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines, self.log.open("a") as log:
            for line in lines:
                log.write(line)
                log.flush()
                if self._word in line and not self.line:
                    self.line = line
                    self._settled.set()
        self._settled.set()

    def _tail(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-60:])

    def close(self) -> None:
        """End the server and all of its processes, unless ``kill`` has."""
        if self._ended:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self.kill()

    def kill(self) -> None:
        """End the server and all of its processes with SIGKILL."""
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._ended = True

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextlib.contextmanager
def node(command: str, directory: Path) -> Iterator[str]:
    """Run the README's penstock serve until the block ends, on free ports and a small disk. Yield its address."""
    command = replace(command, {"/tmp/penstock": str(directory / "data"), "8GiB": "256MiB"})
    settings = {"DATA_LISTEN": "127.0.0.1:0", "ARENA": "64MiB", "FREE_FLOOR": "16MiB"}
    with penstock(command, directory / "node.log", settings) as address:
        yield address


@contextlib.contextmanager
def penstock(command: str, log: Path, settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a server of the program until the block ends, on free ports. Yield its address."""
    all_settings = {"LISTEN": "127.0.0.1:0", "HTTP": "127.0.0.1:0", "LOG_FORMAT": "json", **(settings or {})}
    environ = {f"PENSTOCK_{name}": value for name, value in all_settings.items()}
    with Server(command, '"msg":"ready"', log=log, env=environ) as server:
        line = json.loads(server.line)
        yield line.get("listen") or line["grpc"]


def ports(count: int) -> list[int]:
    """Return different free ports below the range from which the kernel assigns ports."""
    free: list[int] = []
    for number in random.sample(range(10000, 32000), 100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", number))
            free.append(number)
    if len(free) < count:
        raise RuntimeError(f"{len(free)} of 100 ports are free; want {count}")
    return free[:count]


def http(port: int, path: str, body: Mapping[str, Any] | None = None) -> str:
    """Return what a server answers to a GET, or to a POST of JSON if there is a body.

    Uvicorn writes its line just before it listens, so the first connections may be refused.
    """
    data = None if body is None else json.dumps(body).encode()
    for _ in range(100_000):
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            break
        os.sched_yield()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
        text: str = answer.read().decode()
    return text

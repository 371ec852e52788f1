"""An engine in a process of its own, which a test calls by name.

The engine's process runs a driver, a Python file that ends in ``serve({"generate": generate, …})``. Calls and answers
are JSON, a line each, over two pipes of their own, because engines write to the standard streams:

    test                                   driver
    Engine("vllm_driver.py", …)  ────────► imports the engine, makes it, serve(…)
    engine.call("generate", …)   ─ line ─► generate(…)
                                 ◄─ line ─ {"value": …} or {"error": "traceback"}
    engine.close()               ─ end  ─► serve returns, the process ends
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
_PIPES = "PENSTOCK_ENGINE_PIPES"


class EngineError(RuntimeError):
    """The engine's process failed. The text ends with the last lines of its log."""


class Engine:
    """A driver that runs. It is a context manager, and for one thread at a time.

    ``settings`` is what the driver's ``settings()`` returns. ``start`` seconds are for importing and making the engine.
    """

    def __init__(
        self, driver: str, settings: Mapping[str, Any], *, log: Path, env: Mapping[str, str] | None = None, start: float = 600
    ) -> None:
        self.log = log
        theirs_in, self._calls = os.pipe()
        self._answers, theirs_out = os.pipe()
        environ = {**os.environ, "PYTHONPATH": str(HERE), **(env or {}), _PIPES: f"{theirs_in},{theirs_out}"}
        try:
            with log.open("ab") as out:
                self._process = subprocess.Popen(
                    [sys.executable, str(HERE / driver), json.dumps(settings)],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=log.parent,
                    env=environ, pass_fds=(theirs_in, theirs_out), process_group=0,
                )  # fmt: skip
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._buffer = b""
        self.pid = self._process.pid
        try:
            self._answer("the start", start)
        except BaseException:
            self.kill()
            raise

    def call(self, name: str, /, *, timeout: float = 300, **arguments: Any) -> Any:
        """Call a function of the driver and return its result. Raises EngineError if it raises, or takes too long."""
        self.submit(name, **arguments)
        return self.result(name, timeout=timeout)

    def submit(self, name: str, /, **arguments: Any) -> None:
        """Begin a call, so that the test can act while it runs. ``result`` ends it."""
        line = json.dumps({"call": name, "arguments": arguments}).encode() + b"\n"
        while line:
            line = line[os.write(self._calls, line) :]

    def result(self, name: str, /, *, timeout: float = 300) -> Any:
        """Return the result of the call that ``submit`` began."""
        return self._answer(name, timeout)

    def _answer(self, name: str, timeout: float) -> Any:
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise EngineError(f"{name} took longer than {timeout} s{self._tail()}")
                data = os.read(self._answers, 1 << 20)
                if not data:
                    raise EngineError(f"the engine ended during {name}, exit code {self._process.wait()}{self._tail()}")
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{name} failed: {answer['error']}{self._tail()}")
        return answer["value"]

    def _tail(self, lines: int = 60) -> str:
        return "\nlog:\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self, timeout: float = 60) -> None:
        """End the driver and wait for it. Raises EngineError if its exit code is not 0."""
        if self._calls < 0:
            return
        os.close(self._calls)
        self._calls = -1
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise EngineError(f"the engine did not end within {timeout} s{self._tail()}") from None
        self.kill()
        if code:
            raise EngineError(f"the engine exited with code {code}{self._tail()}")

    def kill(self) -> None:
        """End the driver and all of its processes with SIGKILL."""
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._calls >= 0:
            os.close(self._calls)
            self._calls = -1
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


def settings() -> dict[str, Any]:
    """Return the settings that the test gave to Engine. For drivers."""
    value: dict[str, Any] = json.loads(sys.argv[1])
    return value


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls until the test closes the engine. For drivers, on their main thread."""
    calls, answers = (int(fd) for fd in os.environ.pop(_PIPES).split(","))
    with os.fdopen(calls, "rb") as lines, os.fdopen(answers, "wb") as out:

        def answer(value: Any) -> None:
            out.write(json.dumps(value).encode() + b"\n")
            out.flush()

        answer({"value": None})  # the engine is made
        for line in lines:
            request = json.loads(line)
            try:
                value = {"value": functions[request["call"]](**request["arguments"])}
            except Exception:
                value = {"error": traceback.format_exc()}
            answer(value)

"""A driver without an engine, for the test of the harness."""

import os
import signal
from typing import Any

from harness.process import serve, settings


def echo(value: Any) -> Any:
    print("echo", value, flush=True)
    return [settings()["greeting"], value]


def fail() -> None:
    raise ValueError("ordered to fail")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    signal.pause()


serve({"echo": echo, "fail": fail, "die": die, "hang": hang})

"""LMCache's server on Penstock, as README.md starts it, and a model of the objects that engines store through it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import readme
from harness.faults import penstock
from harness.process import HERE
from harness.vllm import Stored, lmcache
from penstock import testing
from penstock.lmcache import PenstockL2

CHUNK = 64
"""How many tokens an object of LMCache has."""

_PATIENCE = 300  # seconds; more than any wait takes on a busy machine
_SIGNAL = "LMCACHE_SIGNAL_FILE"
_EVENT = re.compile(r'^penstock_adapter_events_total\{adapter="lmcache",event="(\w+)"\} (\S+)$', re.M)


class LMCache(readme.Server):
    """A server of LMCache on a node, in processes of its own. It is a context manager.

    ``connector`` is the configuration of its engines, and ``options`` are parameters of the adapter. ``signal_at_load`` needs
    ``signals``.
    """

    def __init__(self, address: str, log: Path, *, signals: bool = False, **options: float) -> None:
        port, self._http, metrics = readme.ports(3)
        self.connector = lmcache(port)
        self._signal = log.with_suffix(".signal")
        *_, command = readme.commands("lmcache server")
        values = {"127.0.0.1:7420": address}
        if signals:
            values |= {"penstock.lmcache": __name__, PenstockL2.__name__: SignalL2.__name__}
        command = readme.replace(command, values)
        command += f" --chunk-size {CHUNK} --host 127.0.0.1 --port {port}"
        command += f" --http-host 127.0.0.1 --http-port {self._http} --prometheus-port {metrics}"
        environ = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONPATH": str(HERE), _SIGNAL: str(self._signal)}
        # On a busy machine a node that is well may take its time. Tests of faults have shorter bounds.
        given = {"timeout": 25, "connect_timeout": 120, **options}
        environ |= {f"PENSTOCK_{name.upper()}": str(value) for name, value in given.items()}
        super().__init__(command, "Uvicorn running on", log=log, env=environ)
        assert readme.http(self._http, "/healthcheck")

    def events(self) -> Counter[str]:
        """Return the adapter's events from LMCache's page of metrics."""
        page = readme.http(self._http, "/metrics")
        return Counter({event: int(float(count)) for event, count in _EVENT.findall(page)})

    def clear(self) -> None:
        """Wait until LMCache neither loads nor stores an object, and remove all objects from its memory."""

        def empty() -> bool:
            readme.http(self._http, "/cache/clear", {})
            status = json.loads(readme.http(self._http, "/status"))
            return int(status["storage_manager"]["l1_manager"]["total_object_count"]) == 0

        wait(empty, "an empty memory of LMCache")

    def signal_at_load(self, pid: int, number: int) -> None:
        """Let SignalL2 stop or kill a process by a signal when the next objects were looked up and are about to be loaded."""
        written = self._signal.with_suffix(".new")
        written.write_text(f"{pid} {int(number)}")
        written.rename(self._signal)


class SignalL2(PenstockL2):
    """The adapter with a signal to a node before a load, in LMCache's process."""

    def submit_batch_get(self, keys: list[str], bufs: list[Any]) -> int:
        file = Path(os.environ[_SIGNAL])
        with contextlib.suppress(FileNotFoundError):
            taken = file.rename(file.with_suffix(".taken"))  # fails in every thread but one
            pid, number = map(int, taken.read_text().split())
            os.kill(pid, number)
            while not testing._stopped(pid):
                os.sched_yield()
        return super().submit_batch_get(keys, bufs)


class Chunks(Stored):
    """A model of the objects that engines of one rank have stored: the whole chunks of their prompts."""

    def __init__(self) -> None:
        super().__init__(CHUNK)

    def add(self, prompt: list[int], tokens: list[int]) -> None:
        """Add a prompt. LMCache does not store chunks that contain generated tokens."""
        self._prefixes.update(tuple(prompt[:end]) for end in range(CHUNK, len(prompt) + 1, CHUNK))

    def cached(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt are loaded. The engine computes the last one in any case."""
        end = super().cached([*prompt, 0])
        return min(end, len(prompt) - 1)


def objects(address: str) -> int:
    """Return how many objects of LMCache a node has. Each length of an object has a namespace."""
    listed = penstock("ns", "list", "--server", address)["namespaces"]
    return sum(int(one["blocks"]) for one in listed if re.fullmatch(r"lmcache/[^/]+/\d+", one["name"]))


def wait_until_stored(address: str, count: int) -> None:
    """Wait until the node has that many objects, which LMCache stores in the background, and check that it has no more."""
    wait(lambda: objects(address) >= count, f"{count} objects")
    assert objects(address) == count


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition. Each check makes a request, which bounds the rate of checks."""
    end = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {_PATIENCE} s")

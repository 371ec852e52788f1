"""The README's commands for LMCache, under vLLM: engine, LMCache's server, Penstock's adapter, node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from harness import readme
from harness.sessions import Session
from harness.vllm import Vllm, lmcache

from penstock._program import program

CHUNK = 64
ENVIRON = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PENSTOCK_TIMEOUT": "25", "PENSTOCK_CONNECT_TIMEOUT": "120"}


def blocks(address: str) -> int:
    """Return how many objects of LMCache the node has."""
    command = [str(program()), "ns", "list", "--server", address, "--format", "json"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["namespaces"]
    return sum(int(one["blocks"]) for one in listed if one["name"].startswith("lmcache/") and not one["name"].endswith("/lengths"))


def wait_until_stored(address: str, count: int) -> None:
    """Wait for objects that LMCache stores in the background. Each query runs a process, which bounds the rate of queries."""
    for _ in range(2000):
        if blocks(address) >= count:
            return
    raise TimeoutError(f"{blocks(address)} objects; want {count}")


def test_readme(vllm: Vllm, agents: list[Session], tmp_path: Path) -> None:
    """A second engine and a second server of LMCache have nothing but the node. The tokens are the same."""
    prompt = max((turn.prompt for turn in agents[0].turns), key=len)
    pip, serve, server = readme.commands("lmcache server")
    readme.install(pip, tmp_path)
    with readme.node(serve, tmp_path) as address:
        port, http, metrics = readme.port(), readme.port(), readme.port()
        command = readme.replace(server, {"127.0.0.1:7420": address}) + f" --chunk-size {CHUNK}"
        command += f" --host 127.0.0.1 --port {port} --http-host 127.0.0.1 --http-port {http} --prometheus-port {metrics}"
        answers: list[dict[str, Any]] = []
        for name in ("first", "second"):
            with readme.Server(command, "Uvicorn running on", log=tmp_path / f"{name}.log", env=ENVIRON):
                assert readme.http(http, "/healthcheck")
                vllm.start(name, lmcache(port))
                answers += vllm.generate(name, [prompt])
                wait_until_stored(address, len(prompt) // CHUNK)
                vllm.stop(name)
        first, second = answers
        assert second["tokens"] == first["tokens"]
        assert (first["cached"], second["cached"]) == (0, (len(prompt) - 1) // CHUNK * CHUNK)

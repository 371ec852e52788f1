"""``penstock gateway`` in front of two of vLLM's servers, which share a node."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from harness import readme
from harness.faults import blocks
from harness.model import FIRST_TOKEN
from harness.sessions import Session
from harness.vllm import BLOCK, OUTPUT, Stored, connector

from penstock import testing

TIMEOUT = 120
PREFIX = 10 * BLOCK
TAIL = 16  # less than a block, with the tokens that are generated


class Gateway(testing.Server):
    """A gateway as a child process."""

    _COMMAND = "gateway"
    _LISTEN: ClassVar[dict[str, str]] = {"--listen": "listen", "--http": "http"}

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def samples(self, name: str) -> dict[int, float]:
        """Return a metric's value for each engine, by the engine's port. Of the answers, those with status 200."""
        page = readme.http(int(self.http.rpartition(":")[2]), "/metrics")
        line = rf'^penstock_gateway_{name}\{{(?:code="200",)?engine="http://127\.0\.0\.1:(\d+)"\}} (\S+)$'
        return {int(port): float(value) for port, value in re.findall(line, page, re.M)}


@contextlib.contextmanager
def gateway(ports: list[int], directory: Path) -> Iterator[Gateway]:
    """Run a gateway of engines until the block ends. SIGTERM ends it with exit code 0."""
    engines = [word for port in ports for word in ("--engine", f"http://127.0.0.1:{port}")]
    # On a busy machine an engine that is well may answer polls late.
    g = Gateway(directory, args=[*engines, "--health-timeout", f"{TIMEOUT}s"], timeout=TIMEOUT)
    try:
        g.start()
        wait_until(lambda: g.samples("engine_healthy") == dict.fromkeys(ports, 1), "healthy engines")
        yield g
        g.stop()
    finally:
        g.kill()


@contextlib.contextmanager
def engines(model: Path, node: testing.Node, directory: Path) -> Iterator[dict[int, readme.Server]]:
    """Run two servers until the block ends, both of which start at once. Yield them by port."""
    ports = readme.ports(2)

    def start(port: int) -> readme.Server:
        command = (
            f"{shlex.quote(sys.executable)} -m vllm.entrypoints.openai.api_server --model {model} --port {port} --host 127.0.0.1"
            f" --dtype float32 --max-model-len 1024 --block-size {BLOCK} --distributed-executor-backend uni --enforce-eager"
            f" --kv-transfer-config {shlex.quote(json.dumps(connector(node)))}"
        )
        return readme.Server(command, "Application startup complete", log=directory / f"{port}.log", env={"VLLM_CPU_KVCACHE_SPACE": "1"})

    with ThreadPoolExecutor() as pool:
        starting = {port: pool.submit(start, port) for port in ports}
        try:
            yield {port: server.result() for port, server in starting.items()}
        finally:
            for server in starting.values():
                if server.exception() is None:
                    server.result().close()


def complete(port: int, model: Path, prompt: list[int], *, stream: bool = False) -> list[int]:
    """Return the tokens that a server generates for a prompt. Its answer is one object, or a stream of events."""
    request = {
        "model": str(model),
        "prompt": prompt,
        "max_tokens": OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    text = readme.http(port, "/v1/completions", request)
    parts: list[dict[str, Any]] = [json.loads(text)] if not stream else []
    if stream:
        *events, last = [line for line in text.splitlines() if line]
        assert last == "data: [DONE]"
        parts = [json.loads(event.removeprefix("data: ")) for event in events]
    tokens = [token for part in parts for choice in part["choices"] for token in choice["token_ids"] or []]
    assert len(tokens) == OUTPUT
    return tokens


def models(port: int) -> list[str]:
    return [one["id"] for one in json.loads(readme.http(port, "/v1/models"))["data"]]


def hit_tokens(port: int) -> float:
    """Return how many tokens an engine has found in Penstock."""
    lines = readme.http(port, "/metrics").splitlines()
    (hits,) = [float(line.split()[-1]) for line in lines if line.startswith("vllm:penstock_hit_tokens_total{")]
    return hits


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, f"no {what} within {TIMEOUT} s"
        os.sched_yield()


def test_gateway(model: Path, agents: list[Session], tmp_path: Path) -> None:
    """Prompts with one prefix go to one engine. After its end the other engine has the prefix from the node, and the same tokens."""
    others = [max((turn.prompt for turn in session.turns), key=len) for session in agents[1:4]]
    prefix = max((turn.prompt for turn in agents[0].turns), key=len)[:PREFIX]
    prompts = [prefix + [FIRST_TOKEN + k] * TAIL for k in range(4)]
    assert len(prefix) == PREFIX
    assert len(",".join(map(str, prefix))) > 512  # two blocks of the gateway's
    stored = Stored()
    with (
        testing.node() as node,
        engines(model, node, tmp_path) as running,
        gateway(list(running), tmp_path / "gateway") as front,
    ):
        for prompt in others:
            direct = [complete(port, model, prompt) for port in running]
            through = [complete(front.port, model, prompt, stream=stream) for stream in (False, True)]
            assert direct + through == [direct[0]] * 4
            stored.add(prompt, direct[0])

        before = front.samples("requests_total")
        tokens = [complete(front.port, model, prompt, stream=k % 2 == 1) for k, prompt in enumerate(prompts)]
        served = {port: count - before[port] for port, count in front.samples("requests_total").items()}
        assert sorted(served.values()) == [0, len(prompts)]
        other, home = sorted(served, key=lambda port: served[port])
        assert [complete(home, model, prompt) for prompt in prompts] == tokens
        assert len(set(map(tuple, tokens))) == len(prompts)  # the answers differ in more than the prefix

        for prompt, answer in zip(prompts, tokens, strict=True):
            stored.add(prompt, answer)
        wait_until(lambda: blocks(node) == len(stored), "blocks of all prompts in the node")
        found = hit_tokens(other)
        running[home].kill()
        for stream in (False, True):
            assert [complete(front.port, model, prompt, stream=stream) for prompt in prompts] == tokens
        assert hit_tokens(other) - found == stored.cached(prompts[0]) == PREFIX

        wait_until(lambda: front.samples("engine_healthy") == {home: 0, other: 1}, "end of the engine in the gateway's metrics")
        health = json.loads(readme.http(front.port, "/health"))  # with status 200
        assert health["engines"] == {f"http://127.0.0.1:{home}": False, f"http://127.0.0.1:{other}": True}
        assert models(front.port) == models(other) == [str(model)]

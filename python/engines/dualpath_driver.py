"""Clusters of vLLM's servers for ``penstock bench cluster --engines vllm``, on a machine with root.

    start     engines, node, planner and gateway in network namespaces; the prompts of agents are served once, and so stored
    replay    each prompt again, with a block of new tokens behind it; a policy sets the sides that read storage, bits the rate of a NIC
    stop

All replays of a cluster use the same engines and the same node. The planner starts again with the policy.

    start_loads    two engines with PenstockConnector and a node: one engine loads whole prompts, the other one layers
    load           each prompt again at one of them, with new tokens behind it
    stop
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dualpath_cluster import PATIENCE, TOKEN_BYTES, Answer, Cluster, Engine, Hosts, check, cluster, send, until
from harness import process
from harness.model import FIRST_TOKEN, VOCABULARY, make_llama
from harness.sessions import sessions
from harness.vllm import BLOCK, Stored, Vllm, connector

_OUTPUT = 16
_FAST = 10_000_000_000  # bits per second of the storage NICs while prompts are stored
_ALONE = "alone"
_LOADS: dict[str, dict[str, Any]] = {"async": {}, "layers": {"layers_per_read": 1}}
"""The engines of start_loads: the connector's option load, with further options."""
_NEW = 256
"""New tokens behind a stored prompt, so that the computation of the layers takes a time that can be compared with their loads."""


class Bench:
    """One vLLM without Penstock, and at most one cluster."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._vllm = stack.enter_context(process.Engine("vllm_driver.py", {}, log=directory / "vllm.log"))
        self._clusters = 0
        self._cluster: Cluster | None = None
        self._hosts: Hosts | None = None
        self._engines: dict[str, Engine] = {}
        self._ends = contextlib.ExitStack()

    def start(self, prefill: int, decode: int, bits: int, agents: int, tokens: int) -> dict[str, Any]:
        """Start a cluster and store a prompt of each agent, of at most ``tokens`` tokens. Return the mean size of their KV."""
        length = tokens + BLOCK + _OUTPUT
        vllm, directory = self._begin(length, agents, tokens)
        names = [f"p{i}" for i in range(prefill)] + [f"d{i}" for i in range(decode)]
        c = self._ends.enter_context(cluster(vllm, directory, names, bits=bits, length=length))
        self._cluster = c
        c.limit(_FAST)
        blocks = sum(len(prompt) // BLOCK for prompt in self._prompts)
        answers = c.serve(self._prompts, 1)
        check(answers, self._tokens(self._prompts, 1))
        if not all(answer.right for answer in answers):
            raise RuntimeError("a prompt was not served")
        until(lambda: c.metric(c.planner, "penstock_planner_serving_requests") == 0, "end of the first turn")
        return {"kv_bytes": blocks * BLOCK * TOKEN_BYTES / len(self._prompts)}

    def _begin(self, length: int, agents: int, tokens: int, **shape: int) -> tuple[Vllm, Path]:
        """Start the vLLM without Penstock, and scale the prompts. Return what starts engines of its model, and a new directory."""
        self._alone = Vllm(self._vllm, make_llama(self._directory / f"model {length}", positions=length, **shape))
        self._clusters += 1
        directory = self._directory / str(self._clusters)
        directory.mkdir()
        self._alone.start(_ALONE, None, enable_prefix_caching=False, max_model_len=length)
        self._ends.callback(self._alone.stop, _ALONE)
        self._prompts = [session.turns[0].prompt for session in sessions(agents, turns=1, tokens=tokens)]
        return self._alone, directory

    def _tokens(self, prompts: list[list[int]], output: int) -> list[list[int]]:
        return [answer["tokens"] for answer in self._alone.generate(_ALONE, prompts, output)]

    def replay(self, policy: str, seed: int, bits: int) -> dict[str, Any]:
        """Serve all prompts at once, each with new tokens at its end. Compare all tokens with one vLLM's. Times are in seconds."""
        assert self._cluster is not None
        c = self._cluster
        c.plan_by(policy)
        c.limit(bits)
        new = random.Random(seed)
        prompts = [[*prompt, *(new.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(BLOCK))] for prompt in self._prompts]
        before = {name: engine.host.storage.received() for name, engine in c.engines.items()}
        answers = c.serve(prompts, _OUTPUT, stream=True)
        received = {name: engine.host.storage.received() - before[name] for name, engine in c.engines.items()}
        until(lambda: c.metric(c.planner, "penstock_planner_serving_requests") == 0, "end of the replay")
        found = check(answers, self._tokens(prompts, _OUTPUT))
        whole = [answer for answer in answers if answer.right]
        if not whole:
            raise RuntimeError(f"no request was served within {PATIENCE} s")
        return {
            "completion": max(answer.seconds for answer in whole),
            "first_token": statistics.median(answer.first for answer in whole),
            "end_of_turn": statistics.median(answer.seconds - answer.first for answer in whole),
            "failed": len(answers) - found["right"],
            "bytes": received,
        }

    def start_loads(self, agents: int, tokens: int, hidden: int, layers: int) -> dict[str, Any]:
        """Start the engines, of a model of that shape, and store a prompt of each agent, of at most ``tokens`` tokens.

        Return the mean number of their cached tokens, the number of new tokens of a request, and the median time to the first token
        where the storage NIC takes almost none of it.
        """
        length = tokens + _NEW + _OUTPUT
        vllm, directory = self._begin(length, agents, tokens, hidden=hidden, layers=layers)
        hosts = self._hosts = Hosts(directory, self._ends)
        node = hosts.node("n0")
        for load, options in _LOADS.items():
            host = hosts.host(_FAST)
            engine = Engine(vllm, load, host, connector(node.address, load=load, namespace="loads", **options), 1, length, directory)
            self._engines[load] = engine
            self._ends.callback(engine.kill)
            engine.start(vllm.model)
        for engine in self._engines.values():
            engine.wait()
        stored = Stored()
        for prompt, answer in zip(self._prompts, self._tokens(self._prompts, 1), strict=True):
            stored.add(prompt, answer)
        for prompt in self._prompts:
            send(hosts.control, self._engines["async"].address, prompt, 1, None)
        until(lambda: hosts.stored() == len(stored), "blocks of the prompts in the node")
        cached = statistics.mean(stored.cached([*prompt, 0]) for prompt in self._prompts)
        times = [self.load(load, _FAST, seed, at_once=False)["first_token"] for seed, load in enumerate(_LOADS, -len(_LOADS))]
        return {"cached_tokens": cached, "new_tokens": _NEW, "compute": min(times)}

    def load(self, load: str, bits: int, seed: int, at_once: bool) -> dict[str, Any]:
        """Serve all prompts at an engine with a storage NIC of a rate, each with new tokens at its end, one by one or at once.

        Compare all tokens with one vLLM's. Times are in seconds.
        """
        assert self._hosts is not None
        network, engine = self._hosts.control, self._engines[load]
        engine.host.storage.limit(bits)
        new = random.Random(seed)
        prompts = [[*prompt, *(new.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(_NEW))] for prompt in self._prompts]

        def serve(prompt: list[int]) -> Answer:
            return send(network, engine.address, prompt, _OUTPUT, threading.Event())

        before, begin = engine.host.storage.received(), time.perf_counter()
        with ThreadPoolExecutor(len(prompts) if at_once else 1) as pool:
            answers = list(pool.map(serve, prompts))
        took, received = time.perf_counter() - begin, engine.host.storage.received() - before
        found = check(answers, self._tokens(prompts, _OUTPUT))
        if not found["right"]:
            raise RuntimeError(f"no request was served within {PATIENCE} s")
        return {
            "completion": took,
            "first_token": statistics.median(answer.first for answer in answers if answer.right),
            "failed": len(answers) - found["right"],
            "bytes": received,
        }

    def stop(self) -> None:
        """End the cluster."""
        self._cluster, self._hosts, self._engines = None, None, {}
        self._ends.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="penstock-cluster-") as directory, contextlib.ExitStack() as stack:
        bench = Bench(Path(directory), stack)
        stack.callback(bench.stop)
        calls: dict[str, Callable[..., Any]]
        calls = {"start": bench.start, "replay": bench.replay, "start_loads": bench.start_loads, "load": bench.load, "stop": bench.stop}
        process.serve(calls)

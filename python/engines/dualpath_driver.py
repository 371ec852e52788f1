"""Prefill/decode clusters of vLLM's servers for ``penstock bench cluster --engines vllm``, on a machine with root.

    start     engines, node, planner and gateway in network namespaces; the prompts of agents are served once, and so stored
    replay    each prompt again, with a block of new tokens behind it; the sides that read storage are those of a policy
    stop

All replays of a cluster use the same engines and the same node. The planner starts again with the policy.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from dualpath_cluster import PATIENCE, TOKEN_BYTES, Cluster, check, cluster, until
from harness import process
from harness.model import FIRST_TOKEN, VOCABULARY, make_llama
from harness.sessions import sessions
from harness.vllm import BLOCK, Vllm

_OUTPUT = 16
_FAST = 10_000_000_000  # bits per second of the storage NICs while prompts are stored
_ALONE = "alone"


class Bench:
    """One vLLM without Penstock, and at most one cluster."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._vllm = stack.enter_context(process.Engine("vllm_driver.py", {}, log=directory / "vllm.log"))
        self._clusters = 0
        self._cluster: Cluster | None = None
        self._ends = contextlib.ExitStack()

    def start(self, prefill: int, decode: int, bits: int, agents: int, tokens: int) -> dict[str, Any]:
        """Start a cluster and store a prompt of each agent, of at most ``tokens`` tokens. Return the mean size of their KV."""
        length = tokens + BLOCK + _OUTPUT
        vllm = Vllm(self._vllm, make_llama(self._directory / f"model {length}", positions=length))
        self._clusters += 1
        directory = self._directory / str(self._clusters)
        directory.mkdir()
        names = [f"p{i}" for i in range(prefill)] + [f"d{i}" for i in range(decode)]
        vllm.start(_ALONE, None, enable_prefix_caching=False, max_model_len=length)
        self._ends.callback(vllm.stop, _ALONE)
        c = self._ends.enter_context(cluster(vllm, directory, names, bits=bits, length=length))
        self._alone, self._cluster, self._bits = vllm, c, bits
        self._prompts = [session.turns[0].prompt for session in sessions(agents, turns=1, tokens=tokens)]
        c.limit(_FAST)
        blocks = sum(len(prompt) // BLOCK for prompt in self._prompts)
        answers = c.serve(self._prompts, 1)
        check(answers, self._tokens(self._prompts, 1))
        if not all(answer.right for answer in answers):
            raise RuntimeError("a prompt was not served")
        until(lambda: c.metric(c.planner, "penstock_planner_serving_requests") == 0, "end of the first turn")
        return {"kv_bytes": blocks * BLOCK * TOKEN_BYTES / len(self._prompts)}

    def _tokens(self, prompts: list[list[int]], output: int) -> list[list[int]]:
        return [answer["tokens"] for answer in self._alone.generate(_ALONE, prompts, output)]

    def replay(self, policy: str, seed: int) -> dict[str, Any]:
        """Serve all prompts at once, each with new tokens at its end. Compare all tokens with one vLLM's. Times are in seconds."""
        assert self._cluster is not None
        c = self._cluster
        c.plan_by(policy)
        c.limit(self._bits)
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

    def stop(self) -> None:
        """End the cluster."""
        self._cluster = None
        self._ends.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="penstock-cluster-") as directory, contextlib.ExitStack() as stack:
        bench = Bench(Path(directory), stack)
        stack.callback(bench.stop)
        process.serve({"start": bench.start, "replay": bench.replay, "stop": bench.stop})

"""vLLM's engines in forks of one process, and a model of what they have stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.process import Engine
from penstock import testing

BLOCK = 32
OUTPUT = 8
# On a busy machine a node that is well may take its time. Tests of faults have shorter bounds.
PATIENT = {"connect_timeout": 120, "lookup_timeout": 120, "load_timeout": 120}
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
"""Options of an engine of two ranks, each a process."""
LFM2: dict[str, Any] = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""Options of an engine of an LFM2 model. vLLM 0.32's rotary kernel for CPUs rotates wrong elements of queries that have a dimension for
heads, as LFM2's do; PyTorch rotates the right ones."""

Answer = dict[str, Any]


def connector(servers: testing.Node | str, **extra: Any) -> dict[str, Any]:
    """Return the configuration of PenstockConnector, with further options."""
    return {
        "kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "servers": _address(servers), **PATIENT, "save_timeout": 120, **extra,
        },
    }  # fmt: skip


def dual_path(
    servers: testing.Node | str, planner: testing.Planner | str, engine: str, *, prefill: bool, hybrid: bool = False, **extra: Any
) -> dict[str, Any]:
    """Return the configuration of PenstockDualPath, or of PenstockDualPathHybrid, with further options."""
    bounds = dict.fromkeys(("connect_timeout", "start_timeout", "request_timeout", "job_timeout", "layer_timeout", "append_timeout"), 120)
    return {
        "kv_connector": "PenstockDualPathHybrid" if hybrid else "PenstockDualPath",
        "kv_connector_module_path": "penstock.vllm",
        "kv_role": "kv_producer" if prefill else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "servers": _address(servers), "planner": _address(planner), "engine": engine, "machine": f"machine of {engine}",
            "namespace": "dual", "buffer_mib": 64, **bounds, **extra,
        },
    }  # fmt: skip


def tier(servers: testing.Node | str, memory: int = 256 << 20, **extra: Any) -> dict[str, Any]:
    """Return the configuration of PenstockTier behind the copy worker for the CPU, with further options.

    memory is the number of bytes of the primary tier.
    """
    options = {"servers": _address(servers), **PATIENT, "store_timeout": 120, **extra}
    return offloading({"type": "PenstockTier", "module_path": "penstock.vllm", **options}, memory)


def fs_tier(directory: str) -> dict[str, Any]:
    """Return the configuration of vLLM's own tier of files behind the same copy worker."""
    return offloading({"type": "fs", "root_dir": directory})


def offloading(tier: dict[str, Any], memory: int = 256 << 20) -> dict[str, Any]:
    """Return the configuration of vLLM's offloading with a primary tier of that many bytes and one secondary tier."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CopySpec", "spec_module_path": "vllm_copy_spec", "cpu_bytes_to_use": memory, "secondary_tiers": [tier],
            "self_describing_kv_events": True,
        },
    }  # fmt: skip


def disk_offload(file: str) -> dict[str, Any]:
    """Return the configuration of the connector in vLLM that copies blocks from the device straight to a file."""
    return {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kv_offload_backend": "disk", "disk_path": file, "disk_capacity_bytes": 1 << 30},
    }


def lmcache(port: int) -> dict[str, Any]:
    """Return the configuration of LMCache's connector to its server on this host."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }


def _address(servers: testing.Server | str) -> str:
    return servers if isinstance(servers, str) else servers.address


class Vllm:
    """Engines by name, in forks of one process that has imported vLLM."""

    def __init__(self, host: Engine, model: Path) -> None:
        self.host = host
        self.model = str(model)

    def start(self, name: str, connector: dict[str, Any] | None, model: Path | None = None, **options: Any) -> None:
        """Make an engine with a KV connector and further options of LLM."""
        self.host.call("start", name=name, model=str(model or self.model), connector=connector, options=options, timeout=600)

    def call(self, name: str, function: str, **arguments: Any) -> Any:
        return self.host.call("call", **{"name": name, "function": function, **arguments}, timeout=600)

    def generate(self, name: str, prompts: list[list[int]], output: int = OUTPUT, **arguments: Any) -> list[Answer]:
        answers: list[Answer] = self.call(name, "generate", prompts=prompts, output=output, **arguments)
        assert [a["finish"] for a in answers] == ["length"] * len(prompts)  # no request has failed
        return answers

    def both(self, names: list[str], prompts: list[list[int]]) -> list[list[Answer]]:
        """Let engines generate for the same prompts at once."""
        what = {name: ["generate", {"prompts": prompts, "output": OUTPUT}] for name in names}
        answers = self.host.call("calls", what=what, timeout=600)
        return [answers[name] for name in names]

    def stop(self, name: str) -> None:
        self.host.call("stop", name=name)


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


class Stored:
    """A model of what the node has: the blocks of all sequences that engines have computed."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._prefixes: set[tuple[int, ...]] = set()

    def add(self, prompt: list[int], tokens: list[int]) -> None:
        whole = [*prompt, *tokens][:-1]  # the KV of the last token is never computed
        self._prefixes.update(tuple(whole[:end]) for end in range(self._block, len(whole) + 1, self._block))

    def __len__(self) -> int:
        """Return how many blocks these are."""
        return len(self._prefixes)

    def __contains__(self, prefix: tuple[int, ...]) -> bool:
        """Return whether the block with which a prefix ends is stored."""
        return prefix in self._prefixes

    def cached(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt are loaded: whole blocks, and not the whole prompt."""
        end = 0
        while end + self._block < len(prompt) and tuple(prompt[: end + self._block]) in self._prefixes:
            end += self._block
        return end


class Snapshots(Stored):
    """The same for a model with recurrent state, with a retention interval of one block.

    The engine has a snapshot at the last end of a block before the end of a prompt, and at each end of a block from there on.
    """

    def add(self, prompt: list[int], tokens: list[int]) -> None:
        whole = [*prompt, *tokens][:-1]
        first = (len(prompt) - 1) // self._block * self._block
        self._prefixes.update(tuple(whole[:end]) for end in range(first, len(whole) + 1, self._block))

    def cached(self, prompt: list[int]) -> int:
        ends = range(self._block, len(prompt), self._block)
        return max((end for end in ends if tuple(prompt[:end]) in self._prefixes), default=0)

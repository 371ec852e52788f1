"""vLLM's engine on the CPU, for harness.process.Engine and for ``penstock bench engines``.

vLLM takes a minute to import, so this process imports it once and forks each engine: ``start`` makes one, ``call`` and
``calls`` reach its functions, those of Driver. ``serve`` makes one with vLLM's HTTP interface, which ``end`` kills. An engine is a
fresh process in all else.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import inspect
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # scheduler, and a single worker, in the engine's process
# libgomp's threads do not survive a fork, and the first parallel loop of the child would wait for them for ever. With one
# thread there are none. The engine sets its own number of threads.
os.environ["OMP_NUM_THREADS"] = "1"

import harness.vllm
import vllm
from harness import process
from harness.model import make_llama
from harness.sessions import sessions
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine import utils
from vllm.v1.executor import multiproc_executor

from penstock import testing

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CLONE_NEWNET = 0x40000000  # linux/sched.h

# vLLM on CPUs spawns the ranks of an engine, and the engine of a server, and each would import vLLM again.
multiproc_executor.get_mp_context = utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def take_layout(name: str) -> None:
    """Have the engine allocate its KV cache in a layout of vLLM's KVCacheLayout.

    The attention of CPUs takes any layout whose rows of a head are contiguous, and names the layout of a dense block only.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: (KVCacheLayout[name],))


class Driver:
    """One engine. connector is its kv_transfer_config, or None; options are those of LLM."""

    def __init__(self, model: str, connector: dict[str, Any] | None, options: dict[str, Any]) -> None:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "block_size": 32,
            "enable_prefix_caching": True,
            "distributed_executor_backend": "uni",
            "disable_log_stats": False,
        }
        self._lmcache = connector is not None and connector["kv_connector"].startswith("LMCache")
        if connector is not None:
            defaults["kv_transfer_config"] = connector
        if self._lmcache:
            hide_dunders_of_llvmlite()
        if layout := options.pop("kv_cache_layout", None):
            take_layout(layout)
        if options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1) > 1:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # otherwise each rank needs a NUMA node of its own
        self.llm = LLM(model=model, **{**defaults, **options})

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def generate(
        self,
        prompts: list[list[int]],
        output: int = 8,
        salts: list[str | None] | None = None,
        adapters: list[dict[str, Any] | None] | None = None,
        images: list[int | None] | None = None,
        epoch: int = 0,
        attempts: list[str] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the tokens of each prompt, greedy, and how many of its tokens were cached. Saves are complete when it returns.

        An adapter has the fields of LoRARequest. An image is the seed of its noise. All requests name the epoch, if it is not 0, and
        each the planner's attempt.
        """

        def sampling(i: int) -> SamplingParams:
            named = {**({"attempt": attempts[i]} if attempts else {}), **({"epoch": epoch} if epoch else {})}
            extra = {"kv_transfer_params": {"penstock": named}} if named else None
            return SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, extra_args=extra)

        requests: list[dict[str, Any]] = [{"prompt_token_ids": p} for p in prompts]
        for request, salt in zip(requests, salts or [], strict=False):
            if salt is not None:
                request["cache_salt"] = salt
        for request, seed in zip(requests, images or [], strict=False):
            if seed is not None:
                request["multi_modal_data"] = {"image": noise(seed)}
        loras = None if adapters is None else [None if a is None else LoRARequest(**a) for a in adapters]
        done = self.llm.generate(requests, [sampling(i) for i in range(len(prompts))], use_tqdm=False, lora_request=loras)
        # In a process of its own the engine takes these steps by itself.
        while self._saving():
            self.llm.llm_engine.step()
        return [{"tokens": list(d.outputs[0].token_ids), "cached": d.num_cached_tokens, "finish": d.outputs[0].finish_reason} for d in done]

    def chat(self, chats: list[list[dict[str, Any]]], adapters: list[dict[str, Any] | None], output: int = 8) -> list[list[int]]:
        """Return the tokens that follow each chat with its adapter, greedy. A chat is a list of messages as in the HTTP interface."""
        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        loras = [None if adapter is None else LoRARequest(**adapter) for adapter in adapters]
        done = [self.llm.chat(one, sampling, use_tqdm=False, lora_request=lora) for one, lora in zip(chats, loras, strict=True)]
        return [list(answer.outputs[0].token_ids) for (answer,) in done]

    def turn(self, prompt: list[int], output: int) -> dict[str, Any]:
        """Serve one request alone, greedy. Return its tokens, its number of cached tokens, and the seconds until its first token.

        Saves are complete when it returns, but for those that another process makes later.
        """
        engine = self.llm.llm_engine
        first = 0.0
        begin = time.perf_counter()
        engine.add_request("turn", {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
        while engine.has_unfinished_requests():
            for result in engine.step():
                first = first or time.perf_counter() - begin
                done = result
        while self._saving():
            engine.step()
        return {"tokens": list(done.outputs[0].token_ids), "cached": done.num_cached_tokens, "first_token_seconds": first}

    def _saving(self) -> bool:
        """Return whether the connector still saves blocks of finished requests."""
        if self._lmcache:  # keeps a finished request until its blocks are saved
            return bool(self.llm.llm_engine.engine_core.engine_core.scheduler.has_finished_requests())
        return self.scheduler is not None and bool(self.scheduler.has_pending_push_work())

    def reset(self, connector: bool = False) -> bool:
        """Empty the engine's prefix cache; with connector, also begin another epoch."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def update_weights(self, model: str) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": model})

    def new_weights(self, version: int) -> list[int]:
        from penstock.vllm import new_weights

        epochs: list[int] = self.llm.collective_rpc(new_weights, args=(version,))
        return epochs

    def counters(self) -> dict[str, int]:
        """Return the connector's events, of the scheduler's side and of the worker in this process."""
        from penstock.vllm import _pd_plan, _plan

        EVENTS = {**_plan.EVENTS, **_pd_plan.EVENTS}
        return {name: self.scheduler._counters[name] + self.worker._counters[name] for name in EVENTS}

    def namespace(self) -> dict[str, Any]:
        """Return the values that a gateway needs of the namespace of PenstockDualPath."""
        d = self.scheduler._scheduler.definition
        groups = [[int(g.kind), g.layers, g.token_bytes, g.window_tokens] for g in d.groups]
        return {"name": d.name, "dtype": d.dtype, "layout": d.layout, "block_tokens": d.block_tokens, "groups": groups}

    def metrics(self) -> dict[str, float]:
        """Return the connector's metrics as the engine publishes them."""
        name = "vllm:penstock_"
        return {m.name.removeprefix(name): m.value for m in self.llm.get_metrics() if m.name.startswith(name)}

    def preemptions(self) -> int:
        """Return how often a request was preempted."""
        return sum(int(m.value) for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")

    def hold_a_load(self, pid: int, held: list[int], other: list[int], output: int) -> dict[str, list[int]]:
        """Stop the node when the load of a prompt begins, step until another request has ended, and only then continue the node.

        Return the tokens of both.
        """
        engine = self.llm.llm_engine
        tokens: dict[str, list[int]] = {}
        done = set()

        def step() -> None:
            for result in engine.step():
                tokens[result.request_id] = list(result.outputs[0].token_ids)
                if result.finished:
                    done.add(result.request_id)

        def add(name: str, prompt: list[int], output: int) -> None:
            engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))

        add("other", other, output)
        while "other" not in tokens:
            step()
        self.signal_at_load(pid, signal.SIGSTOP)
        add("held", held, 8)
        while self.scheduler._counters["hit_tokens"] == 0 or "other" not in done:
            step()
        if "held" in tokens:
            raise RuntimeError("the load was not held")
        os.kill(pid, signal.SIGCONT)
        while engine.has_unfinished_requests():
            step()
        return tokens

    def delay_last_layer(self, pid: int, prompt: list[int], output: int) -> dict[str, Any]:
        """Stop the node when all layers of a load but the last have arrived, and continue it when the others are computed.

        Return the prompt's tokens and what happened, in order.
        """
        events: list[str] = []
        connector = self.worker
        side = connector._worker
        submit, computed, wait = side._submit, connector.save_kv_layer, side._wait
        last: list[Any] = []

        def submit_last_to_a_stopped_node(work: Any, plan: Any, part: Any = None) -> Any:
            if part is not side._parts[-1]:
                return submit(work, plan, part)
            for jobs in side._arriving.values():
                for job in jobs:
                    job.wait()
            os.kill(pid, signal.SIGSTOP)
            while not testing._stopped(pid):
                os.sched_yield()
            last.append(submit(work, plan, part))
            events.append("the last read waits")
            return last[0]

        def wait_for(part: Any) -> None:
            if part is side._parts[-1] and part in side._arriving:
                if last[0].complete:
                    raise RuntimeError("the last read is complete before the node continues")
                events.append("the node continues")
                os.kill(pid, signal.SIGCONT)
                wait(part)
                events.append("the last read is complete")
            else:
                wait(part)

        def note(name: str, *arguments: Any, **keywords: Any) -> None:
            if last and len(events) < 7:
                events.append(f"computed {name}")
            computed(name, *arguments, **keywords)

        side._submit, side._wait, connector.save_kv_layer = submit_last_to_a_stopped_node, wait_for, note
        (answer,) = self.generate([prompt], output)
        side._submit, side._wait, connector.save_kv_layer = submit, wait, computed
        return {"events": events, "tokens": answer["tokens"]}

    def close_stores(self) -> None:
        """Close the stores of the connector, or of the tiers of vLLM's offloading, whose methods vLLM continues to call."""
        offloading = getattr(self.scheduler, "connector_scheduler", None)
        sides = offloading.manager.secondary_tiers if offloading is not None else [self.scheduler._scheduler, self.worker._worker]
        for side in sides:
            side._link.value.store.close()

    def skip_waits(self) -> None:
        """Stop the engine's calls of wait_for_layer_load, as within a CUDA graph of the whole model."""
        self.worker.wait_for_layer_load = lambda layer_name: None

    def abort_after_a_failed_load(self, prompt: list[int]) -> None:
        """Abort the request of a prompt when its load has failed, before the engine computes the prompt."""
        engine = self.llm.llm_engine
        engine.add_request("aborted", {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        while not self.worker._counters["load_failures"]:
            engine.step()
        engine.abort_request(["aborted"])
        while engine.has_unfinished_requests():
            engine.step()

    def signal_at_load(self, pid: int, number: int) -> None:
        """Stop or kill a process by a signal when the next load was looked up and is about to begin."""
        side = self.worker._worker
        load = side.load

        def loads(plan: Any) -> None:
            if plan.loads:
                os.kill(pid, number)
                while not testing._stopped(pid):
                    os.sched_yield()
                side.load = load
            load(plan)

        side.load = loads


def hide_dunders_of_llvmlite() -> None:
    """Let the library of llvmlite, which LMCache imports, have no attribute such as __dict__.

    It makes a function of the library for every name, and vLLM, which looks for kernels in all modules, fails on that.
    """
    kind: Any = type(importlib.import_module("llvmlite.binding.ffi").lib)
    find = kind.__getattr__

    def find_public(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    kind.__getattr__ = find_public


def noise(seed: int) -> Any:
    """Return an image of 64 x 64 random pixels."""
    import numpy
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=numpy.uint8))


class Host:
    def __init__(self) -> None:
        self._engines: dict[str, tuple[int, int, Any]] = {}
        self._servers: dict[str, int] = {}

    def start(self, name: str, **arguments: Any) -> None:
        theirs_in, calls = os.pipe()
        answers, theirs_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                # An engine ends when its pipe of calls is closed, in this process too, and when this process is killed.
                die_with_parent()
                self._close_pipes()
                os.close(calls)
                os.close(answers)
                os.environ[process._PIPES] = f"{theirs_in},{theirs_out}"
                try:
                    driver = Driver(**arguments)
                except Exception:
                    os.write(theirs_out, json.dumps({"error": traceback.format_exc()}).encode() + b"\n")
                    raise
                process.serve({f: getattr(driver, f) for f in dir(Driver) if not f.startswith("_") and callable(getattr(Driver, f))})
                driver.llm.llm_engine.engine_core.shutdown()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(theirs_in)
        os.close(theirs_out)
        self._engines[name] = (pid, calls, os.fdopen(answers, "rb"))
        try:
            self._answer(name)
        except RuntimeError:
            self.stop(name, kill=True)
            raise

    def serve(self, name: str, arguments: list[str], environ: dict[str, str], network: str, log: str) -> int:
        """Fork a server of vLLM's HTTP interface into a network namespace, and return its process id, which is that of its process group.

        The arguments are those of vLLM's api_server. The file log gets its output; the server is ready when its output reports that.
        """
        entry = importlib.import_module("vllm.entrypoints.launchers.api_server.entry")
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent()
                os.register_at_fork(after_in_child=die_with_parent)
                self._close_pipes()
                with open(log, "ab") as out:
                    os.dup2(out.fileno(), 1)
                    os.dup2(out.fileno(), 2)
                enter(network)
                os.environ.update(environ)
                sys.argv = ["api_server", *arguments]
                entry.main()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # a server serves until it is killed
        os.setpgid(pid, pid)
        self._servers[name] = pid
        return pid

    def end(self, name: str) -> None:
        """Kill a server with all of its processes."""
        pid = self._servers.pop(name)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def _close_pipes(self) -> None:
        for _, calls, answers in self._engines.values():
            os.close(calls)
            os.close(answers.fileno())

    def pid(self, name: str) -> int:
        return self._engines[name][0]

    def call(self, name: str, function: str, **arguments: Any) -> Any:
        return self.calls({name: [function, arguments]})[name]

    def calls(self, what: dict[str, Any]) -> dict[str, Any]:
        """Call functions of several engines at once, and return what each returned."""
        for name, (function, arguments) in what.items():
            line = json.dumps({"call": function, "arguments": arguments}).encode() + b"\n"
            while line:
                line = line[os.write(self._engines[name][1], line) :]
        return {name: self._answer(name) for name in what}

    def _answer(self, name: str) -> Any:
        line = self._engines[name][2].readline()
        if not line:
            raise RuntimeError(f"engine {name} has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"engine {name}: {answer['error']}")
        return answer["value"]

    def stop(self, name: str, kill: bool = False) -> None:
        pid, calls, answers = self._engines.pop(name)
        if kill:
            os.kill(pid, signal.SIGKILL)
        os.close(calls)
        _, status = os.waitpid(pid, 0)
        answers.close()
        if status and not kill:
            raise RuntimeError(f"engine {name} ended with status {status}")


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def enter(network: str) -> None:
    """Move this process, which has one thread, into a network namespace, of which network is the file."""
    fd = os.open(network, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns {network}: {os.strerror(number)}")
    os.close(fd)


def drift() -> list[str]:
    """Return the differences between the signatures that the connectors were written for and those of the installed engine."""
    from vllm.config.lora import LoRAConfig
    from vllm.config.multimodal import MultiModalConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorTransferResults, SupportsHMA
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from penstock.vllm import PenstockConnector, PenstockDualPath, PenstockDualPathHybrid
    from penstock.vllm._engine import PromMetrics, Stats

    found = []
    for ours in (PenstockConnector, PenstockDualPath, PenstockDualPathHybrid, PromMetrics, Stats):
        for name, function in vars(ours).items():
            theirs = getattr(ours.__mro__[1], name, None)
            if (name.startswith("_") and name != "__init__") or not callable(theirs):
                continue
            a, b = (
                [(p.name, p.kind) for p in inspect.signature(f).parameters.values()]
                for f in (getattr(function, "__func__", function), getattr(theirs, "__func__", theirs))
            )
            if a != b:
                found.append(f"{ours.__name__}.{name} takes {a}; the engine's takes {b}")
    for ours in (PenstockConnector, PenstockDualPath, PenstockDualPathHybrid):
        found += [f"{ours.__name__} lacks {name}" for name in sorted(ours.__abstractmethods__)]
    uses: dict[Any, list[str]] = {
        BlockPool: ["evict_blocks", "touch", "free_blocks"],
        KVConnectorBase_V1: ["bind_connector_metadata", "bind_kv_cache_manager"],
        ChunkedLocalAttentionSpec: ["attention_chunk_size", "block_size"],
        KVConnectorBlockState: ["boundary_state_offloads", "get_block_ids"],
        SchedulerOutput: ["num_scheduled_tokens", "kv_connector_block_state", "preempted_req_ids"],
        KVCacheConfig: ["num_blocks", "kv_cache_groups"],
        KVCacheGroupSpec: ["layer_names", "kv_cache_spec"],
        KVConnectorOutput: ["failed_recving", "finished_recving", "invalid_block_ids", "kv_connector_worker_meta"],
        KVConnectorTransferResults: ["failed_recving", "finished_recving", "finished_sending"],
        LoRAConfig: [
            "enable_mixed_moe_lora_format",
            "enable_moe_shared_loras",
            "enable_tower_connector_lora",
            "fully_sharded_loras",
            "lora_dtype",
            "target_modules",
        ],
        LoRARequest: ["is_3d_lora_weight", "load_inplace", "lora_int_id", "lora_name", "lora_path"],
        MambaSpec: [
            "dtypes",
            "mamba_cache_mode",
            "mamba_type",
            "num_prefill_checkpoint_blocks",
            "num_speculative_blocks",
            "shapes",
        ],
        MultiModalConfig: ["mm_processor_cache_gb"],
        Request: ["skip_reading_prefix_cache", "update_block_hashes"],
        SlidingWindowSpec: ["extra_retained_tokens", "sliding_window"],
        SupportsHMA: ["request_finished_all_groups"],
    }
    for kind, names in uses.items():
        assigned = re.findall(r"self\.(\w+)(?:: [^=]+)? = ", inspect.getsource(kind))
        has = {*dir(kind), *getattr(kind, "__dataclass_fields__", {}), *assigned}
        found += [f"the engine's {kind.__name__} has no {name}" for name in names if name not in has]
    for function in (LoRAModel.from_local_checkpoint, PEFTHelper.from_local_dir):
        files = re.findall(r'"([\w.]+\.(?:bin|json|pt|safetensors))"', inspect.getsource(function))
        found += [f"the engine reads no file in {function.__qualname__}"] if not files else []
        found += [f"the engine reads {file} of an adapter" for file in files if not file.startswith("adapter_")]
    return found


def layouts() -> dict[str, str]:
    """Return for KV caches of several kinds why the connector refuses them; empty for one that it takes."""
    import torch
    from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    from penstock import InvalidError
    from penstock.vllm._layout import read_layout

    full = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    window = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)
    short = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)
    chunks = ChunkedLocalAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=64)
    state = MambaSpec(block_size=32, shapes=((2, 16), (4, 8)), dtypes=(torch.bfloat16, torch.float32), mamba_cache_mode="align")
    without: dict[str, dict[str, Any]] = {
        "without snapshots": {"mamba_cache_mode": "none"},
        "of drafts": {"num_speculative_blocks": 1},
        "with checkpoints": {"num_prefill_checkpoint_blocks": 1},
    }
    snapshots = torch.zeros(8, 1, 1, state.state_content_size_bytes, dtype=torch.int8)
    encoder = CrossAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    larger = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
    sizes = UniformTypeKVCacheSpecs.from_specs({"a": full, "b": larger})
    whole = {"a": full, "b": chunks}
    unify_hybrid_kv_cache_specs(whole)  # what --disable-hybrid-kv-cache-manager does

    def pool(blocks: int = 8) -> torch.Tensor:
        return torch.zeros(blocks, 2, 32, 64)

    def heads() -> torch.Tensor:
        return torch.zeros(2, 8, 32, 64)

    def config(*groups: KVCacheGroupSpec) -> KVCacheConfig:
        return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=list(groups))

    one = config(KVCacheGroupSpec(["a", "b"], full))
    a, b = pool(), pool()
    cases: dict[str, tuple[dict[str, Any], KVCacheConfig]] = {
        "two layers": ({"a": a, "b": b}, one),
        "a layer that shares another's": ({"a": a, "b": b, "shared": a}, one),
        "a second pool": ({"a": a, "b": b, "indexer": pool()}, one),
        "tensors of state": ({"a": a, "b": [pool(), pool()]}, one),
        "a layer without a tensor": ({"a": a}, one),
        "two layers in one place": ({"a": a, "b": a}, one),
        "K and V apart": ({"a": torch.zeros(2, 8, 32, 2, 32), "b": torch.zeros(2, 8, 32, 2, 32)}, one),
        "K and V apart in one layer": ({"a": torch.zeros(2, 8, 32, 2, 32), "b": b}, one),
        "smaller blocks of the kernel": ({"a": pool(16), "b": b}, one),
        "blocks of tokens": ({"a": pool().view(8, 32, 2, 64).transpose(1, 2), "b": pool().view(8, 32, 2, 64).transpose(1, 2)}, one),
        "heads apart": ({"a": heads().transpose(0, 1), "b": heads().transpose(0, 1)}, one),
        "rows apart": ({"a": torch.zeros(8, 2, 32, 128)[..., :63], "b": b}, one),
        "layers of two sizes": ({"a": a, "b": torch.zeros(8, 4, 32, 64)}, one),
        "a device": ({"a": a.to("meta"), "b": b}, one),
        "two groups": ({"a": a, "b": a}, config(KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["b"], window))),
        "groups with blocks of two sizes": ({"a": a, "b": b}, config(KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["b"], short))),
        "chunks of attention": ({"a": a, "b": b}, config(KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["b"], chunks))),
        "recurrent state": ({"a": a, "b": snapshots}, config(KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["b"], state))),
        "recurrent state alone": ({"b": snapshots}, config(KVCacheGroupSpec(["b"], state))),
        **{
            f"recurrent state {name}": (
                {"a": a, "b": snapshots},
                config(KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["b"], dataclasses.replace(state, **change))),
            )
            for name, change in without.items()
        },
        "an encoder": ({"a": a, "b": b}, config(KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["b"], encoder))),
        "one kind of two sizes": ({"a": a, "b": torch.zeros(8, 4, 32, 64)}, config(KVCacheGroupSpec(["a", "b"], sizes))),
        "chunks without the hybrid manager": ({"a": a, "b": b}, config(KVCacheGroupSpec(["a", "b"], full.merge([*whole.values()])))),
        "a sliding window": ({"a": a}, config(KVCacheGroupSpec(["a"], window))),
    }
    found = {}
    for name, (tensors, groups) in cases.items():
        try:
            read_layout(tensors, groups)
            found[name] = ""
        except InvalidError as e:
            found[name] = str(e)
    if a.any() or b.any():
        raise RuntimeError("the check of the layout has left its pattern")
    return found


def make_model(directory: str, **config: Any) -> str:
    return str(make_llama(Path(directory), **config))


def prompts_of_sessions(count: int, turns: int, tokens: int) -> list[list[list[int]]]:
    return [[turn.prompt for turn in session.turns] for session in sessions(count, turns=turns, tokens=tokens)]


if __name__ == "__main__":
    host = Host()
    process.serve(
        {
            "start": host.start,
            "call": host.call,
            "calls": host.calls,
            "stop": host.stop,
            "serve": host.serve,
            "end": host.end,
            "pid": host.pid,
            "drift": drift,
            "layouts": layouts,
            "version": lambda: vllm.__version__,
            "model": make_model,
            "sessions": prompts_of_sessions,
            "configuration": lambda of, **arguments: getattr(harness.vllm, of)(**arguments),
        }
    )

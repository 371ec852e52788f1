"""SGLang's engine on the CPU, with HiCache, for harness.process.Engine.

SGLang starts its processes with spawn, and each imports it again, which takes a minute. Here they are forked from the
driver, which has imported SGLang and its models. No model runs in the driver.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # the model is tiny: threads would only wait for each other
os.environ["TRITON_INTERPRET"] = "1"  # so that kernels which SGLang has in Triton alone, those of recurrent state, run on a CPU
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Settings for two ranks on one machine: CPUs for each rank, no NCCL (it is installed and needs a GPU), and no host name to resolve.
os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
os.environ["SGLANG_NCCL_SO_PATH"] = "none"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
# With ranks the embedding is compiled by torch, which takes seconds in each engine and a C++ compiler.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import sglang
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.models.registry
from harness.process import serve
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.mem_cache.pool_host import base as host_memory

host_memory.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # the pools of the tests are small, and 10 GiB may not be free beside other tests


def reading_windows(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return SGLang's attention for the CPU with the indices that layers with a window need.

    It writes the KV of these layers to their own pool, and reads them at the indices of the other layers' pool.
    """

    @functools.wraps(forward)
    def translated(self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        pool, requests = self.token_to_kv_pool, self.req_to_token_pool
        if not self.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
            return forward(self, q, k, v, layer, *args, **kwargs)
        self.req_to_token_pool = SimpleNamespace(req_to_token=pool.translate_loc_from_full_to_swa(requests.req_to_token))
        try:
            return forward(self, q, k, v, layer, *args, **kwargs)
        finally:
            self.req_to_token_pool = requests

    return translated


for name in ("forward_extend", "forward_decode"):
    setattr(TorchNativeAttnBackend, name, reading_windows(getattr(TorchNativeAttnBackend, name)))


class Driver:
    """One engine at a time."""

    engine: Any = None

    def start(self, model: str, page: int, storage: dict[str, Any] | None, **options: Any) -> None:
        """Make an engine in place of the last one. storage is the configuration of Penstock, or None; options are SGLang's."""
        self.stop()
        given = {"hicache_mem_layout": "page_first_direct", "hicache_io_backend": "direct", **options}
        if storage is not None:
            given["hicache_storage_backend"] = "dynamic"
            given["hicache_storage_backend_extra_config"] = json.dumps(storage)
        self.engine = sglang.Engine(
            model_path=model, device="cpu", dtype="float32", attention_backend="torch_native", sampling_backend="pytorch",
            grammar_backend="none", disable_cuda_graph=True, disable_overlap_schedule=True, skip_server_warmup=True,
            skip_tokenizer_init=True, context_length=1024, max_running_requests=16, max_total_tokens=65536, page_size=page,
            log_level="info",
            enable_hierarchical_cache=True, hicache_ratio=2.0,
            hicache_write_policy="write_through", hicache_storage_prefetch_policy="wait_complete", **given,
        )  # fmt: skip

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
        self.engine = None

    def generate(self, prompts: list[list[int]], output: int) -> list[dict[str, Any]]:
        """Return for each prompt its tokens, greedy, and where its cached tokens came from. The prompts run at once."""
        sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
        done = []
        for answer in self.engine.generate(input_ids=prompts, sampling_params=sampling):
            details = answer["meta_info"].get("cached_tokens_details") or {}
            done.append({"tokens": answer["output_ids"], "cached": {k: details.get(k, 0) for k in ("device", "host", "storage")}})
        return done

    def flush(self) -> bool:
        """Empty the caches on the device and the host, when all stores have ended."""
        return bool(self._run(self.engine.tokenizer_manager.flush_cache(timeout_s=120)).success)

    def attach(self, storage: dict[str, Any]) -> str:
        """Attach Penstock, and return what went wrong. SGLang refuses while pages are moved."""
        self.flush()
        manager = self.engine.tokenizer_manager
        done = self._run(manager.attach_hicache_storage("dynamic", json.dumps(storage), "wait_complete", "write_through"))
        return "" if done.success else str(done.message)

    def detach(self) -> bool:
        self.flush()
        return bool(self._run(self.engine.tokenizer_manager.detach_hicache_storage()).success)

    def clear(self) -> bool:
        return bool(self._run(self.engine.tokenizer_manager.clear_hicache_storage()).success)

    def update(self, model: str, version: str | None) -> str:
        """Load other weights, and return what went wrong. SGLang flushes its caches then, if nothing is being stored."""
        self.flush()
        request = UpdateWeightFromDiskReqInput(model_path=model, weight_version=version)
        success, message, *_ = self._run(self.engine.tokenizer_manager.update_weights_from_disk(request, None))
        return "" if success else str(message)

    def _run(self, task: Any) -> Any:
        return self.engine.loop.run_until_complete(task)


def main() -> None:
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = functools.partial(lambda *_, **__: None)
    driver = Driver()
    names = ("start", "stop", "generate", "flush", "attach", "detach", "clear", "update")
    serve({name: getattr(driver, name) for name in names})
    driver.stop()


if __name__ == "__main__":
    main()

"""The connectors' access to vLLM: its configuration, the names of blocks, metrics."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.lora.utils import get_adapter_absolute_path
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from penstock import _adapter, errors
from penstock.vllm._extra import Adapters, Extras
from penstock.vllm._layout import Definition
from penstock.vllm._plan import EVENTS

_log = logging.getLogger("penstock.vllm")

__all__ = ["Handshake", "PromMetrics", "Stats", "check_policy", "extras_of", "facts_of", "new_events", "refuse_unsupported"]


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    definition: Definition


@dataclass
class Stats(KVConnectorStats):
    """How often each event has happened since the last step."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return Stats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in {**self.data, **other.data}})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """The events as counters at the engine's /metrics."""

    EVENTS: ClassVar[dict[str, str]] = EVENTS

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[int, str], Any] = {}
        for name, text in self.EVENTS.items():
            counter = self._counter_cls(name=f"vllm:penstock_{name}", documentation=text, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, n in transfer_stats_data.items():
            self._counters[engine_idx, name].inc(n)


def check_policy(config: Any) -> None:
    """Warn if the engine fails a request whose load fails. config is its KVTransferConfig."""
    if config.kv_load_failure_policy != "recompute":
        _log.warning(
            'kv_load_failure_policy is "%s": a request whose load fails ends with an error. Set it to "recompute" for a cache',
            config.kv_load_failure_policy,
        )


def new_events(counters: _adapter.Counters, events: dict[str, str], sent: dict[str, int]) -> Stats | None:
    """Return the events since the last call, or None if there are none. ``sent`` has the counts that were returned
    before."""
    new = {name: counters[name] - sent.get(name, 0) for name in events if counters[name] != sent.get(name, 0)}
    for name, n in new.items():
        sent[name] = sent.get(name, 0) + n
    return Stats(new) if new else None


def refuse_unsupported(config: Any) -> None:
    """Raise InvalidError for configurations that need another layout of namespaces than one for each tensor-parallel
    rank."""
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) != 1:
            option = "--" + name.replace("_", "-")
            raise errors.InvalidError(f"{name} is {size}; the connector supports only tensor parallelism: start the engine with {option} 1")


def facts_of(config: Any, kv_caches: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that determine the bytes of the KV cache, except the tensors' shapes."""
    model = config.model_config
    layers = config.compilation_config.static_forward_context
    backends = set()
    for name in kv_caches:
        layer = layers.get(name)
        get_backend = getattr(layer, "get_attn_backend", None)
        backends.add(f"{get_backend().get_name() if get_backend else '?'} {getattr(layer, 'isa', '')}".strip())
    return {
        "engine": f"vllm {vllm.__version__}",
        "revision": str(model.revision or ""),
        "config": _adapter.digest({"hf": model.hf_config.to_json_string(use_diff=False)}),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "backends": sorted(backends),
    }


def keep_all_blocks(config: Any, kv_cache_config: Any) -> None:
    """Have the engine keep the blocks of all tokens of a request if each layer has a sliding window. Without its hybrid KV cache manager
    the engine does so if other layers have full attention.

    It takes effect because the scheduler makes its KV cache manager from kv_cache_config after its connector. Raises InvalidError if
    the KV cache has no room for the longest request then.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, replace_as  # older releases have no replace_as

    if len(kv_cache_config.kv_cache_groups) != 1:
        return
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    if type(spec) is not SlidingWindowSpec:
        return
    length, blocks = config.model_config.max_model_len, kv_cache_config.num_blocks - 1  # without the null block
    if blocks * spec.block_size < length:
        raise errors.InvalidError(
            f"every layer has a sliding window, and PenstockDualPath keeps the KV of all tokens of a request: the KV cache has room for"
            f" {blocks * spec.block_size} tokens, and max_model_len is {length}. Give the KV cache more memory, or set --max-model-len"
        )
    group.kv_cache_spec = replace_as(spec, FullAttentionSpec, drop=("extra_retained_tokens",))


def windows_of(config: Any, kv_cache_config: Any) -> dict[str, int]:
    """Return the layers that read a sliding window beside layers that read all tokens, each with the number of tokens that it reads
    before the next one, for an engine without the hybrid KV cache manager.

    Without that manager vLLM keeps the KV of all tokens in these layers too, and the KV cache group names no layer's window.
    """
    lookahead = max(0, config.num_prefill_lookahead_tokens - 1)  # as vLLM's manager keeps for draft models
    windows = {}
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            window = getattr(config.compilation_config.static_forward_context.get(name), "sliding_window", None)
            if type(spec).__name__ == "FullAttentionSpec" and isinstance(window, int):
                windows[name] = max(1, window - 1 + lookahead)
    layers = sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    return windows if len(windows) < layers else {}


def _keys(request: Any, start: int, end: int) -> Any:
    found, _ = generate_block_hash_extra_keys(request, start, end, 0)
    return found


def extras_of(config: Any, timeout: float) -> Extras:
    """Return the part of a block's name that does not come from the tokens, for the requests of an engine.

    ``timeout`` bounds the time that a request waits for its adapter's files, in seconds.
    """
    adapters: Adapters | None = None
    decides: tuple[object, ...] = ()
    if (lora := config.lora_config) is not None:
        adapters = Adapters(get_adapter_absolute_path)
        decides = (
            str(lora.lora_dtype),
            None if lora.target_modules is None else tuple(sorted(lora.target_modules)),
            lora.fully_sharded_loras,
            lora.enable_tower_connector_lora,
            lora.enable_mixed_moe_lora_format,
            lora.enable_moe_shared_loras,
        )
    images = config.model_config.multimodal_config
    hashed = images is None or images.mm_processor_cache_gb > 0 or config.cache_config.enable_prefix_caching
    return Extras(_keys, adapters, decides, images=hashed, timeout=timeout)

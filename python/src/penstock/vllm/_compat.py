"""What differs between the releases of vLLM for its offloading tiers.

| vLLM | constructor | lookup | rows of a job | results |
| --- | --- | --- | --- | --- |
| 0.25 | (offloading_spec, primary_kv_view, tier_type) | LookupResult | block_ids | JobResult |
| 0.26 | the same; the spec has a ``config`` | LookupResult | block_ids, later chunk_ids | JobResult with successful_keys |
| 0.32 | also backpressure_detector | LookupResult | chunk_ids | also transfer_bytes and transfer_time |

Releases before 0.25 have neither LookupResult nor the helper for lookups on another thread, and are refused.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from typing import Any

from penstock import errors

try:
    from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingEvent
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.base import JobResult, RequestOffloadingContext, SecondaryTierManager
except ImportError as e:
    raise errors.VersionError(f"vLLM's offloading tiers cannot be imported: {e}. PenstockTier needs vLLM 0.25 or later") from e

try:
    from vllm.v1.kv_offload.base import Locality
except ImportError:  # the parameter locality is refused then
    Locality = None

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata
except ImportError:  # the release reads no metrics of tiers
    OffloadingConnectorStats = OffloadingCounterMetadata = None

__all__ = [
    "AsyncLookupManager",
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadingEvent",
    "RequestOffloadingContext",
    "SecondaryTierManager",
    "accepted",
    "counter",
    "event",
    "hash_seed_is_random",
    "identity",
    "result",
    "rows",
    "stats",
]


def accepted(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that a function of this release accepts."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(function).parameters}


def rows(job: Any) -> Any:
    """Return the numbers of a job's rows in the primary view."""
    return job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids


def result(kind: Any = JobResult, **values: Any) -> Any:
    """Make a JobResult of the fields that this release has."""
    names = {field.name for field in dataclasses.fields(kind)}
    if "transfer_bytes" in values and "transfer_size" in names:
        values["transfer_size"] = values.pop("transfer_bytes")
    return kind(**{name: value for name, value in values.items() if name in names})


def event(keys: list[bytes], *, removed: bool, locality: Any) -> Any:
    """Make an OffloadingEvent of the fields that this release has."""
    return result(OffloadingEvent, keys=keys, medium=Medium.STORAGE, removed=removed, locality=locality)


def counter(text: str) -> Any:
    """Return the definition of a counter."""
    return OffloadingCounterMetadata(text)


def stats(counters: dict[str, int]) -> Any:
    """Return increments of counters in the form that the engine accepts."""
    increments = OffloadingConnectorStats()
    for name, n in counters.items():
        increments.increase_counter(name, n)
    return increments


def identity(spec: Any) -> tuple[str, dict[str, Any]]:
    """Return the model's name and all facts that determine the bytes of a row: the facts of vLLM's own tier of files, and
    the KV layout.

    Numbers of ranks share rows only if vLLM certifies one format for all of them (its canonical layout), or keeps one copy
    of equal KV (replicated). In the direct format a row has all layers of one rank, then all of the next, so the bytes
    differ for every number of ranks. vLLM's is_parallelism_agnostic is true for that format too.
    """
    try:
        from vllm.v1.kv_offload.file_mapper import FileMapper
    except ImportError as e:
        raise errors.VersionError(f"vLLM has no FileMapper: {e}. PenstockTier needs vLLM 0.25 or later") from e
    config = getattr(spec, "config", None)
    one_format = getattr(config, "canonical_layout", False) or getattr(config, "replicated_layout", False)
    chunk = getattr(spec, "blocks_per_chunk", None) or getattr(spec, "block_size_factor", 1)
    mapper = FileMapper.from_offloading_spec(
        **accepted(
            FileMapper.from_offloading_spec,
            {"root_dir": "", "offloading_spec": spec, "blocks_per_file": chunk, "parallel_agnostic": one_format},
        )
    )
    facts = dict(mapper.fields)
    facts["rank"] = mapper.rank
    facts["kv_cache_layout"] = getattr(config, "kv_cache_layout", None)
    return str(facts["model_name"]), facts


def hash_seed_is_random() -> bool:
    """Return whether this process chose the seed of its block hashes at random, so that no other process has its keys."""
    if os.environ.get("PYTHONHASHSEED") is not None:
        return False
    from vllm.v1.core import kv_cache_utils

    seed = getattr(kv_cache_utils, "get_none_hash_seed", None)
    # Releases without the function choose at random for every algorithm.
    return seed is None or bool(seed() != kv_cache_utils.DEFAULT_NONE_HASH_SEED)

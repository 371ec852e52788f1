"""PenstockDualPath, a KVConnectorBase_V1 of vLLM: an engine of a prefill/decode cluster that a planner schedules.

kv_role kv_producer makes the engine a prefill engine, kv_consumer a decode engine. It is glue: the decisions are in _pd_scheduler,
the transfers in _pd_worker.

    scheduler's process                                     worker's process
    on_new_request             ─► arrived
    get_num_new_matched_tokens ─► lookup                    KV cache ◄═► buffer ◄═► storage, and the engine of the other side
    update_state_after_alloc   ─► a decode job
    build_connector_meta       ─► Plan ──────────────────►  bind_connector_metadata  jobs, pages, orders
                                                            wait_for_layer_load      prefill: the layer is there
                                                            save_kv_layer            prefill: the layer leaves
                                                            wait_for_save            decode: filled blocks are stored
    update_connector_output    ◄─ Report, ready, freed ◄──  get_transfer_results

Prefill loads synchronously: vLLM runs wait_for_layer_load only then, and the model computes a layer while the next ones arrive. It
does so when storage has been read, so the pass waits for DRAM and for the other engine only. Decode loads asynchronously: its
requests wait without a step of the engine, during all of prefill.

With tensor parallelism each rank has a worker, which gets the same Plan and moves its own shards. The scheduler combines their
reports. Of latent KV (MLA), the worker of rank 0 moves all, and passes it to the other ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from penstock import _adapter, errors
from penstock._cluster import Role
from penstock.vllm import _engine
from penstock.vllm._layout import LATENT
from penstock.vllm._pd_plan import EVENTS, Definition, Options, Plan, Report, read_options
from penstock.vllm._pd_scheduler import Scheduler
from penstock.vllm._pd_worker import GROUPS, Worker

if TYPE_CHECKING:
    import torch

__all__ = ["PenstockDualPath", "PenstockDualPathHybrid"]

_STATE = "MambaSpec"


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """The shards of one rank."""

    definitions: tuple[Definition, ...]


@dataclass
class Metadata(KVConnectorMetadata):
    plan: Plan


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.merge(other.report))


class PromMetrics(_engine.PromMetrics):
    EVENTS: ClassVar[dict[str, str]] = EVENTS


class PenstockDualPath(KVConnectorBase_V1):
    """Makes the engine one of a prefill/decode cluster. docs/dualpath.md has the options.

    It is no SupportsHMA, so vLLM allocates blocks of all tokens in layers with a sliding window too, if other layers have full
    attention. Otherwise the engine would free and reuse blocks while they are transferred. Of these layers only the blocks within the
    window at the end of a cached prefix are read and sent. A model in which every layer has a window is served as one with full attention.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        part = _role(self._kv_transfer_config)
        _engine.keep_all_blocks(vllm_config, kv_cache_config)
        hybrid = isinstance(self, SupportsHMA)
        _refuse(vllm_config, kv_cache_config, options, part, hybrid=hybrid)
        self._counters = _adapter.Counters("vllm-dualpath")
        self._sent: dict[str, int] = {}
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            _engine.check_policy(self._kv_transfer_config)
            self._scheduler = Scheduler(options, self._counters, role=part, extras=_engine.extras_of(vllm_config, options.start_timeout))
        else:
            caching = vllm_config.cache_config.enable_prefix_caching and not hybrid
            self._worker = Worker(options, self._counters, role=part, broadcast=_broadcast, prefix_cache=caching)
        self._model = options.model or vllm_config.model_config.model

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # a CUDA graph of all layers would not call wait_for_layer_load

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a preempted prefill fails its attempt, and the planner plans the request again

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        parallel = self._vllm_config.parallel_config
        facts = {"model": self._model, **_engine.facts_of(self._vllm_config, kv_caches)}
        windows = _engine.windows_of(self._vllm_config, self._kv_cache_config)
        self._worker.register(kv_caches, self._kv_cache_config, windows, facts, parallel.rank, parallel.tensor_parallel_size)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self._worker is not None
        return Handshake(self._worker.definitions) if self._worker.definitions else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None
        assert isinstance(connector_metadata, Metadata)
        self._worker.begin(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: without synchronous loads vLLM calls this after the forward pass, and jobs begin before it."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert self._worker is not None
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        self._worker.end()  # with a draft model, wait_for_save comes after this
        self._worker.poll()
        loaded = self._worker.take_loaded()
        return KVConnectorTransferResults(
            finished_sending=self._worker.take_freed(), finished_recving=loaded, failed_recving=self._worker.take_failed_requests()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_failed()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        report = self._worker.take_report()
        return None if report is None else WorkerMetadata(report)

    # -- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        assert self._scheduler is not None
        definitions: list[Definition] = []
        for handshake in metadata.values():
            assert isinstance(handshake, Handshake)
            definitions += handshake.definitions
        self._scheduler.attach(definitions, self._vllm_config.parallel_config.tensor_parallel_size)

    def on_new_request(self, request: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.lookup(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        if num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._scheduler is not None
        state = scheduler_output.kv_connector_block_state
        preempted = scheduler_output.preempted_req_ids or ()
        return Metadata(self._scheduler.plan(scheduler_output.num_scheduled_tokens, state.get_block_ids, preempted))

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        metadata = connector_output.kv_connector_worker_meta
        if metadata is not None:
            assert isinstance(metadata, WorkerMetadata)
            self._scheduler.update(metadata.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        identity = self._scheduler.identity(request)
        return self._scheduler.finished(request), identity

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy

    def reset_cache(self) -> bool | None:
        """End all attempts. The engine serves in the cluster again after ``new_weights`` has set its epoch."""
        assert self._scheduler is not None
        self._scheduler.reset()
        return True

    # -- metrics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return _engine.new_events(self._counters, EVENTS, self._sent)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return _engine.Stats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVConnectorPromMetrics | None:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class PenstockDualPathHybrid(PenstockDualPath, SupportsHMA):
    """PenstockDualPath for a model with recurrent state beside full attention. docs/dualpath.md describes it.

    vLLM needs its hybrid KV cache manager for such a model, and its prefix cache, without which it has no states at the ends of blocks.
    It is a class of its own because vLLM turns the manager on by the class of the connector, before the model is known.
    """

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.bind(gpu_block_pool)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])


def _role(config: Any) -> Role:
    """Return the engine's role in the cluster."""
    if config.is_kv_producer and config.is_kv_consumer:
        raise errors.InvalidError(
            'kv_role is "kv_both"; with PenstockDualPath an engine is "kv_producer", for prefill, or "kv_consumer", for decode'
        )
    return Role.PREFILL if config.is_kv_producer else Role.DECODE


def _refuse(config: Any, kv_cache_config: Any, options: Options, role: Role, *, hybrid: bool) -> None:
    """Raise InvalidError for an engine that the connector does not support. hybrid: it is PenstockDualPathHybrid."""
    _engine.refuse_unsupported(config)
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 or parallel.data_parallel_index:
        raise errors.InvalidError(
            f"data_parallel_size is {parallel.data_parallel_size}: the cluster counts each data-parallel rank as an engine. Start an engine"
            " for each, without data parallelism in it and with a name of its own in the option engine"
        )
    ranks = parallel.tensor_parallel_size
    latent = {type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups} == {LATENT}
    if options.shards % ranks and not latent:
        raise errors.InvalidError(
            f"option 'shards' of PenstockDualPath is {options.shards}; want a multiple of tensor_parallel_size, which is {ranks}"
        )
    _refuse_groups(kv_cache_config, hybrid=hybrid)
    if config.cache_config.enable_prefix_caching and role == Role.PREFILL and not hybrid:
        raise errors.InvalidError(
            "the engine has a prefix cache, whose blocks other requests read while PenstockDualPath writes them: start a prefill engine"
            " with --no-enable-prefix-caching"
        )
    if config.cache_config.enable_prefix_caching and _engine.windows_of(config, kv_cache_config):
        raise errors.InvalidError(
            "the engine has a prefix cache, and layers with a sliding window, whose blocks outside of the window at the end of a cached"
            " prefix are not loaded: start it with --no-enable-prefix-caching"
        )
    if threshold := config.scheduler_config.long_prefill_token_threshold:
        raise errors.InvalidError(
            f"long_prefill_token_threshold is {threshold}: after a failed load vLLM could run a request on blocks that are still to be"
            " computed. Set it to 0"
        )


def _refuse_groups(kv_cache_config: Any, *, hybrid: bool) -> None:
    """Raise InvalidError for KV cache groups that the connector does not support."""
    kinds = {type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups}
    others = kinds - {_STATE, "FullAttentionSpec"}
    if hybrid and _STATE in kinds and others:
        raise errors.InvalidError(
            f"the model has recurrent state ({_STATE}) and layers of {', '.join(sorted(others))}; PenstockDualPathHybrid serves recurrent"
            ' state beside full attention alone, because no engine with such layers was tested: set kv_connector to "PenstockConnector"'
        )
    if hybrid and kinds != {_STATE, "FullAttentionSpec"}:
        raise errors.InvalidError(
            f"the KV cache groups of the model are {', '.join(sorted(kinds))}; PenstockDualPathHybrid serves recurrent state"
            f' ({_STATE}) beside full attention (FullAttentionSpec): set kv_connector to "PenstockDualPath", or start the engine without it'
        )
    if hybrid:
        return
    if _STATE in kinds:
        raise errors.InvalidError(
            f"the model has layers with recurrent state ({_STATE}); PenstockDualPath transfers full attention, MLA and sliding windows:"
            ' set kv_connector to "PenstockDualPathHybrid"'
        )
    if len(kv_cache_config.kv_cache_groups) > 1:
        raise errors.InvalidError(GROUPS)


def _broadcast(spans: Sequence[tuple[int, int]]) -> None:
    """Copy memory of rank 0 to the other ranks of the engine. See ``Broadcast``."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    data = torch.empty(sum(length for _, length in spans), dtype=torch.uint8)

    def each(copy: Callable[[int, int, int], object]) -> None:
        at = data.data_ptr()
        for address, length in spans:
            copy(address, at, length)
            at += length

    if group.rank_in_group == 0:
        each(lambda address, at, length: ctypes.memmove(at, address, length))
    torch.distributed.broadcast(data, src=group.ranks[0], group=group.cpu_group)
    if group.rank_in_group:
        each(ctypes.memmove)

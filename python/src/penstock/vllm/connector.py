"""PenstockConnector, a KVConnectorBase_V1 of vLLM.

It is glue: the scheduler's decisions are in _scheduler, the transfers in _worker, the addresses in _layout.

    scheduler's process                                          each worker's process
    get_num_new_matched_tokens ─► lookup, a job per rank
    update_state_after_alloc   ─► a load is planned
    build_connector_meta       ─► Plan ───────────────────────►  start_load_kv   jobs: node ═► blocks
                                                                 wait_for_layer_load  waits, with load "layers"
                                                                 wait_for_save   jobs: blocks ═► node
    update_connector_output    ◄─ Report, finished, failed ◄───  get_transfer_results  collects complete jobs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from penstock.vllm import _pd_worker
from penstock.vllm._engine import Handshake, PromMetrics, Stats, check_policy, extras_of, facts_of, new_events, refuse_unsupported
from penstock.vllm._plan import EVENTS, LIVE_MAX, Options, Plan, Report
from penstock.vllm._scheduler import Scheduler
from penstock.vllm._worker import Worker

if TYPE_CHECKING:
    import torch

__all__ = ["PenstockConnector", "new_weights"]


@dataclass
class Metadata(KVConnectorMetadata):
    plan: Plan


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.merge(other.report))


class PenstockConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV cache in Penstock. docs/engines.md has the options."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        given = self._kv_transfer_config.kv_connector_extra_config
        options = _options(given)
        refuse_unsupported(vllm_config)
        self._layers = options.load == "layers"
        if self._layers:
            _refuse_layers(vllm_config, kv_cache_config)
        self._counters = _adapter.Counters("vllm")
        self._sent: dict[str, int] = {}
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            check_policy(self._kv_transfer_config)
            role_of = self._kv_transfer_config
            extras = extras_of(vllm_config, options.lookup_timeout)
            self._scheduler = Scheduler(options, self._counters, extras, loads=role_of.is_kv_consumer, saves=role_of.is_kv_producer)
        else:
            self._worker = Worker(options, self._counters)
        self._model = options.model or vllm_config.model_config.model

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return _options(extra_config).load == "layers"  # a CUDA graph of all layers would not call wait_for_layer_load

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped save is a miss later

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        parallel = self._vllm_config.parallel_config
        facts = {"model": self._model, **facts_of(self._vllm_config, kv_caches)}
        self._worker.register(kv_caches, self._kv_cache_config, facts, parallel.rank, parallel.tensor_parallel_size)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self._worker is not None
        definition = self._worker.definition
        return None if definition is None else Handshake(definition)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        self._worker.load(metadata.plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """With load "layers", wait until the KV of a layer has arrived and is verified, or its load has failed.

        With load "async" every load is complete before its request is scheduled.
        """
        assert self._worker is not None
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: a save begins when all layers of a block are computed.

        A node stores a value whole: it commits the checksums of all layers with one call, and no reader finds a part of a
        block. A transfer that began layer by layer would hold the node's memory during the forward pass, and would have to
        be undone for every block that a failed load has made worthless.
        """

    def wait_for_save(self) -> None:
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        self._worker.end_loads()
        self._worker.save(metadata.plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        self._worker.end_loads()  # with a draft model, wait_for_save comes after this
        self._worker.poll()
        loaded, failed = self._worker.take_loaded()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

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
        definitions = []
        for rank in sorted(metadata):
            handshake = metadata[rank]
            assert isinstance(handshake, Handshake)
            definitions.append(handshake.definition)
        self._scheduler.attach(definitions)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        found = self._scheduler.lookup(request, num_computed_tokens)
        return found, bool(found) and not self._layers

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._scheduler is not None
        state = scheduler_output.kv_connector_block_state
        return Metadata(self._scheduler.plan(scheduler_output.num_scheduled_tokens, state.get_block_ids, state.boundary_state_offloads))

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        metadata = connector_output.kv_connector_worker_meta
        assert metadata is None or isinstance(metadata, WorkerMetadata)
        self._scheduler.update(
            None if metadata is None else metadata.report,
            connector_output.finished_recving or (),
            connector_output.invalid_block_ids or (),
            connector_output.failed_recving or (),
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.finished(request, block_ids)
        return False, None  # the save holds its own references to the blocks

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy

    def reset_cache(self) -> bool | None:
        """Begin a new epoch, so that KV of older weights is not found. Return False if the nodes have not confirmed it in time."""
        assert self._scheduler is not None
        return self._scheduler.reset()

    # -- metrics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return new_events(self._counters, EVENTS, self._sent)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return Stats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVConnectorPromMetrics | None:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def new_weights(worker: Any, version: int = 0) -> int:
    """Begin epoch version, or the next one, for the following loads and stores of a worker. Return it.

    For ``collective_rpc`` after a weight update: ``llm.collective_rpc(penstock.vllm.new_weights, args=(version,))``.
    Engines that share a namespace pass the same version; the first of them begins it. Reset the engine's own prefix cache
    before.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    side = getattr(connector, "_worker", None)
    if not isinstance(side, (Worker, _pd_worker.Worker)):
        raise errors.InvalidError(f"the worker's KV connector is {type(connector).__name__}; want PenstockConnector or PenstockDualPath")
    return side.bump(version)


def _options(extra_config: dict[str, Any]) -> Options:
    where = "kv_connector_extra_config of PenstockConnector"
    options = _adapter.options(Options, extra_config, where=where)
    if not options.layers_per_read:
        raise errors.InvalidError(f"{where}: option 'layers_per_read': 0; want a number of at least 1")
    if not 1 <= options.live_epochs <= LIVE_MAX:
        raise errors.InvalidError(f"{where}: option 'live_epochs': {options.live_epochs}; want a number from 1 to {LIVE_MAX}")
    return options


def _refuse_layers(config: Any, kv_cache_config: Any) -> None:
    """Raise InvalidError for engines in which vLLM cannot recompute blocks that a load with "layers" has not loaded."""
    if (groups := len(kv_cache_config.kv_cache_groups)) > 1:
        raise errors.InvalidError(
            f'the option load is "layers", and the model has {groups} KV cache groups: vLLM takes failed blocks of a request that runs'
            ' only from models with one group. Set load to "async", or start the engine with --disable-hybrid-kv-cache-manager'
        )
    for group in kv_cache_config.kv_cache_groups:
        for spec in getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values():
            if (kind := type(spec).__name__) in ("SlidingWindowSpec", "ChunkedLocalAttentionSpec"):
                raise errors.InvalidError(
                    f'the option load is "layers", and no layer has full attention ({kind}): after a failed load vLLM computes a running'
                    ' request from its first failed block on, without the window in front of that block. Set load to "async"'
                )
    if threshold := config.scheduler_config.long_prefill_token_threshold:
        raise errors.InvalidError(
            f'the option load is "layers", and long_prefill_token_threshold is {threshold}: after a failed load vLLM could run a request on'
            ' blocks that another one has still to compute again. Set load to "async", or the threshold to 0'
        )

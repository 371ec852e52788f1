"""A secondary tier of vLLM's offloading (TieringOffloadingSpec) on Penstock's nodes."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import time
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from penstock import errors
from penstock._adapter import Connection, Counters, Link, digest, namespace_name, options, row
from penstock._core import Job, KeyResult
from penstock._memory import Pointers
from penstock._store import Namespace, Store
from penstock.vllm import _compat as compat

__all__ = ["Options", "PenstockTier"]

_log = logging.getLogger("penstock.tier")

_SUCCESS = (KeyResult.OK, KeyResult.EXISTS)
_JOBS_MAX = 65536

# The counters of the engine's metrics page, vllm:penstock_tier_NAME_total.
_METRICS = {
    "lookup_unavailable": "Lookups that found nothing, because no node is reachable or the nodes refuse.",
    "lookup_failed": "Lookups that no node answered in time.",
    "load_rows": "Rows that were loaded and verified.",
    "load_failed_rows": "Rows that were to be loaded, and that the engine computes.",
    "store_rows": "Rows that are stored, those that were stored before included.",
    "store_failed_rows": "Rows that were not stored.",
}


@dataclasses.dataclass(frozen=True)
class Options(Connection):
    """The keys of the tier's entry in ``secondary_tiers``, in addition to ``type`` and ``module_path``."""

    enable_kv_events: bool = False
    """Pass stored and removed blocks to the engine's publisher of KV events."""
    locality: str | None = None
    """LOCAL or REMOTE, of KV events."""
    lookup_timeout: float = 1.0
    """Time limit of a lookup, during which its request waits. After it, no block is found."""
    load_timeout: float = 10.0
    """Time limit of a load. The engine computes the blocks that have not arrived by then."""
    store_timeout: float = 30.0


class _Open(NamedTuple):
    store: Store
    ns: Namespace


class _Transfer(NamedTuple):
    """The tier's record of a job of the engine."""

    id: int
    load: bool
    keys: list[bytes]
    started: float


class _Lookups(compat.AsyncLookupManager):
    """Runs lookups in a thread of its own: one call for the keys that one request has looked up in a step."""

    def __init__(self, tier: PenstockTier) -> None:
        self._tier = tier
        super().__init__(tier_type=tier.tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> list[bool]:
        return self._tier.find(list(keys))


class PenstockTier(compat.SecondaryTierManager):
    """Keeps the rows of vLLM's CPU tier on Penstock's nodes. Its parameters are ``Options``.

    vLLM calls all methods from its scheduler, between steps. None of them waits for a node, except ``drain_jobs``, whose
    contract is to wait, and the constructor, for ``connect_timeout``. Loads and stores are jobs of the library, lookups run
    in a thread. While a node does not answer, its rows are misses.
    """

    medium = compat.Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None, **params: Any
    ) -> None:
        self._options = options(Options, params, where=f"secondary tier {tier_type!r}")
        super().__init__(
            offloading_spec, primary_kv_view, tier_type,
            **compat.accepted(super().__init__, {"backpressure_detector": backpressure_detector}),
        )  # fmt: skip
        self.locality = self._place(self._options.locality)
        if primary_kv_view.strides is None or primary_kv_view.ndim != 2 or not primary_kv_view.c_contiguous:
            raise errors.InvalidError(f"the primary view has {primary_kv_view.ndim} dimensions; want contiguous rows")
        self._row = primary_kv_view.strides[0]
        self._bytes = primary_kv_view.nbytes
        # The export of the view ends with this line: vLLM unmaps the memory right after shutdown.
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(primary_kv_view))
        self._name, self._layout = self._identity(offloading_spec)
        self._events: list[Any] | None = None
        if self._options.enable_kv_events:
            if offloading_spec.kv_events_config.enable_kv_cache_events:
                self._events = []
            else:
                _log.warning("enable_kv_events of tier %r has no effect: the engine's KV cache events are disabled", tier_type)
        self.counters = Counters("tier")
        self._taken = dict.fromkeys(_METRICS, 0)  # by get_stats
        self._jobs: dict[Job, _Transfer] = {}
        self._finished: list[Any] = []
        self._silent_until = 0.0
        self._renew = False  # another epoch has to begin before the namespace is used again
        self._checked_hashes = False
        self._closed = False
        self._link = Link(f"tier {tier_type!r}", self._open, retry=self._options.retry_interval, log=_log)
        self._lookups = _Lookups(self)
        self._link.wait(self._options.connect_timeout)

    def _place(self, locality: str | None) -> Any:
        if locality is None:
            return None
        try:
            return compat.Locality(locality)
        except (TypeError, ValueError) as e:
            raise errors.InvalidError(f"option 'locality': {locality!r} is not a Locality of vLLM; want LOCAL or REMOTE") from e

    def _identity(self, spec: Any) -> tuple[str, str]:
        """Return name and layout of the namespace. Engines share rows if all facts that determine the bytes are equal."""
        model, facts = compat.identity(spec)
        facts |= {"row_bytes": self._row, "vllm": release_of_vllm()}
        return namespace_name(self._options.namespace, model, facts, "tier"), digest(facts)

    def _open(self) -> _Open:
        store = self._options.open(timeout=self._options.connect_timeout, any_memory=False, jobs_max=_JOBS_MAX)
        try:
            store.register_address(self._base, self._bytes)
            ns = store.namespace(self._name, flat=True, tenant=self._options.tenant, layout=self._layout, **row(self._row))
        except BaseException:
            store.close()
            raise
        return _Open(store, ns)

    # -- lookups

    def find(self, keys: list[bytes]) -> list[bool]:
        """Return which rows are stored. It runs in the thread of the lookups."""
        link = self._link.value
        if link is None or time.monotonic() < self._silent_until:
            self.counters.add("lookup_unavailable")
            return [False] * len(keys)
        try:
            if self._renew:
                link.ns.bump()
                self._renew = False
            found = link.ns.exists(keys, timeout=self._options.lookup_timeout)
        except errors.Error as e:
            self._silent_until = time.monotonic() + self._options.retry_interval
            self.counters.add("lookup_failed")
            self.counters.warn("lookup", f"a lookup failed: {e}. The engine computes the missing rows")
            return [False] * len(keys)
        self.counters.settle("lookup")
        return found.done()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return compat.LookupResult.RETRY
        return compat.LookupResult.HIT if found else compat.LookupResult.MISS

    def on_new_request(self, req_context: Any) -> Any:
        if not self._checked_hashes:
            self._checked_hashes = True
            if compat.hash_seed_is_random():
                _log.warning(
                    "the block hashes of this engine begin with a random seed, so no other process finds what it stores: give all"
                    " engines that share a cache the same PYTHONHASHSEED, or --prefix-caching-hash-algo sha256"
                )
        return compat.RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    # -- transfers

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, load=True)

    def _submit(self, job: Any, *, load: bool) -> None:
        transfer = _Transfer(job.job_id, load, list(job.keys), time.monotonic())
        link = self._link.value
        try:
            if link is None or self._renew:
                raise self._link.refused or errors.UnavailableError("no node answers")
            places = [self._base + int(number) * self._row for number in compat.rows(job)]
            if any(not 0 <= place - self._base <= self._bytes - self._row for place in places):
                raise errors.InvalidError(f"rows {list(compat.rows(job))} of a view with {self._bytes // self._row}")
            values = Pointers(places, [self._row] * len(places))
            if load:
                started = link.ns.jobs.get(transfer.keys, values, timeout=self._options.load_timeout)
            else:  # nodes do not store again the rows that they have
                started = link.ns.jobs.put(transfer.keys, values, timeout=self._options.store_timeout)
        except errors.Error as e:
            self._finish(transfer, bytes(len(transfer.keys)), e)
        else:
            self._jobs[started] = transfer

    def get_finished_jobs(self) -> Iterable[Any]:
        link = self._link.value
        if link is not None:
            with contextlib.suppress(errors.ClosedError):  # shutdown has reported all jobs
                for job in link.store.drain():
                    self._collect(job)
        finished, self._finished = self._finished, []
        return finished

    def _collect(self, job: Job) -> None:
        transfer = self._jobs.pop(job, None)
        if transfer is not None:
            self._finish(transfer, job.codes, job.error())

    def _finish(self, transfer: _Transfer, codes: bytes, error: errors.Error | None) -> None:
        """Make the result of a job, once."""
        done = [key for key, code in zip(transfer.keys, codes, strict=True) if code in _SUCCESS]
        success = len(done) == len(transfer.keys)
        kind = "load" if transfer.load else "store"
        self.counters.add(f"{kind}_rows", len(done))
        if not success:
            failed = [key for key, code in zip(transfer.keys, codes, strict=True) if code not in _SUCCESS]
            self.counters.add(f"{kind}_failed_rows", len(failed))
            reason = error or f"{', '.join(sorted({KeyResult(code).name for code in codes if code not in _SUCCESS}))}"
            self.counters.warn(kind, f"a {kind} of {len(transfer.keys)} rows failed for {len(failed)}: {reason}")
            if transfer.load:
                # Without this the scheduler would request the same load forever.
                self._lookups.mark_miss(failed)
                self._event(
                    [key for key, code in zip(transfer.keys, codes, strict=True) if code in (KeyResult.MISS, KeyResult.LOST)], removed=True
                )
        else:
            self.counters.settle(kind)
        if not transfer.load:
            self._event(done, removed=False)
        self._finished.append(
            compat.result(
                job_id=transfer.id,
                success=success,
                successful_keys=tuple(done) if done and not success and transfer.load else None,
                transfer_time=time.monotonic() - transfer.started,
                transfer_bytes=len(done) * self._row,
            )
        )

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Mark rows as used now. The call does not wait for the nodes."""
        link = self._link.value
        if link is not None and keys and not self._renew:
            with contextlib.suppress(errors.Error):  # the order of eviction is a hint
                link.ns.jobs.touch(list(keys), timeout=self._options.lookup_timeout)

    def _event(self, keys: list[bytes], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(compat.event(keys, removed=removed, locality=self.locality))

    def take_events(self) -> Iterable[Any]:
        """Return the events since the last call: keys that were stored, and keys that a load did not find."""
        if self._events is None:
            return ()
        events, self._events = self._events, []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        return {f"vllm:penstock_tier_{name}": compat.counter(text) for name, text in _METRICS.items()}

    def get_stats(self) -> Any:
        """Return the increments of the counters since the last call, or None."""
        now = {name: self.counters[name] for name in _METRICS}
        new = {f"vllm:penstock_tier_{name}": n - self._taken[name] for name, n in now.items() if n != self._taken[name]}
        self._taken = now
        return compat.stats(new) if new else None

    # -- reset and shutdown

    def drain_jobs(self) -> None:
        """Wait for all transfers, each within its time limit. vLLM calls this in a reset of its cache, for example after
        a weight update, so another epoch begins: rows of the old weights become misses."""
        for job in list(self._jobs):
            with contextlib.suppress(errors.Error):  # the result has it
                job.wait()
            self._collect(job)
        self._renew = True
        link = self._link.value
        if link is not None:
            try:
                link.ns.bump()
                self._renew = False
            except errors.Error as e:  # the next lookup tries again
                _log.warning("no new epoch could begin after a reset: %s. The tier is not used until one has begun", e)

    def shutdown(self) -> None:
        """End all transfers and threads. After it returns, nothing refers to the primary view's memory."""
        if self._closed:
            return
        self._closed = True
        self._link.close()
        link = self._link.value
        if link is not None:
            link.store.close()
        self._lookups.shutdown()
        for job in list(self._jobs):
            self._collect(job)


def release_of_vllm() -> str:
    """Return vLLM's release, for each name under which it may be installed."""
    import vllm

    return ".".join(str(vllm.__version__).split(".")[:2])

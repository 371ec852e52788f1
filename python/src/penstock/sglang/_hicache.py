"""The storage backend."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from sglang.version import __version__ as sglang_version

from penstock import Cut, KeyResult, Pointers, Result, Store, errors
from penstock._adapter import Connection, Counters, options
from penstock.sglang import _weights
from penstock.sglang._pool import Pool

__all__ = ["Options", "PenstockHiCache"]

_BATCH_MAX = 1 << 16  # PENSTOCK_BATCH_MAX
# Keys of the configuration that SGLang reads itself and leaves in it.
_ENGINE_KEYS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path")

monotonic = time.monotonic


@dataclasses.dataclass(frozen=True)
class Options(Connection):
    """The keys of ``--hicache-storage-backend-extra-config`` that belong to Penstock."""

    timeout: float = 5.0
    """Time limit of each load, store and look-up, in seconds. A page that takes longer is recomputed."""
    chained: bool = False
    """Store the pages of a prompt as a chain, whose end is evicted first. It needs hicache_storage_pass_prefix_keys."""


_R = TypeVar("_R")


def _guarded(default: Callable[..., _R]) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Return default(arguments) instead of raising an exception, because an exception would end SGLang's storage
    threads."""

    def wrap(method: Callable[..., _R]) -> Callable[..., _R]:
        @functools.wraps(method)
        def guarded(self: PenstockHiCache, *args: Any, **kwargs: Any) -> _R:
            try:
                return method(self, *args, **kwargs)
            except Exception as e:
                self._failed(method.__name__, e)
                return default(*args, **kwargs)

        return guarded

    return wrap


def _nothing(*_args: Any, **_kwargs: Any) -> Any:
    return None


def _no_pages(keys: Sequence[str], *_args: Any, **_kwargs: Any) -> list[bool]:
    return [False] * len(keys)


def _no_transfers(transfers: Sequence[Any], *_args: Any, **_kwargs: Any) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class PenstockHiCache(HiCacheStorage):
    """Stores the pages of HiCache's host pools on Penstock's nodes.

    SGLang calls the batch methods on its storage threads, and the others on the scheduler's. Only the constructor and the
    registration of pools raise exceptions, for a configuration that cannot work. While the nodes do not answer, refuse, or
    have another namespace of that name, every page is a miss. The first failure is logged and each one is counted.
    """

    def __init__(self, storage_config: Any, kwargs: object = None) -> None:
        extra = dict(storage_config.extra_config or {})
        ours = {key: value for key, value in extra.items() if key not in _ENGINE_KEYS}
        self.options = options(Options, ours, where="hicache-storage-backend-extra-config")
        if self.options.chained and not extra.get("interface_v1"):
            raise errors.InvalidError("hicache-storage-backend-extra-config: chained needs interface_v1: 1")
        self.counters = Counters("sglang")
        self._config = storage_config
        # Guards the following attributes, except each pool's namespace once the connection is made. It is held while nodes
        # are called.
        self._lock = threading.RLock()
        self._store: Store | None = None
        self._pools: dict[str, Pool] = {}
        self._registered: set[int] = set()
        self._settled = False
        """The store is open and each pool has a namespace at the epoch of the engine's weights."""
        self._closed = False
        self._retry_at = 0.0
        self._weights = _weights.version()
        self._salt = _salt(self._weights)
        self._updated: list[Any] | None = None
        """The state of the pools when weights were loaded, until they have been flushed since; None if they were."""
        self._stats = _Stats(bool(storage_config.enable_storage_metrics))
        if not _weights.watch(self):
            self.counters.warn(
                "weights",
                f"SGLang {sglang_version} has no place where weight updates can be seen: clear the storage after each of them"
                " (POST /hicache/storage-backend/clear)",
            )

    # -- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of the KV. Raises InvalidError if its layout cannot be stored."""
        super().register_mem_pool_host(mem_pool_host)
        self._register("kv", mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a further pool of a hybrid model. Raises InvalidError if its layout cannot be stored."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(_name(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Connect, for at most ``connect_timeout``. The engine also starts if no node answers."""
        self._ready()

    def _register(self, name: str, host: Any) -> None:
        with self._lock:
            known = self._pools.get(name)
            if known is not None and known.host is host:
                return
            pool = Pool(name, host, self._config, chained=self.options.chained and name == "kv", version=sglang_version)
            if pool.fragments and not pool.check():
                self.counters.warn("check", f"the addressing of SGLang's host pool {name!r} was not checked: it has no free page")
            if self._config.is_mla_model and not _writer(self._config) and pool.fragments and not pool.replicated and name != "mamba":
                self.counters.warn(
                    f"unwritten {name}",
                    f"SGLang stores the host pool {name!r} of rank 0 alone, and this rank has other bytes: nothing is found for this model"
                    " with several ranks",
                )
            self._pools[name] = pool
            self._settled = False

    # -- the connection

    def _ready(self) -> bool:
        """Return whether pages can be moved. It waits for a node only if the connection has to be made."""
        if self._closed or not self._weights_known():
            return False
        if monotonic() < self._retry_at:
            self.counters.add("held_off")
            return False
        return self._settled or self._settle()

    def _settle(self) -> bool:
        with self._lock:
            if self._closed or self._settled or monotonic() < self._retry_at:
                return self._settled and not self._closed
            try:
                if self._store is None:
                    self._store = self.options.open(timeout=self.options.timeout)
                for pool in self._pools.values():
                    if pool.fragments:
                        self._open_pool(self._store, pool)
            except errors.Error as e:
                self._failed("connect", e)
                self._retry_at = monotonic() + self.options.retry_interval
                self._disconnect()
                return False
            self._settled = True
            self.counters.settle()
            return True

    def _disconnect(self) -> None:
        """Close the store. The next attempt opens a new one, without the state of unreachable nodes."""
        store, self._store = self._store, None
        self._registered.clear()
        for pool in self._pools.values():
            pool.namespace = None
        if store is not None:
            store.close()

    def _open_pool(self, store: Store, pool: Pool) -> None:
        if pool.namespace is None:
            pool.open(store, self.options)
        if pool.outdated and pool.namespace is not None:
            try:
                pool.namespace.bump(to=pool.namespace.epoch + 1)
            except errors.MismatchError:  # another rank or engine has a later epoch
                pool.namespace.refresh()
            pool.outdated = False
        for address, length, tensor in pool.buffers():
            if address not in self._registered:
                # Pools may share memory, which is registered once. The library registers other memory for each call.
                with contextlib.suppress(errors.InvalidError):
                    store.register_address(address, length, keep=tensor)
                self._registered.add(address)

    def _failed(self, what: str, e: Exception) -> None:
        """Count a failure, log the first, and pause if the nodes do not answer or refuse."""
        kind = type(e).__name__
        self.counters.add(f"failed_{kind}")
        self.counters.warn(f"{what} {kind}", f"{what}: {kind}: {e}. SGLang continues without these pages")
        if isinstance(e, errors.Error) and not isinstance(e, errors.InvalidError):
            with self._lock:
                self._retry_at = monotonic() + self.options.retry_interval
                if not isinstance(e, (errors.TimedOutError, errors.UnavailableError)):
                    self._settled = False
                    self._disconnect()

    # -- weights

    def weights_updated(self) -> None:
        """Stop: the engine has loaded weights, and its pools hold KV of the old ones until they are flushed."""
        with self._lock:
            self._updated = self._marks()

    def _marks(self) -> list[Any]:
        """Return objects that a flush of the host pools replaces."""
        return [getattr(pool.host, "mem_state", None) for pool in self._pools.values()]

    def _weights_known(self) -> bool:
        """Return whether the pools hold KV of the weights for which keys are made. If so, make keys for the newest
        weights."""
        if self._updated is None and _weights.version() == self._weights:
            return True
        with self._lock:
            marks = self._marks()
            if self._updated is not None and all(old is new for old, new in zip(self._updated, marks, strict=False)):
                self.counters.add("unflushed")
                self.counters.warn(
                    "unflushed", "weights were updated and the cache was not flushed: nothing is loaded or stored before the flush"
                )
                return False
            version = _weights.version()
            if version == self._weights:  # the update named none
                self._outdate()
            self._weights, self._salt, self._updated = version, _salt(version), None
        return True

    def _outdate(self) -> None:
        for pool in self._pools.values():
            pool.outdated = True
        self._settled = False

    @_guarded(_nothing)
    def clear(self) -> None:
        """Begin another epoch in every namespace: all existing pages become misses, for every engine that uses the
        namespaces."""
        with self._lock:
            self._outdate()
            self._retry_at = 0.0
        self._ready()

    # -- pages of the KV

    @_guarded(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many pages from the first on are stored."""
        pool = self._pools["kv"]
        if not keys or not pool.fragments or not self._ready():
            return 0
        return self._match(pool, keys, extra_info)

    @_guarded(_no_pages)
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool and return for each whether it was loaded and verified."""
        return self._get(self._pools["kv"], keys, host_indices, extra_info)

    @_guarded(_no_pages)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool and return for each whether it is stored, by this call or before."""
        return self._set(self._pools["kv"], keys, host_indices, extra_info)

    # -- pages of all pools

    @_guarded(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return the longest prefix that every pool can restore, and the length for each pool."""
        kv = self._pools["kv"]
        if not keys or not self._ready():
            return PoolTransferResult.empty()
        # A pool that only allocates indices has no pages that could be absent.
        pages = self._match(kv, keys, extra_info) if kv.fragments else len(keys)
        hits = {PoolName.KV: pages} if pages else {}
        whole = set(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if not whole:
                break
            there = self._exist(self._pools[_name(transfer.name)], keys[:pages])
            restorable = _restorable(transfer, there)
            if restorable:
                hits[transfer.name] = max(restorable)
            whole &= restorable
        return PoolTransferResult(max(whole, default=0), hits, sorted(whole))

    @_guarded(_no_transfers)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Load pages of several pools."""
        return self._each(transfers, extra_info, self._get)

    @_guarded(_no_transfers)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of several pools."""
        return self._each(transfers, extra_info, self._set)

    def _each(self, transfers: list[Any], extra_info: Any, move: Callable[..., list[bool]]) -> dict[Any, list[bool]]:
        done = _no_transfers(transfers)
        for transfer in transfers:
            keys = transfer.keys or []
            try:
                done[transfer.name] = move(self._pools[_name(transfer.name)], keys, transfer.host_indices, extra_info)
            except Exception as e:  # the other pools continue
                self._failed(_name(transfer.name), e)
        return done

    # -- single pages, as tensors: the methods that SGLang calls without interface_v1

    @_guarded(_nothing)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    @_guarded(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Load flat pages into tensors and return for each the tensor or None."""
        pool = self._pools["kv"]
        if not keys or not pool.fragments or not self._ready():
            return [None] * len(keys)
        done = self._loaded(self._namespace(pool).get(self._keys(keys), target_locations).done())
        return [tensor if ok else None for tensor, ok in zip(target_locations, done, strict=True)]

    @_guarded(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    @_guarded(lambda *_, **__: False)
    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Store flat pages, tensors, and return whether all of them are stored."""
        pool = self._pools["kv"]
        if not keys or not pool.fragments:
            return True
        if not self._ready():
            return False
        return all(self._stored(self._namespace(pool).put(self._keys(keys), values)))

    @_guarded(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # -- moving

    def _prefix(self, pool: Pool, extra_info: Any, *, whole: bool) -> list[str]:
        """Return the keys of the pages before those of a call. In a look-up SGLang passes no list if it is empty."""
        prefix: list[str] | None = getattr(extra_info, "prefix_keys", None)
        if not pool.chained:
            return []
        if prefix is None and not whole:
            raise errors.InvalidError("SGLang passes no prefix_keys: set hicache_storage_pass_prefix_keys to true, or chained to false")
        return list(prefix or ())

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self._salt + key for key in keys]

    def _namespace(self, pool: Pool) -> Any:
        namespace = pool.namespace
        if namespace is None:
            raise errors.ClosedError(f"the namespace of host pool {pool.name!r} is closed")
        return namespace

    def _match(self, pool: Pool, keys: Sequence[str], extra_info: Any) -> int:
        prefix = self._prefix(pool, extra_info, whole=True)
        found = self._namespace(pool).match(self._keys([*prefix, *keys][:_BATCH_MAX]))
        self._cut(found)
        pages = max(0, found.prefix - len(prefix))
        self.counters.add("matched_pages", pages)
        self.counters.add("missed_pages", len(keys) - pages)
        return int(pages)

    def _exist(self, pool: Pool, keys: Sequence[str]) -> list[bool]:
        done: list[bool] = self._namespace(pool).exists(self._keys(keys[:_BATCH_MAX])).done()
        return done

    def _cut(self, result: Result) -> None:
        if result.cut == Cut.DOWN:
            self.counters.add("down")
            self.counters.warn("down", f"no node answers at {self.options.servers}: SGLang continues without the cache")
        elif result.cut == Cut.EPOCH:
            self.counters.add("epoch_over")
            self.counters.warn(
                "epoch",
                "the namespace is at another epoch of the weights: every page is a miss until this engine clears its storage"
                " (POST /hicache/storage-backend/clear) or starts again",
            )

    def _get(self, pool: Pool, keys: Sequence[str], indices: Any, extra_info: Any) -> list[bool]:
        if not keys or not pool.fragments:
            return [True] * len(keys)
        if not self._ready():
            return [False] * len(keys)
        prefix = self._prefix(pool, extra_info, whole=False)
        places = pool.pointers(indices, len(keys))
        with self._stats.prefetch(len(keys) * pool.page_bytes, len(keys)):
            result = self._namespace(pool).get(self._keys([*prefix, *keys]), places, first=len(prefix))
        self._cut(result)
        return self._loaded(result.done())

    def _loaded(self, done: list[bool]) -> list[bool]:
        self.counters.add("loaded_pages", sum(done))
        self.counters.add("lost_pages", len(done) - sum(done))
        return done

    def _set(self, pool: Pool, keys: Sequence[str], indices: Any, extra_info: Any) -> list[bool]:
        if not keys or not pool.fragments:
            return [True] * len(keys)
        if pool.replicated and not _writer(self._config):
            return [True] * len(keys)  # rank 0 stores them
        if not self._ready():
            return [False] * len(keys)
        prefix = self._prefix(pool, extra_info, whole=False)
        places: Pointers = pool.pointers(indices, len(keys))
        with self._stats.backup(len(keys) * pool.page_bytes, len(keys)):
            result = self._namespace(pool).put(self._keys([*prefix, *keys]), places, first=len(prefix))
        return self._stored(result)

    def _stored(self, result: Result) -> list[bool]:
        done = result.done()
        self.counters.add("stored_pages", result.codes.count(KeyResult.OK))
        self.counters.add("present_pages", result.codes.count(KeyResult.EXISTS))
        self.counters.add("rejected_pages", len(done) - sum(done))
        for code, why in (
            (KeyResult.REFUSED, "a node stores no more: it is full, over its quota, or at another epoch"),
            (KeyResult.DOWN, f"no node answers at {self.options.servers}"),
        ):
            if code in result.codes:
                self.counters.warn(f"put {code.name}", f"{why}: SGLang continues without storing")
        return done

    # -- statistics and close

    @_guarded(_nothing)
    def get_stats(self) -> Any:
        """Return the pages moved and the rates since the last call."""
        return self._stats.take()

    @_guarded(_nothing)
    def close(self) -> None:
        """End the connection. SGLang calls it when the backend is detached; a second call does nothing."""
        _weights.ignore(self)
        with self._lock:
            self._closed, self._settled = True, False
            self._disconnect()


def _restorable(transfer: Any, there: list[bool]) -> set[int]:
    """Return the lengths of prefix that a pool can restore, given which of its pages are stored."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, (there.index(False) if False in there else len(there)) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        tail = max(1, len(transfer.keys or ()))
        return {n for n in range(1, len(there) + 1) if all(there[max(0, n - tail) : n])}
    raise errors.InvalidError(f"host pool {_name(transfer.name)!r}: the hit policy {transfer.hit_policy} is not supported")


def _name(pool: Any) -> str:
    return str(getattr(pool, "value", pool))


def _writer(config: Any) -> bool:
    return bool(getattr(config, "is_storage_writer", config.tp_rank == 0))


def _salt(version: str) -> str:
    """Return the start of the keys of one version of the weights."""
    return hashlib.sha256(version.encode()).hexdigest()[:16] + ":"


class _Stats:
    """Pages moved and rates, in the form of SGLang's metrics."""

    def __init__(self, enabled: bool) -> None:
        self._lock = threading.Lock()
        self._enabled = enabled  # otherwise SGLang does not collect the statistics
        self._new = self._metrics()

    @contextlib.contextmanager
    def prefetch(self, length: int, pages: int) -> Iterator[None]:
        yield from self._move("prefetch", length, pages)

    @contextlib.contextmanager
    def backup(self, length: int, pages: int) -> Iterator[None]:
        yield from self._move("backup", length, pages)

    def _move(self, what: str, length: int, pages: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        rate = length / max(time.perf_counter() - start, 1e-9) / 1e9
        with self._lock:
            if self._new is not None:
                getattr(self._new, f"{what}_pgs").append(pages)
                getattr(self._new, f"{what}_bandwidth").append(rate)

    def take(self) -> Any:
        with self._lock:
            new, self._new = self._new, self._metrics()
        return new

    def _metrics(self) -> Any:
        """Return SGLang's StorageMetrics, or None if it is not found, because its module has moved between releases."""
        if not self._enabled:
            return None
        try:
            from sglang.srt.observability.metrics_collector import StorageMetrics
        except ImportError:
            return None
        return StorageMetrics()

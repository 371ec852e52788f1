"""penstock.sglang under SGLang's own host pools, and a real node: each rule that HiCache expects of a storage backend."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.faults import damage, penstock

# SGLang imports sgl_kernel first, and decides when it is imported whether it runs on a CPU.
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent / "sglang_cpu"))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sgl_kernel  # noqa: F401
    import torch
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.mem_cache import device_pool_info as device
    from sglang.srt.mem_cache import hicache_storage as api
    from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool, LogicalHostPool
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.storage import StorageBackendFactory
    from sglang.version import __version__ as sglang_version

from penstock import Store, errors, testing
from penstock.sglang import PenstockHiCache, _hicache, _weights
from penstock.sglang._pool import geometry

pytestmark = pytest.mark.filterwarnings("default")

TESTED = "0.5.23"
PAGE = 16
LAYERS = 3

Make = Callable[..., PenstockHiCache]


# -- pools


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang leaves 10 GiB of the host free. The pools here are small."""
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


def _table(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def mha(layout: str = "page_first", *, dtype: torch.dtype = torch.bfloat16, v_dim: int = 16, page: int = PAGE, tokens: int = 256) -> Any:
    """A host pool of attention with 2 heads, filled with random numbers."""
    k = [torch.zeros(tokens, 2, 16, dtype=dtype) for _ in range(LAYERS)]
    v = [torch.zeros(tokens, 2, v_dim, dtype=dtype) for _ in range(LAYERS)]
    info = device.MHABufferInfo(
        buffers=device.KVBuffers(
            k=tuple(k), v=tuple(v), k_data_ptrs=_table(k), v_data_ptrs=_table(v), layout=next(iter(device.KVBufferLayout))
        ),
        page_size=page, head_num=2, head_dim=16, v_head_dim=v_dim, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    kind = MHATokenToKVPoolHost if v_dim == 16 else AsymmetricMHATokenToKVPoolHost
    pool = kind(info, 2.0, 0, page, layout, False, "cpu", device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS)
    return filled(pool)


def mla(layout: str = "page_first", *, tokens: int = 256) -> Any:
    """A host pool of latent KV, filled with random numbers."""
    rows = [torch.zeros(tokens, 1, 48) for _ in range(LAYERS)]
    info = device.MLABufferInfo(
        buffers=tuple(rows), data_ptrs=_table(rows), layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS, page_size=PAGE,
        kv_lora_rank=32, qk_rope_head_dim=16, kv_cache_dim=48, dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    pool = MLATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, False, "cpu", device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS, target_layer_num=LAYERS
    )
    return filled(pool)


def mamba(layout: str = "page_first", *, state: int = 8) -> Any:
    """A host pool of recurrent state: one snapshot is a page of one index."""
    info = device.MambaStateBufferInfo(conv=[torch.zeros(2, 16, 4, 3)], temporal=torch.zeros(2, 16, 2, state))
    return filled(MambaPoolHost(info, 2.0, 0, device_capacity=16, pin_memory=False, device="cpu", layout=layout))


def sparse(layout: str = "page_first") -> dict[str, Any]:
    """The host pools of a model with latent KV and a sparse indexer, whose index keys lie at the indices of the KV."""
    pool = DSATokenToKVPool(
        size=512, page_size=64, kv_lora_rank=32, dtype=torch.bfloat16, qk_rope_head_dim=16, layer_num=LAYERS, device="cpu",
        index_head_dim=128, enable_memory_saver=False, kv_cache_dim=48, index_buf_size=512,
    )  # fmt: skip
    kv = MLATokenToKVPoolHost(
        pool._mla_buffer_info(), 2.0, 0, 64, layout, False, "cpu", device_capacity_tokens=512, start_layer=0, end_layer=LAYERS,
        target_layer_num=LAYERS,
    )  # fmt: skip
    return {"kv": filled(kv), "indexer": filled(DSAIndexerPoolHost(make_dsa_indexer_pool_decl(pool), kv, pin_memory=False))}


def compressed(layout: str = "page_first") -> dict[str, Any]:
    """Host pools of DeepSeek V4: no memory for the KV itself, compressed pages, windows, and state at the indices of the windows."""

    def paged(name: str, length: int) -> Any:
        rows = [torch.zeros(8, length, dtype=torch.uint8) for _ in range(LAYERS)]
        return filled(DeepSeekV4PagedHostPool(name, rows, length, 16, 64, layout, pin_memory=False))

    states = [
        CompressStatePool(
            size=64, ring_size=8, overlap=True, head_dim=16, dtype=torch.float32, device="cpu", enable_memory_saver=False, ratio=4
        )
        for _ in range(LAYERS)
    ]  # fmt: skip
    return {
        "kv": LogicalHostPool(16 * 64, 64, layout),
        "deepseek_v4_c4": paged("deepseek_v4_c4", 1000),
        "swa": paged("swa", 640),
        "deepseek_v4_c4_state": filled(DeepSeekV4StateHostPool("deepseek_v4_c4_state", states, 16, 64, layout, pin_memory=False)),
    }


def filled(pool: Any) -> Any:
    buffers = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else [pool.kv_buffer]
    torch.manual_seed(1)
    for buffer in buffers:
        if buffer.dtype.is_floating_point:
            buffer.uniform_()
        else:
            buffer.random_(0, 256)
    return pool


def pages(pool: Any, n: int) -> torch.Tensor:
    indices = pool.alloc(n * pool.page_size)
    assert indices is not None
    return indices


def content(pool: Any, indices: torch.Tensor) -> list[bytes]:
    """The bytes of pages, as SGLang indexes them."""
    found = []
    for start in indices[:: pool.page_size].tolist():
        if isinstance(pool, AsymmetricMHATokenToKVPoolHost):
            at = start // pool.page_size if pool.layout == "page_first_direct" else slice(start, start + pool.page_size)
            parts = [pool.k_buffer[at], pool.v_buffer[at]]
        else:
            parts = [pool.get_data_page(start)]
        found.append(b"".join(p.contiguous().flatten().view(torch.uint8).numpy().tobytes() for p in parts))
    return found


def keys(n: int, name: str = "") -> list[str]:
    return [hashlib.sha256(f"{name or os.urandom(8).hex()} {i}".encode()).hexdigest() for i in range(n)]


# -- backends


def config(
    address: str, *, mla: bool = False, rank: int = 0, size: int = 1, model: str = "test/model", metrics: bool = True, **extra: Any
) -> Any:
    return api.HiCacheStorageConfig(
        tp_rank=rank, tp_size=size, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=mla,
        enable_storage_metrics=metrics, is_page_first_layout=True, model_name=model,
        extra_config={
            "backend_name": "penstock", "module_path": "penstock.sglang", "class_name": "PenstockHiCache", "interface_v1": 1,
            "servers": address, **extra,
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> Iterator[testing.Node]:
    """One node for all tests that do not harm it."""
    with testing.node() as n:
        yield n


@pytest.fixture
def make(shared: testing.Node) -> Iterator[Make]:
    """Makes backends as SGLang's factory does, and ends them with the test. Each test has a model of its own."""
    made: list[PenstockHiCache] = []
    model = os.urandom(8).hex()

    def backend(pool: Any, *, address: str = "", further: dict[str, Any] | None = None, **settings: Any) -> PenstockHiCache:
        settings.setdefault("model", model)
        b = StorageBackendFactory.create_backend("dynamic", config(address or shared.address, **settings), pool)
        assert isinstance(b, PenstockHiCache)
        made.append(b)
        b.register_mem_pool_host(pool)
        for name, other in (further or {}).items():
            b.register_mem_host_pool_v2(other, api.PoolName(name))
        b.on_host_pools_registered()
        return b

    yield backend
    for b in made:
        b.close()


# -- drift


def test_the_methods_are_those_of_the_installed_sglang() -> None:
    assert sglang_version == TESTED, "run all tests of SGLang with the new version, then name it here and in docs/engines.md"
    for name, theirs in inspect.getmembers(api.HiCacheStorage, inspect.isfunction):
        ours = getattr(PenstockHiCache, name)
        want = list(inspect.signature(theirs).parameters.values())
        have = list(inspect.signature(ours).parameters.values())
        assert [(p.name, p.kind) for p in have] == [(p.name, p.kind) for p in want], name
        for p, q in zip(have, want, strict=True):
            assert (p.default is p.empty) == (q.default is q.empty), f"{name}({p.name})"
        assert name == "__init__" or ours is not theirs, f"{name} is not ours"


def test_what_is_used_of_sglang_beside_the_methods_is_there() -> None:
    for hook in _weights.HOOKS:
        assert callable(getattr(SchedulerWeightUpdaterManager, hook))
    pool = mha()
    before = pool.mem_state
    pool.clear()
    assert pool.mem_state is not before, "a flush of the pool is seen by this"
    metrics = importlib.import_module("sglang.srt.observability.metrics_collector")
    fields = {"prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth"}
    assert fields <= set(inspect.signature(metrics.StorageMetrics).parameters)


# -- pages


@pytest.mark.parametrize(
    ("pool", "settings"),
    [
        (lambda: mha("page_first"), {}),
        (lambda: mha("page_first_direct"), {}),
        (lambda: mha("page_first", dtype=torch.float32, page=1), {}),
        (lambda: mha("page_first", v_dim=8), {}),
        (lambda: mha("page_first_direct", v_dim=8), {}),
        (lambda: mla("page_first"), {"mla": True}),
        (lambda: mla("page_first_direct"), {"mla": True}),
        (lambda: mla("layer_first"), {"mla": True}),
    ],
    ids=["mha", "mha-direct", "mha-page1", "mha-asymmetric", "mha-asymmetric-direct", "mla", "mla-direct", "mla-layer_first"],
)
def test_pages_come_back_in_another_process_and_place(make: Make, pool: Callable[[], Any], settings: dict[str, Any]) -> None:
    writer, reader = pool(), pool()
    stored, loaded = pages(writer, 5), pages(reader, 7)[2 * reader.page_size :]
    want = content(writer, stored)
    assert len(set(want)) == 5
    names = keys(5)
    a, b = make(writer, **settings), make(reader, **settings)
    assert a.batch_exists(names) == 0
    assert a.batch_set_v1(names, stored) == [True] * 5
    assert b.batch_exists([*names, *keys(1)]) == 5
    assert b.batch_get_v1(names, loaded) == [True] * 5
    assert content(reader, loaded) == want
    assert content(writer, stored) == want


def test_an_answer_has_one_entry_for_each_key(make: Make) -> None:
    pool = mha()
    b, names, places = make(pool), keys(6), pages(pool, 6)
    assert b.batch_set_v1(names[:3], places[: 3 * PAGE]) == [True] * 3
    assert b.batch_get_v1(names, places) == [True] * 3 + [False] * 3
    assert b.batch_get_v1([], places[:0]) == b.batch_set_v1([], places[:0]) == []
    assert b.batch_exists([]) == 0
    # What SGLang must not do is no exception either: it would end the storage thread.
    for wrong in (places[:PAGE], None, torch.zeros(0, dtype=torch.int64)):
        assert b.batch_get_v1(names, wrong) == b.batch_set_v1(names, wrong) == [False] * 6
    assert b.batch_set_v1(["k" * 300], places[:PAGE]) == [False], "a key that is too long"
    assert b.counters["failed_InvalidError"] == 7


def test_exists_is_a_length_of_prefix(make: Make) -> None:
    pool = mha()
    b, names, places = make(pool), keys(5), pages(pool, 1)
    for i in (0, 1, 3):
        assert b.batch_set_v1([names[i]], places) == [True]
    assert b.batch_exists(names) == 2
    assert b.batch_exists(names[2:]) == 0


def test_a_page_that_is_stored_already_is_a_success(make: Make) -> None:
    pool = mha()
    b, names, places = make(pool), keys(4), pages(pool, 4)
    assert b.batch_set_v1(names[:2], places[: 2 * PAGE]) == [True] * 2
    assert b.batch_set_v1(names, places) == [True] * 4
    assert (b.counters["stored_pages"], b.counters["present_pages"]) == (4, 2)


def test_k_and_v_are_one_value(make: Make, shared: testing.Node) -> None:
    pool = mha("page_first", v_dim=8)
    b, places = make(pool), pages(pool, 1)
    (namespace,) = [p.namespace for p in b._pools.values()]
    k, v = LAYERS * PAGE * 2 * 16 * 2, LAYERS * PAGE * 2 * 8 * 2
    assert namespace is not None
    assert namespace.value_bytes == k + v
    assert b.batch_set_v1(keys(1), places) == [True]
    assert b.counters["stored_pages"] == 1, "there is nothing of which a half could be stored"


def test_a_full_node_rejects(make: Make) -> None:
    with testing.node(capacity="32MiB", arena="16MiB") as n:
        pool = mha(dtype=torch.float32, page=256, tokens=4096)
        b, places = make(pool, address=n.address, timeout=30), pages(pool, 8)
        namespace = b._pools["kv"].namespace
        assert namespace is not None
        stored = 0
        for _ in range(64):
            names = keys(8)
            done = b.batch_set_v1(names, places)
            assert len(done) == 8
            stored += sum(done)
            if False in done:
                break
            assert namespace.match(b._keys(names), lease=300).lease is not None  # nothing of it can be evicted
        assert False in done
        assert 0 < stored <= 32 << 20
        assert b.counters["rejected_pages"] == done.count(False)


# -- hybrid models


def transfer(name: str, names: list[str], indices: Any = None, policy: Any = api.PoolHitPolicy.ALL_PAGES) -> Any:
    return api.PoolTransfer(name=api.PoolName(name), keys=names, host_indices=indices, hit_policy=policy)


def test_pools_of_a_hybrid_model(make: Make) -> None:
    kv, state = mha(), mamba()
    b = make(kv, further={"kv": kv, "mamba": state})
    names, places, snapshots = keys(6), pages(kv, 6), pages(state, 2)
    want = content(state, snapshots)
    assert b.batch_set_v1(names, places) == [True] * 6
    at = [names[2], names[4]]
    assert b.batch_set_v2([transfer("mamba", at, snapshots)]) == {api.PoolName.MAMBA: [True, True]}
    # The prefix ends where a snapshot is.
    tail = transfer("mamba", names[-1:], policy=api.PoolHitPolicy.TRAILING_PAGES)
    found = b.batch_exists_v2(names, [tail])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [3, 5])
    assert found.extra_pool_hit_pages == {api.PoolName.KV: 6, api.PoolName.MAMBA: 5}
    again = pages(state, 2)
    assert b.batch_get_v2([transfer("mamba", at, again)]) == {api.PoolName.MAMBA: [True, True]}
    assert content(state, again) == want
    # A pool that needs every page has none.
    assert b.batch_exists_v2(names, [transfer("mamba", names)]).kv_hit_pages == 0
    assert b.batch_exists_v2(names).kv_hit_pages == 6


MODELS: dict[str, tuple[Callable[[str], dict[str, Any]], bool]] = {
    "windows": (lambda layout: {"kv": mha(layout), "swa": mha(layout, tokens=128)}, False),
    "recurrent": (lambda layout: {"kv": mha(layout), "mamba": mamba(layout)}, False),
    "sparse": (sparse, True),
    "compressed": (compressed, True),
}
"""The pools of a model for a layout, and whether its KV is latent."""


def takes(pools: dict[str, Any], skip: int, n: int) -> dict[str, torch.Tensor]:
    """Indices of n pages in each pool that has memory, after ``skip`` pages. State takes those of the windows."""
    found: dict[str, torch.Tensor] = {}
    for name, pool in pools.items():
        if name != "kv" or not isinstance(pool, LogicalHostPool):
            owner = pools["swa"] if name.endswith("_state") else pool
            found[name] = found["swa"] if name.endswith("_state") else pages(owner, skip + n)[skip * owner.page_size :]
    return found


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("model", MODELS)
def test_all_pools_come_back_in_another_process_and_place(make: Make, model: str, layout: str) -> None:
    build, latent = MODELS[model]
    written, read = build(layout), build(layout)
    writer, reader = (make(pools["kv"], mla=latent, further=pools) for pools in (written, read))
    stored, places, names = takes(written, 0, 3), takes(read, 2, 3), keys(3)
    want = {name: content(written[name], indices) for name, indices in stored.items()}
    assert all(len(set(each)) == 3 for each in want.values())

    def transfers(at: dict[str, torch.Tensor]) -> list[Any]:
        return [transfer(name, names, indices) for name, indices in at.items()]

    done = {name: [True] * 3 for name in stored}
    assert writer.batch_set_v2(transfers(stored)) == done
    # Each pool is needed for a hit.
    assert reader.batch_exists_v2(names, transfers(places)).kv_hit_pages == 3
    assert reader.batch_get_v2(transfers(places)) == done
    assert {name: content(read[name], indices) for name, indices in places.items()} == want
    for name in stored:
        namespace = reader._pools[name].namespace
        assert namespace is not None
        assert namespace.delete(reader._keys(names[2:])).ok == 1
        assert reader.batch_exists_v2(names, transfers(places)).kv_hit_pages == 2
        assert writer.batch_set_v2(transfers(stored)) == done
    assert reader.batch_exists_v2(names, transfers(places)).kv_hit_pages == 3


def test_hits_are_those_of_sglangs_own_files(make: Make, tmp_path: Path) -> None:
    """Whichever pages of which pools are stored, the answer is that of SGLang's reference for hybrid models."""
    pools = {"kv": mha(), "swa": mha(), "indexer": mha(), "mamba": mamba()}
    files = api.HiCacheFile(config("unused:1"), str(tmp_path))
    for name, pool in pools.items():
        files.register_mem_host_pool_v2(pool, api.PoolName(name))
    ours = make(pools["kv"], further=pools)
    place = {name: pages(pool, 1) for name, pool in pools.items()}
    random_pages = random.Random(1)
    lengths = set()
    for _ in range(40):
        names = keys(8)
        for name in pools:
            there = [transfer(name, [key], place[name]) for key in names if random_pages.random() < 0.85]
            for one in there:
                assert ours.batch_set_v2([one]) == files.batch_set_v2([one]) == {api.PoolName(name): [True]}
        asked = [
            transfer("swa", names[-random_pages.randint(1, 3) :], policy=api.PoolHitPolicy.TRAILING_PAGES),
            transfer("indexer", names),
            transfer("mamba", names[-1:], policy=api.PoolHitPolicy.TRAILING_PAGES),
        ]
        random_pages.shuffle(asked)
        asked = asked[: random_pages.randint(0, 3)]
        found = ours.batch_exists_v2(names, asked)
        assert found == files.batch_exists_v2(names, asked)
        lengths.add(found.kv_hit_pages)
    assert len(lengths) > 4


def test_a_pool_whose_pages_are_refused_ends_the_hit(make: Make, shared: testing.Node) -> None:
    """Pages of the KV without those of the second pool are not found, and are whole when a later store completes them."""
    kv, window = mha(), mha()
    b = make(kv, further={"swa": window})
    namespace = b._pools["swa"].namespace
    assert namespace is not None
    names, places, windows = keys(4), pages(kv, 4), pages(window, 4)
    store = [transfer("swa", names, windows), transfer("kv", names, places)]
    ask = [transfer("swa", names[-2:], policy=api.PoolHitPolicy.TRAILING_PAGES)]
    # There is room for one page, which cannot be evicted.
    assert b.batch_set_v2([transfer("swa", names[:1], windows[:PAGE])]) == {api.PoolName.SWA: [True]}
    lease = namespace.match(b._keys(names[:1]), lease=300).lease
    assert lease is not None
    penstock("ns", "quota", namespace.name, "16KiB", "--server", shared.address)
    assert b.batch_set_v2(store) == {api.PoolName.SWA: [True] + [False] * 3, api.PoolName.KV: [True] * 4}
    assert b.batch_exists_v2(names, ask).kv_hit_pages == 1
    assert b.batch_exists_v2(names, [transfer("swa", names)]).kv_hit_pages == 1
    assert b.batch_get_v2([transfer("swa", names, windows)]) == {api.PoolName.SWA: [True] + [False] * 3}
    penstock("ns", "quota", namespace.name, "0", "--server", shared.address)
    assert b.batch_set_v2(store) == {api.PoolName.SWA: [True] * 4, api.PoolName.KV: [True] * 4}
    assert b.batch_exists_v2(names, ask).kv_hit_pages == 4


def test_other_pools_of_the_same_model(make: Make) -> None:
    """An engine finds nothing without the pools that it has itself, in the form that it has them."""
    kv, window = mha(), mha()
    b, names = make(kv, further={"swa": window}), keys(2)
    store = [transfer("kv", names, pages(kv, 2)), transfer("swa", names, pages(window, 2))]
    assert b.batch_set_v2(store) == {api.PoolName.KV: [True] * 2, api.PoolName.SWA: [True] * 2}
    assert make(mha(), further={"swa": mha()}).batch_exists_v2(names, [transfer("swa", names)]).kv_hit_pages == 2
    for other in (mha(v_dim=8), mha(dtype=torch.float16), mha("page_first_direct"), mamba()):
        assert make(mha(), further={"swa": other}).batch_exists_v2(names, [transfer("swa", names)]).kv_hit_pages == 0
    # The window of one engine is the indexer of none, and a pool that was not registered is no hit either.
    c = make(mha(), further={"indexer": mha()})
    assert c.batch_exists_v2(names, [transfer("indexer", names)]).kv_hit_pages == 0
    assert c.batch_exists_v2(names, [transfer("swa", names)]).kv_hit_pages == 0


def test_one_rank_stores_the_index_keys_of_all(make: Make) -> None:
    names, ranks = keys(2), [sparse(), sparse()]
    first, second = (make(pools["kv"], mla=True, rank=rank, size=2, further=pools) for rank, pools in enumerate(ranks))
    ask = [transfer("indexer", names)]
    for b, pools, n in ((second, ranks[1], 0), (first, ranks[0], 2)):
        store = [transfer(name, names, pages(pool, 2)) for name, pool in pools.items()]
        assert b.batch_set_v2(store) == {api.PoolName.KV: [True] * 2, api.PoolName.INDEXER: [True] * 2}
        assert second.batch_exists_v2(names, ask).kv_hit_pages == n
    assert second.counters["stored_pages"] == 0


def test_a_pool_that_fails_does_not_spoil_the_others(make: Make) -> None:
    kv, state = mha(), mamba()
    b = make(kv, further={"mamba": state})
    names = keys(2)
    done = b.batch_set_v2([transfer("indexer", names, pages(kv, 2)), transfer("mamba", names, None), transfer("kv", names, pages(kv, 2))])
    assert done == {api.PoolName.INDEXER: [False] * 2, api.PoolName.MAMBA: [False] * 2, api.PoolName.KV: [True] * 2}
    policy = SimpleNamespace(name=api.PoolName.MAMBA, keys=names, hit_policy="block_groups")
    assert b.batch_exists_v2(names, [policy]).kv_hit_pages == 0


def test_a_pool_that_only_hands_out_indices(make: Make) -> None:
    anchor, state = LogicalHostPool(16 * PAGE, PAGE), mamba()
    b = make(anchor, further={"mamba": state})
    names = keys(3)
    assert b.batch_get_v1(names, pages(anchor, 3)) == b.batch_set_v1(names, pages(anchor, 3)) == [True] * 3
    assert b.batch_exists_v2(names, [transfer("mamba", names)]).kv_hit_pages == 0
    assert b.batch_set_v2([transfer("mamba", names[:2], pages(state, 2))]) == {api.PoolName.MAMBA: [True] * 2}
    assert b.batch_exists_v2(names, [transfer("mamba", names)]).kv_hit_pages == 2


def test_a_buffer_of_no_bytes_is_left_out(make: Make) -> None:
    kv, state = mha(), mamba(state=0)
    b = make(kv, further={"mamba": state})
    names, snapshots = keys(2), pages(state, 2)
    want = content(state, snapshots)
    assert b.batch_set_v2([transfer("mamba", names, snapshots)]) == {api.PoolName.MAMBA: [True] * 2}
    again = pages(state, 2)
    assert b.batch_get_v2([transfer("mamba", names, again)]) == {api.PoolName.MAMBA: [True] * 2}
    assert content(state, again) == want


# -- the adapter refuses pools and options at the start


def test_layouts_that_are_refused(make: Make) -> None:
    with pytest.raises(errors.InvalidError, match=r"'kv'.*layer_first.*--hicache-mem-layout page_first"):
        make(mha("layer_first"))
    with pytest.raises(errors.InvalidError, match="page_head"):
        make(mha("page_head"))


def test_pools_that_share_pages_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pools that have their pages in one envelope, one alone names the memory."""
    other = mha()
    monkeypatch.setattr(other, "stores_page_envelope", True)
    monkeypatch.setattr(other, "get_hybrid_pool_buffer", list)
    with pytest.raises(errors.InvalidError, match=r"'swa'.*envelope"):
        make(mha(), further={"swa": other})


def test_pools_with_memory_that_is_not_named_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would count as pools that only hand out indices, whose pages are always there."""
    for pool in (mha(), sparse()["indexer"]):
        monkeypatch.setattr(pool, "get_hybrid_pool_buffer", list)
        with pytest.raises(errors.InvalidError, match=r"'swa'.*no buffers"):
            make(mha(), further={"swa": pool})


def test_draft_models_whose_pages_one_rank_stores(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang stores the heads of rank 0 alone if the other KV is latent. The other ranks log that they find nothing."""
    for rank, warnings_of_rank in ((0, 0), (1, 1)):
        caplog.clear()
        make(mla(), mla=True, rank=rank, size=2, further={"draft": mha()})
        assert len([r for r in caplog.records if "'draft'" in r.getMessage()]) == warnings_of_rank


def test_unknown_settings_are_refused(make: Make) -> None:
    with pytest.raises(errors.InvalidError, match=r"'timeot'.*'timeout'"):
        make(mha(), timeot=1)
    with pytest.raises(errors.InvalidError, match="servers"):
        make(mha(), servers="")
    with pytest.raises(errors.InvalidError, match="interface_v1"):
        make(mha(), chained=True, interface_v1=0)


def test_addresses_are_checked_against_sglangs_own_indexing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mha()
    before = pool.kv_buffer.clone()
    make(pool)
    assert torch.equal(pool.kv_buffer, before), "the pattern is taken back"
    assert pool.available_size() == pool.size
    other = mha()
    meta = other.get_page_buffer_meta
    monkeypatch.setattr(other, "get_page_buffer_meta", lambda indices: ([p + 32 for p in meta(indices)[0]], meta(indices)[1]))
    with pytest.raises(errors.InvalidError, match="another layout"):
        make(other)
    # A pool that lies at the indices of another one has no free pages. The pages that it has are restored.
    state = compressed()["deepseek_v4_c4_state"]
    before = state.kv_buffer.clone()
    make(mha(), further={"deepseek_v4_c4_state": state})
    assert torch.equal(state.kv_buffer, before)
    meta_of_state = state.get_page_buffer_meta
    monkeypatch.setattr(
        state, "get_page_buffer_meta", lambda indices: ([p + 64 for p in meta_of_state(indices)[0]], meta_of_state(indices)[1])
    )
    with pytest.raises(errors.InvalidError, match="another layout"):
        make(mha(), further={"deepseek_v4_c4_state": state})
    # A pool of which a release would name K alone.
    half = mha()
    meta_of_half = half.get_page_buffer_meta
    monkeypatch.setattr(half, "get_page_buffer_meta", lambda indices: tuple(x[::2] for x in meta_of_half(indices)))
    with pytest.raises(errors.InvalidError, match="another layout"):
        make(half)


def test_the_geometry_of_values() -> None:
    for fragments, tokens in (([4096, 4096], 16), ([3 << 20, 3 << 20], 64), ([1 << 20] * 61, 64), ([98304, 1536, 1536], 1), ([70], 7)):
        g = geometry(fragments, tokens)
        part = g["block_tokens"] * g["token_bytes"]
        assert g["layers"] * part == sum(fragments)
        assert all(n % part == 0 for n in fragments)
        assert part <= 1 << 20
        assert g["block_tokens"] == tokens
    with pytest.raises(errors.InvalidError, match="parts"):
        geometry([8 << 20, 7], 1)


# -- names


def test_what_decides_the_bytes_is_in_the_name(make: Make) -> None:
    names, pool = keys(2), mha()
    writer = make(pool)
    assert writer.batch_set_v1(names, pages(pool, 2)) == [True] * 2
    same = make(mha())
    assert same.batch_exists(names) == 2
    others: dict[str, Callable[[], PenstockHiCache]] = {
        "layout": lambda: make(mha("page_first_direct")),
        "dtype": lambda: make(mha(dtype=torch.float16)),
        "page": lambda: make(mha(page=32)),
        "model": lambda: make(mha(), model="another"),
        "size": lambda: make(mha(), size=2),
        "index": lambda: make(mha(), chained=True),
    }
    for what, other in others.items():
        assert other().batch_exists(names) == 0, what


def test_the_version_of_sglang_is_in_the_name(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    names, pool = keys(1), mha()
    assert make(pool).batch_set_v1(names, pages(pool, 1)) == [True]
    monkeypatch.setattr(_hicache, "sglang_version", "0.5.99")
    assert make(mha()).batch_exists(names) == 0


def test_ranks_share_latent_kv_alone(make: Make) -> None:
    names = keys(2)
    heads = mha()
    assert make(heads, rank=0, size=2).batch_set_v1(names, pages(heads, 2)) == [True] * 2
    assert make(mha(), rank=1, size=2).batch_exists(names) == 0, "another rank has other heads"
    latent, other = mla(), mla()
    first, second = make(latent, mla=True, rank=0, size=2), make(other, mla=True, rank=1, size=2)
    assert second.batch_set_v1(names, pages(other, 2)) == [True] * 2, "rank 0 stores what all have"
    assert second.batch_exists(names) == 0
    pages_of_first = pages(latent, 2)
    assert first.batch_set_v1(names, pages_of_first) == [True] * 2
    assert second.batch_exists(names) == 2
    places = pages(other, 5)[3 * PAGE :]
    assert second.batch_get_v1(names, places) == [True] * 2
    assert content(other, places) == content(latent, pages_of_first)
    assert make(mla(), mla=True).batch_exists(names) == 0, "another number of ranks"


def test_state_of_a_model_with_latent_kv_belongs_to_its_rank(make: Make) -> None:
    names = keys(1)
    states = [mamba(), mamba()]
    ranks = [make(mla(), mla=True, rank=r, size=2, further={"mamba": s}) for r, s in enumerate(states)]
    for b, s in zip(ranks, states, strict=True):
        s.temporal_buffer.uniform_()
        places = pages(s, 2)
        want = content(s, places[:1])
        assert b.batch_set_v2([transfer("mamba", names, places[:1])]) == {api.PoolName.MAMBA: [True]}
        assert b.batch_get_v2([transfer("mamba", names, places[1:])]) == {api.PoolName.MAMBA: [True]}
        assert content(s, places[1:]) == want
    assert ranks[1].counters["stored_pages"] == 1


# -- chains


def info(prefix: list[str] | None) -> Any:
    return api.HiCacheStorageExtraInfo(prefix_keys=prefix)


def test_chained_pages_know_their_parents(make: Make) -> None:
    pool = mha()
    b, names, places = make(pool, chained=True), keys(5), pages(pool, 5)
    want = content(pool, places)
    assert b.batch_set_v1(names[:2], places[: 2 * PAGE], info([])) == [True] * 2
    assert b.batch_set_v1(names[2:], places[2 * PAGE :], info(names[:2])) == [True] * 3
    assert b.batch_exists(names, info(None)) == 5, "SGLang gives None in a look-up from the start of a prompt"
    assert b.batch_exists(names[3:], info(names[:3])) == 2
    again = pages(pool, 2)
    assert b.batch_get_v1(names[3:], again, info(names[:3])) == [True] * 2
    assert content(pool, again) == want[3:]
    # The whole prompt is on the node as one chain: what follows a block goes with it.
    namespace = b._pools["kv"].namespace
    assert namespace is not None
    assert namespace.delete(b._keys(names[:1])).ok == 1
    assert b.batch_exists(names, info(None)) == 0


def test_chained_pages_need_prefix_keys(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    pool = mha()
    b, places = make(pool, chained=True), pages(pool, 1)
    assert b.batch_set_v1(keys(1), places, info(None)) == [False]
    assert b.batch_get_v1(keys(1), places) == [False]
    assert "hicache_storage_pass_prefix_keys" in caplog.text


# -- without interface_v1


def test_pages_as_tensors(make: Make) -> None:
    pool = mha()
    b, names, places = make(pool, interface_v1=0), keys(3), pages(pool, 3)
    starts = places[::PAGE].tolist()
    assert b.batch_set(names[:2], [pool.get_data_page(i) for i in starts[:2]]) is True
    room = [pool.get_dummy_flat_data_page() for _ in names]
    got = b.batch_get(names, room)
    assert [t is None for t in got] == [False, False, True]
    assert torch.equal(got[1], pool.get_data_page(starts[1]))
    assert b.set(names[2], pool.get_data_page(starts[2])) is True
    assert b.get(names[2], room[2]) is room[2]
    assert (b.exists(names[0]), b.exists("absent"), b.get("absent", room[0])) == (True, False, None)
    # The same pages by either interface.
    assert make(mha()).batch_exists(names) == 3
    assert b.batch_set(names, [torch.zeros(3)] * 3) is False


# -- threads


def test_three_threads_at_once(make: Make) -> None:
    pool = mha(tokens=1024)
    b = make(pool)
    names = keys(24)
    places, again = pages(pool, 24), pages(pool, 24)
    want = content(pool, places)

    def each(act: Callable[[int], None]) -> None:
        for i in range(24):
            act(i)

    def span(i: int) -> slice:
        return slice(i * PAGE, (i + 1) * PAGE)

    stored = [threading.Event() for _ in names]

    def backup(i: int) -> None:
        assert b.batch_set_v1([names[i]], places[span(i)]) == [True]
        stored[i].set()

    def query(i: int) -> None:
        assert stored[i].wait(60)
        assert b.batch_exists(names[: i + 1]) == i + 1

    def prefetch(i: int) -> None:
        assert stored[i].wait(60)
        assert b.batch_get_v1([names[i]], again[span(i)]) == [True]

    with ThreadPoolExecutor(3) as threads:
        for future in [threads.submit(each, act) for act in (backup, query, prefetch)]:
            future.result()
    assert content(pool, again) == want


# -- statistics


def test_statistics_reset_when_they_are_read(make: Make) -> None:
    pool = mha()
    b, names, places = make(pool), keys(3), pages(pool, 3)
    b.batch_set_v1(names, places)
    b.batch_get_v1(names[:2], places[: 2 * PAGE])
    stats = b.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert stats.backup_bandwidth[0] > 0
    assert b.get_stats().backup_pgs == []
    silent = make(mha(), metrics=False)
    assert silent.batch_exists(names) == 3
    assert silent.batch_set_v1(names, places) == [True] * 3
    assert silent.get_stats() is None, "SGLang does not collect them"


# -- life


def test_attached_and_detached_again(make: Make) -> None:
    pool, names = mha(), keys(1)
    places = pages(pool, 1)
    for attempt in range(3):
        b = make(pool)
        assert b.batch_exists(names) == (attempt > 0)
        assert b.batch_set_v1(names, places) == [True]
        b.close()
        b.close()
        assert b.batch_exists(names) == 0
        assert b.batch_get_v1(names, places) == b.batch_set_v1(names, places) == [False]


def test_clear_begins_another_epoch(make: Make) -> None:
    pool, names = mha(), keys(2)
    a, b, places = make(pool), make(mha()), pages(pool, 2)
    assert a.batch_set_v1(names, places) == [True] * 2
    assert b.batch_exists(names) == 2
    a.clear()
    assert a.batch_exists(names) == b.batch_exists(names) == 0
    assert a.batch_set_v1(names, places) == [True] * 2
    assert b.batch_exists(names) == 0, "the other engine still has the old weights"
    b.clear()
    assert b.batch_exists(names) == 2, "both have had one update"


class _Updater(SchedulerWeightUpdaterManager):  # type: ignore[misc]
    """SGLang's own updater without an engine around it."""

    def __init__(self, flush: Callable[..., bool], record: Callable[[str | None], None]) -> None:
        self.flush_cache = flush
        self.scheduler = SimpleNamespace(record_weight_version_change=lambda new_version: record(new_version))

    def update(self, version: str | None, *, flush: bool = True) -> None:
        """Do what update_weights_from_disk does once the weights are loaded."""
        self.record_weight_version_after_update(version)
        self.flush_cache_after_weight_update(SimpleNamespace(flush_cache=flush, torch_empty_cache=False), True, "")


def test_updated_weights_miss_what_the_old_ones_stored(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = SimpleNamespace(version="default")
    monkeypatch.setattr(_weights, "version", lambda: serving.version)
    pool, names = mha(), keys(2)
    b, places = make(pool), pages(pool, 2)

    def flush(**_: Any) -> bool:
        pool.clear()
        return True

    def record(version: str | None) -> None:
        # Between the update and the flush the pools hold KV of the old weights.
        serving.version = version or serving.version
        assert b.batch_set_v1(names, places) == [False] * 2
        assert b.batch_exists(names) == 0

    updater = _Updater(flush, record)
    assert b.batch_set_v1(names, places) == [True] * 2
    pool.clear()
    assert b.batch_exists(names) == 2, "a flush alone changes no weights"
    updater.update("v2")
    assert b.batch_exists(names) == 0
    updater.update("default")
    assert b.batch_exists(names) == 2, "these weights are those of the beginning"
    updater.update(None)
    assert b.batch_exists(names) == 0, "an update without a version begins another epoch"
    assert b.batch_set_v1(names, places) == [True] * 2
    updater.update("v3", flush=False)
    assert b.batch_set_v1(names, places) == [False] * 2, "nothing is stored before the flush"
    assert b.batch_exists(names) == 0
    pool.clear()
    assert b.batch_set_v1(names, places) == [True] * 2


# -- nodes that are away, slow or damaged


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock by which the adapter leaves a node alone."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(_hicache, "monotonic", lambda: clock.now)
    return clock


def test_a_node_that_comes_later(make: Make, times: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    with testing.node() as n:
        n.kill()
        pool, names = mha(), keys(1)
        b, places = make(pool, address=n.address, connect_timeout=1, timeout=1), pages(pool, 1)
        for _ in range(20):
            assert b.batch_exists(names) == 0
            assert b.batch_set_v1(names, places) == [False]
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING and r.name == "penstock.sglang"]) == 1
        assert sum(n for event, n in b.counters._counts.items() if event in ("held_off", "down") or event.startswith("failed_")) >= 20
        n.start()
        times.now += 60
        assert b.batch_set_v1(names, places) == [True]
        assert b.batch_exists(names) == 1


def test_a_node_that_is_killed(make: Make) -> None:
    with testing.node() as n:
        pool, names = mha(), keys(1)
        b, places = make(pool, address=n.address, connect_timeout=1, timeout=1), pages(pool, 1)
        assert b.batch_set_v1(names, places) == [True]
        n.kill()
        assert b.batch_get_v1(names, places) == [False]
        assert b.batch_exists(names) == 0
        n.start()
        again = make(pool, address=n.address)
        assert again.batch_set_v1(names, places) == [True]
        assert again.batch_exists(names) == 1


def test_a_damaged_page_is_not_loaded(make: Make) -> None:
    with testing.node() as n:
        pool, names = mha(), keys(3)
        b, places = make(pool, address=n.address), pages(pool, 3)
        assert b.batch_set_v1(names, places) == [True] * 3
        n.stop()
        assert damage(n) > 0
        n.start()
        again = make(mha(), address=n.address)
        assert again.batch_get_v1(names, places) == [False] * 3
        assert again.counters["lost_pages"] == 3


def test_a_load_is_bounded(make: Make, times: SimpleNamespace) -> None:
    with testing.node() as n:
        pool, names = mha(), keys(1)
        b, places = make(pool, address=n.address, timeout=0.5, connect_timeout=1), pages(pool, 2)
        assert b.batch_set_v1(names, places[:PAGE]) == [True]
        n.pause()
        with ThreadPoolExecutor(1) as threads:
            load = threads.submit(b.batch_get_v1, names, places[PAGE:])
            assert load.result(60) == [False]
        # The pages are the engine's again: what the node still sends does not reach them.
        pool.kv_buffer.fill_(1)
        want = pool.kv_buffer.clone()
        n.resume()
        with Store(n.address) as store:
            store.stats()
        times.now += 60
        assert torch.equal(pool.kv_buffer, want)


def test_another_geometry_under_the_same_name(make: Make, shared: testing.Node, caplog: pytest.LogCaptureFixture) -> None:
    name = os.urandom(4).hex()
    names, pool = keys(1), mha()
    assert make(pool, namespace=name).batch_set_v1(names, pages(pool, 1)) == [True]
    other = mha(dtype=torch.float32)
    b, places = make(other, namespace=name), pages(other, 1)
    for _ in range(3):
        assert b.batch_exists(names) == 0
        assert b.batch_get_v1(names, places) == b.batch_set_v1(names, places) == [False]
    logged = [r.getMessage() for r in caplog.records if r.name == "penstock.sglang" and r.levelno >= logging.WARNING]
    assert len(logged) == 1
    assert "MismatchError" in logged[0]
    assert b.counters["failed_MismatchError"] == 1
    assert b.counters["held_off"] == 9


def test_a_wrong_token(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with testing.node(token="the right token, 24 bytes") as n:
        pool, names = mha(), keys(1)
        b, places = make(pool, address=n.address, token="the wrong token, 24 bytes"), pages(pool, 1)
        assert b.batch_exists(names) == 0
        assert b.batch_set_v1(names, places) == [False]
        logged = [r.getMessage() for r in caplog.records if r.name == "penstock.sglang" and r.levelno >= logging.WARNING]
        assert len(logged) == 1
        assert "AuthError" in logged[0]
        good = make(pool, address=n.address, token="the right token, 24 bytes")
        assert good.batch_set_v1(names, places) == [True]


def test_a_failure_inside_is_no_exception_outside(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, names = mha(), keys(2)
    b, places = make(pool), pages(pool, 2)

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("raised by the test")

    for method in ("match", "get", "put", "exists"):
        monkeypatch.setattr(b._pools["kv"].namespace, method, broken)
    assert b.batch_exists(names) == 0
    assert b.batch_get_v1(names, places) == b.batch_set_v1(names, places) == [False] * 2
    assert b.batch_exists_v2(names).kv_hit_pages == 0
    assert b.batch_get_v2([transfer("kv", names, places)]) == {api.PoolName.KV: [False] * 2}
    assert b.batch_set_v2([transfer("kv", names, places)]) == {api.PoolName.KV: [False] * 2}
    assert b.get("a", torch.zeros(1)) is None
    assert b.batch_get(["a"], [torch.zeros(1)]) == [None]
    assert b.set("a", torch.zeros(1)) is b.batch_set(["a"], [torch.zeros(1)]) is b.exists("a") is False
    assert b.counters["failed_ZeroDivisionError"] == 11

"""PenstockTier under vLLM's own classes, without a model."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import inspect
import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from harness.faults import damage

from penstock import InvalidError, Store
from penstock import testing as penstock_testing

pytestmark = pytest.mark.filterwarnings("ignore")  # those of vLLM's imports

ROWS, ROW = 32, 64 << 10
TIMEOUT = 60  # only what hangs takes so long


class View:
    """A primary view as vLLM's shared region makes it: rows of a mapping, as a memoryview of a NumPy array."""

    def __init__(self) -> None:
        import numpy

        self.map = mmap.mmap(-1, ROWS * ROW)
        self.array = numpy.frombuffer(self.map, dtype=numpy.int8).reshape(ROWS, ROW)
        self.view = memoryview(self.array)

    def fill(self, number: int, seed: int) -> bytes:
        content = bytes((seed * 31 + i * 7) % 251 for i in range(251)) * (ROW // 251 + 1)
        content = content[:ROW]
        self.map[number * ROW : (number + 1) * ROW] = content
        return content

    def row(self, number: int) -> bytes:
        return bytes(self.map[number * ROW : (number + 1) * ROW])

    def unmap(self) -> None:
        """Raises BufferError if anything has exported the memory."""
        self.view.release()
        del self.array
        gc.collect()
        self.map.close()


def spec(events: bool = True, **changes: Any) -> Any:
    """Return what a tier reads of an OffloadingSpec, with vLLM's own configuration classes."""
    from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    parallel = OffloadingParallelConfig(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0, data_parallel_size=1,
        data_parallel_rank_local=None, is_parallelism_agnostic=False,
    )  # fmt: skip
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=32, layer_names=("model.layers.0.self_attn.attn",), group_id=0),),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=events,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(name="org/tiny", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=parallel,
    )
    for name, value in changes.items():
        if hasattr(parallel, name):
            config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **{name: value}))
        elif name == "dtype":
            config = dataclasses.replace(config, model=OffloadingModelConfig(name="org/tiny", dtype=value))
        else:
            config = dataclasses.replace(config, **{name: value})
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=OffloadingKVEventsConfig(events, False), extra_config={})


def context(name: str = "request") -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext(req_id=name)


def key(number: int, group: int = 0) -> bytes:
    from vllm.v1.kv_offload.base import make_offload_key

    return bytes(make_offload_key(number.to_bytes(32, "big"), group))


def job(number: int, keys: Sequence[bytes], rows: Sequence[int], *, load: bool = False) -> Any:
    import numpy
    from vllm.v1.kv_offload.tiering.base import TransferJob

    return TransferJob(job_id=number, keys=list(keys), chunk_ids=numpy.array(rows), is_promotion=load, req_context=context())


Make = Callable[..., Any]


@pytest.fixture
def view() -> View:
    return View()


@pytest.fixture
def make(node: penstock_testing.Node, view: View) -> Iterator[Make]:
    """Makes tiers through vLLM's factory, and shuts them down."""
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    tiers = []

    def of(of_spec: Any = None, of_view: View = view, **params: Any) -> Any:
        config = {"type": "PenstockTier", "module_path": "penstock.vllm.tier", "servers": node.address, "retry_interval": 0.1, **params}
        tier = SecondaryTierFactory.create_secondary_tier(config, of_view.view, of_spec or spec())
        tiers.append(tier)
        return tier

    yield of
    for tier in tiers:
        tier.shutdown()


def finished(tier: Any, count: int = 1) -> dict[int, Any]:
    """Wait for the results of ``count`` jobs. No job may be reported twice."""
    results: dict[int, Any] = {}
    while len(results) < count:
        if tier._jobs:
            poll = select.poll()
            poll.register(tier._link.value.store.fileno(), select.POLLIN)
            assert poll.poll(TIMEOUT * 1000), f"no result of {sorted(t.id for t in tier._jobs.values())}"
        for result in tier.get_finished_jobs():
            assert result.job_id not in results
            results[result.job_id] = result
    return results


def find(tier: Any, keys: Sequence[bytes], name: str = "request") -> list[bool]:
    """Look keys up as the scheduler does: again in each step, until no answer is RETRY."""
    from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

    end = time.monotonic() + TIMEOUT
    while True:
        answers = [tier.lookup(k, context(name)) for k in keys]
        tier.on_schedule_end(ScheduleEndContext((), ()))
        if LookupResult.RETRY not in answers:
            return [answer is LookupResult.HIT for answer in answers]
        assert time.monotonic() < end
        os.sched_yield()  # to the thread of the lookups


def store(tier: Any, view: View, count: int = 8) -> list[bytes]:
    """Store ``count`` rows and return their contents. Row i has key i."""
    contents = [view.fill(i, i) for i in range(count)]
    tier.submit_store(job(1000, [key(i) for i in range(count)], range(count)))
    assert finished(tier)[1000].success
    return contents


# -- the surface

SURFACE = {
    "__init__": "(self, offloading_spec: 'OffloadingSpec', primary_kv_view: memoryview, tier_type: str,"
    " backpressure_detector: vllm.v1.kv_offload.tiering.backpressure.BackpressureDetector | None = None) -> None",
    "drain_jobs": "(self) -> None",
    "get_finished_jobs": "(self) -> collections.abc.Iterable[vllm.v1.kv_offload.tiering.base.JobResult]",
    "has_pending_work": "(self) -> bool",
    "on_request_finished": "(self, req_context: vllm.v1.kv_offload.base.ReqContext) -> None",
    "on_schedule_end": "(self, context: vllm.v1.kv_offload.base.ScheduleEndContext) -> None",
    "serve_external_requests": "(self, parent: vllm.v1.kv_offload.tiering.base.ParentManager) -> None",
    "shutdown": "(self) -> None",
}


def test_surface_of_the_installed_release() -> None:
    """Each method of the base class accepts the base's arguments on our class. The base has the methods that this test lists."""
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

    from penstock.vllm import PenstockTier

    methods = {
        "build_metric_definitions", "drain_jobs", "get_finished_jobs", "get_stats", "has_pending_work", "lookup", "on_new_request",
        "on_request_finished", "on_schedule_end", "serve_external_requests", "shutdown", "submit_load", "submit_store", "take_events",
        "touch",
    }  # fmt: skip
    found = {
        n for n, f in vars(SecondaryTierManager).items() if not n.startswith("_") and (inspect.isfunction(f) or isinstance(f, classmethod))
    }
    assert found == methods
    for name in methods:
        theirs = list(inspect.signature(getattr(SecondaryTierManager, name)).parameters)
        assert list(inspect.signature(getattr(PenstockTier, name)).parameters) == theirs, name
    for name, signature in SURFACE.items():
        assert str(inspect.signature(getattr(SecondaryTierManager, name))) == signature
    assert [f.name for f in dataclasses.fields(TransferJob)] == [
        "job_id",
        "keys",
        "chunk_ids",
        "is_promotion",
        "req_context",
        "submit_time",
    ]
    assert [f.name for f in dataclasses.fields(JobResult)] == ["job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"]
    assert list(inspect.signature(AsyncLookupManager.batch_lookup).parameters) == ["self", "keys", "req_context"]
    assert {"lookup", "flush", "mark_miss", "cleanup", "shutdown"} <= set(vars(AsyncLookupManager))
    assert not PenstockTier.__abstractmethods__


def test_releases() -> None:
    """Jobs and results of the releases that the compat module names."""
    from penstock.vllm import _compat as compat

    @dataclasses.dataclass
    class Before:
        job_id: int
        success: bool
        transfer_size: int | None = None

    values = {"job_id": 1, "success": False, "successful_keys": (b"k",), "transfer_time": 0.5, "transfer_bytes": 7}
    assert compat.result(Before, **values) == Before(1, False, 7)
    assert compat.result(**values).successful_keys == (b"k",)
    assert compat.rows(SimpleNamespace(block_ids=[1])) == [1]
    assert compat.rows(SimpleNamespace(chunk_ids=[2])) == [2]


def test_entry_point() -> None:
    """vLLM calls the plugin in each process, several times, and finds the tier by its short name."""
    from importlib.metadata import entry_points

    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from penstock.vllm import PenstockTier
    from penstock.vllm.plugin import register

    register()
    register()
    assert SecondaryTierFactory.get_tier_class({"type": "penstock"}) is PenstockTier
    points = [point for point in entry_points(group="vllm.general_plugins") if point.name == "penstock"]
    if points:  # the wheel is installed, not only on the path
        assert points[0].load() is register


# -- transfers and lookups


def test_round_trip(make: Make, view: View) -> None:
    tier = make()
    contents = store(tier, view)
    assert find(tier, [key(i) for i in range(10)]) == [True] * 8 + [False] * 2
    # Into other rows, in another order.
    tier.submit_load(job(1, [key(3), key(5)], [20, 10], load=True))
    result = finished(tier)[1]
    assert (result.success, result.successful_keys, result.transfer_bytes) == (True, None, 2 * ROW)
    assert (view.row(20), view.row(10)) == (contents[3], contents[5])
    # What is present is not stored again, and the whole job completes.
    tier.submit_store(job(2, [key(0), key(8)], [0, 8]))
    assert finished(tier)[2].success
    assert tier.counters["store_rows"] == 10


def test_rows_of_kv_cache_groups_are_apart(make: Make, view: View) -> None:
    """A hybrid model has rows of one block hash in several groups. The tier takes whatever vLLM keeps in them, also state and chunks."""
    tier = make()
    keys = [key(1, group) for group in range(3)]
    contents = [view.fill(row, row) for row in range(2)]
    tier.submit_store(job(1, keys[:2], [0, 1]))
    assert finished(tier)[1].success
    assert find(tier, keys) == [True, True, False]
    tier.submit_load(job(2, keys[:2], [5, 4], load=True))
    assert finished(tier)[2].success
    assert [view.row(5), view.row(4)] == contents


def test_many_jobs_complete_once(make: Make, view: View) -> None:
    tier = make()
    contents = store(tier, view, 16)
    for i in range(200):
        if i % 2:
            tier.submit_load(job(i, [key(i % 16)], [16 + i % 16], load=True))
        else:
            tier.submit_store(job(i, [key(1000 + i)], [i % 16]))
    results = finished(tier, 200)
    assert all(result.success for result in results.values())
    assert list(tier.get_finished_jobs()) == []
    assert view.row(31) == contents[15]


def test_failed_load_is_a_miss(make: Make, view: View) -> None:
    """Some rows of a load were evicted. The load reports the others. The missing rows are a miss for the request."""
    tier = make()
    contents = store(tier, view)
    keys = [key(i) for i in range(4)]
    assert find(tier, keys) == [True] * 4
    with Store(tier._options.servers) as other:
        tier_ns = other.namespace(tier._name, block_tokens=1, layers=1, token_bytes=ROW, flat=True, layout=tier._layout)
        tier_ns.delete([keys[1], keys[3]])
    before = view.row(21)
    tier.submit_load(job(1, keys, [20, 21, 22, 23], load=True))
    result = finished(tier)[1]
    assert (result.success, result.successful_keys) == (False, (keys[0], keys[2]))
    assert (view.row(20), view.row(21), view.row(22)) == (contents[0], before, contents[2])
    assert find(tier, keys) == [True, False, True, False]
    # After this request has finished, another request looks the keys up again.
    tier.on_request_finished(context())
    tier.submit_store(job(2, [keys[1]], [1]))
    assert finished(tier)[2].success
    assert find(tier, keys[:2], "another") == [True, True]


def test_one_call_for_a_prefix(make: Make, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys that a request looks up in one step go into one call. The call does not run on the scheduler's thread."""
    tier = make()
    store(tier, view)
    calls: list[tuple[int, bool]] = []
    real = tier.find

    def counted(keys: list[bytes]) -> Any:
        calls.append((len(keys), threading.current_thread() is threading.main_thread()))
        return real(keys)

    monkeypatch.setattr(tier, "find", counted)
    assert find(tier, [key(i) for i in range(12)]) == [True] * 8 + [False] * 4
    assert calls == [(12, False)]


def test_metrics(make: Make, view: View) -> None:
    """The engine's metrics page has the tier's counters. The engine takes the counts since the last step."""
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    tier = make()
    store(tier, view)
    tier.submit_load(job(1, [key(1), key(99)], [20, 21], load=True))
    assert not finished(tier)[1].success
    stats = tier.get_stats()
    assert stats.reduce() == {
        "vllm:penstock_tier_store_rows": 8, "vllm:penstock_tier_load_rows": 1, "vllm:penstock_tier_load_failed_rows": 1
    }  # fmt: skip
    assert tier.get_stats() is None
    configured = {"secondary_tiers": [{"type": "PenstockTier", "module_path": "penstock.vllm"}]}
    assert set(stats.reduce()) <= set(TieringOffloadingSpec.build_metric_definitions(configured))


def test_bad_rows(make: Make) -> None:
    """Rows outside of the view are a failed job, and touch no memory."""
    tier = make()
    tier.submit_load(job(1, [key(1)], [ROWS], load=True))
    tier.submit_store(job(2, [key(1)], [-1]))
    assert [result.success for result in finished(tier, 2).values()] == [False, False]


# -- the node


def test_node_stopped_and_killed(make: Make, view: View, node: penstock_testing.Node) -> None:
    """Nothing that the scheduler calls waits for the node; each job ends within its bound; afterwards all works again."""
    tier = make(lookup_timeout=0.5, load_timeout=0.5, store_timeout=0.5)
    contents = store(tier, view)
    node.pause()
    tier.submit_load(job(1, [key(0)], [20], load=True))
    tier.submit_store(job(2, [key(100)], [0]))
    tier.touch([key(0)], context())
    assert not tier._finished  # the calls returned before their jobs ended
    assert [result.success for result in finished(tier, 2).values()] == [False, False]
    assert find(tier, [key(1)]) == [False]
    node.resume()
    node.kill()
    tier.submit_load(job(3, [key(0)], [20], load=True))
    assert not finished(tier)[3].success
    assert find(tier, [key(2)]) == [False]
    node.start()
    for number in range(10, 100_000):
        tier.submit_store(job(number, [key(i) for i in range(8)], range(8)))
        if finished(tier)[number].success:
            break
    tier.submit_load(job(4, [key(0)], [20], load=True))
    assert finished(tier)[4].success
    assert view.row(20) == contents[0]


def test_node_down_at_the_start(make: Make, view: View, node: penstock_testing.Node) -> None:
    node.kill()
    tier = make(connect_timeout=0.2)
    assert find(tier, [key(0)]) == [False]
    tier.submit_store(job(1, [key(0)], [0]))
    assert not finished(tier)[1].success
    tier.drain_jobs()
    node.start()
    assert tier._link.wait(TIMEOUT)
    for number in range(10, 100_000):
        find(tier, [key(number)])  # the first of them begins the epoch that the reset asked for
        tier.submit_store(job(number, [key(0)], [0]))
        if finished(tier)[number].success:
            break
    tier.on_request_finished(context())  # which has the answer of before
    assert find(tier, [key(0)], "another") == [True]


def test_damaged_disk(make: Make, view: View, node: penstock_testing.Node) -> None:
    tier = make()
    contents = store(tier, view)
    tier.shutdown()
    node.stop()
    damage(node)
    node.start()
    tier = make()
    keys = [key(i) for i in range(8)]
    tier.submit_load(job(1, keys, range(8, 16), load=True))
    result = finished(tier)[1]
    assert not result.success
    loaded = result.successful_keys or ()
    for i, k in enumerate(keys):
        assert k not in loaded or view.row(8 + i) == contents[i]
    assert tier.counters["load_failed_rows"] == 8 - len(loaded) > 0


def test_restart(make: Make, view: View, node: penstock_testing.Node) -> None:
    """Another engine with the same configuration finds the rows after the node was started again."""
    contents = store(make(), view)
    node.stop()
    node.start()
    other = View()
    tier = make(of_view=other)
    assert find(tier, [key(0), key(7)]) == [True, True]
    tier.submit_load(job(1, [key(7)], [0], load=True))
    assert finished(tier)[1].success
    assert other.row(0) == contents[7]
    tier.shutdown()
    other.unmap()


# -- names


@pytest.mark.parametrize(
    "change", [{"tp_size": 2}, {"pp_size": 2}, {"pcp_size": 2}, {"rank": 1}, {"dtype": "bfloat16"}, {"kv_cache_layout": "HND"}]
)
def test_engines_of_other_bytes_share_nothing(make: Make, view: View, change: dict[str, Any]) -> None:
    """What decides the bytes of a row is a part of the name; with a name that the user gave it is an error, once."""
    tier = make()
    store(tier, view)
    other = make(spec(**change))
    assert other._name != tier._name
    assert find(other, [key(0)]) == [False]
    named = make(namespace="given")
    assert named._name == "given/tier"
    store(named, view)
    wrong = make(spec(**change), namespace="given")
    assert wrong._link.value is None
    assert "given/tier" in str(wrong._link.refused)
    assert find(wrong, [key(0)]) == [False]
    wrong.submit_load(job(1, [key(0)], [0], load=True))
    assert not finished(wrong)[1].success


def test_numbers_of_ranks_share_rows_in_the_canonical_format_only(make: Make) -> None:
    """vLLM calls its direct format independent of the parallelism. It is not: a row has all layers of one rank, then those of the next."""
    cases: list[tuple[dict[str, Any], bool]] = [({}, False), ({"canonical_layout": True, "kv_cache_layout": "LBHNC"}, True)]
    for change, same in cases:
        one, two = (make(spec(is_parallelism_agnostic=True, tp_size=ranks, **change))._name for ranks in (1, 2))
        assert (one == two) is same


def test_reset_begins_another_epoch(make: Make, view: View) -> None:
    """vLLM's reset of the connector, as after a weight update: jobs end first, and nothing of before is found."""
    tier = make()
    store(tier, view)
    tier.submit_store(job(1, [key(20)], [20]))
    tier.drain_jobs()
    assert [result.job_id for result in tier.get_finished_jobs()] == [1]
    assert find(tier, [key(0), key(20)], "after") == [False, False]
    tier.on_request_finished(context("after"))  # as long as it runs, its answers hold
    store(tier, view, 2)
    assert find(tier, [key(0), key(2)], "later") == [True, False]


def test_random_hashes_are_reported(make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    tier = make()
    tier.on_new_request(context())
    assert "PYTHONHASHSEED" not in caplog.text  # sha256 begins with the same seed in every process
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", "4f6e")
    tier = make()
    tier.on_new_request(context())
    tier.on_new_request(context("another"))
    assert len([m for m in caplog.messages if "PYTHONHASHSEED" in m]) == 1


# -- events


def test_events(make: Make, view: View) -> None:
    from vllm.v1.kv_offload.base import Locality, Medium

    tier = make(enable_kv_events=True, locality="REMOTE")
    store(tier, view, 3)
    [stored] = tier.take_events()
    assert (stored.keys, stored.removed, stored.medium, stored.locality) == (
        [key(i) for i in range(3)],
        False,
        Medium.STORAGE,
        Locality.REMOTE,
    )
    assert list(tier.take_events()) == []
    tier.submit_load(job(1, [key(0), key(9)], [10, 11], load=True))
    finished(tier)
    [removed] = tier.take_events()
    assert (removed.keys, removed.removed) == ([key(9)], True)
    silent = make(spec(events=False), enable_kv_events=True)
    store(silent, view, 1)
    assert list(silent.take_events()) == []


# -- end


def test_shutdown_drops_the_view(make: Make, view: View, node: penstock_testing.Node) -> None:
    """With transfers under way: when shutdown returns the memory can be unmapped, and each job was reported."""
    tier = make()
    store(tier, view)
    node.pause()
    tier.submit_load(job(1, [key(0)], [20], load=True))
    tier.submit_store(job(2, [key(30)], [0]))
    tier.shutdown()
    assert {result.job_id: result.success for result in tier.get_finished_jobs()} == {1: False, 2: False}
    assert list(tier.get_finished_jobs()) == []
    tier.shutdown()
    view.unmap()
    node.resume()


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"server": "x"}, "server"),
        ({"load_timeout": "soon"}, "load_timeout"),
        ({"locality": "NEAR"}, "Locality"),
        ({"servers": ""}, "servers"),
    ],
)
def test_bad_parameters(make: Make, params: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidError, match=error):
        make(**params)


# -- vLLM's manager


def test_under_the_manager(node: penstock_testing.Node, tmp_path: Any) -> None:
    """vLLM's own manager and shared region: a cascade to the tier, then a promotion in a fresh manager."""
    from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

    def manager(engine: str) -> tuple[Any, memoryview]:
        region = SharedOffloadRegion(
            engine_id=f"{os.getpid()}-{engine}", num_chunks=8, rank=None, kv_bytes_per_chunk=ROW, cpu_page_size=ROW
        )
        primary = CPUPrimaryTierOffloadingManager(num_chunks=8, mmap_region=region)
        config = {"type": "PenstockTier", "module_path": "penstock.vllm.tier", "servers": node.address}
        tier = SecondaryTierFactory.create_secondary_tier(config, primary.get_kv_memoryview(), spec())
        return TieringOffloadingManager(primary, [tier]), primary.get_kv_memoryview()

    end = ScheduleEndContext((), ())
    keys = [key(i) for i in range(4)]
    first, memory = manager("first")
    request = context()
    first.on_new_request(request)
    prepared = first.prepare_store(keys, request)
    for i, number in enumerate(prepared.store_spec.chunk_ids):
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + int(number) * ROW, i + 1, ROW)
    first.complete_store(keys, request)
    first.on_request_finished(request)
    while first.has_pending_work():
        first.on_schedule_end(end)
        os.sched_yield()
    first.shutdown()

    second, memory = manager("second")
    request = context("another")
    second.on_new_request(request)
    limit = time.monotonic() + TIMEOUT
    while any(answer is not LookupResult.HIT for answer in [second.lookup(k, request) for k in keys]):
        second.on_schedule_end(end)
        os.sched_yield()
        assert time.monotonic() < limit
    for i, number in enumerate(second.prepare_load(keys, request).chunk_ids):
        assert memory[int(number), 0] == memory[int(number), ROW - 1] == i + 1
    second.complete_load(keys, request)
    # A key that no tier has is a miss after one round.
    while (answer := second.lookup(key(99), request)) is LookupResult.RETRY:
        second.on_schedule_end(end)
        os.sched_yield()
    assert answer is LookupResult.MISS
    second.on_request_finished(request)
    second.shutdown()

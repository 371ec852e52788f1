"""The engines' own tests of the interfaces that the adapters implement, run with the adapters.

    UPSTREAM=SOURCE .ci/test-engines vllm|lmcache|sglang [pytest arguments]

SOURCE is the directory of the unpacked source archive of the installed release, and for SGLang the installed package.

Each suite was written for one of the engine's own classes. Before the tests are imported, that class is replaced by a subclass of
the adapter with the same constructor. No assertion is changed. Tests of what only the replaced class has are skipped, each with the reason.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from harness.model import make_llama

from penstock import Pointers, testing

os.environ.update(SGLANG_USE_CPU_ENGINE="1", LMCACHE_TRACK_USAGE="false")

_numbers = itertools.count(1)
_open: list[Callable[[], None]] = []
"""Close what the current test has opened."""


def _name() -> str:
    """Return a namespace's name that no other test has."""
    return f"upstream/{next(_numbers)}"


# -- vLLM


def _vllm() -> None:
    """Replace vLLM's tier of files, its tier in memory, and its example of a connector."""
    from types import SimpleNamespace
    from unittest.mock import MagicMock

    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector
    from vllm.v1.kv_offload.base import LookupResult, OffloadingKVEventsConfig, ScheduleEndContext
    from vllm.v1.kv_offload.config import OffloadingCacheConfig, OffloadingConfig, OffloadingModelConfig, OffloadingParallelConfig
    from vllm.v1.kv_offload.tiering.example import manager as example
    from vllm.v1.kv_offload.tiering.fs import manager as files

    from penstock.vllm import PenstockConnector, PenstockTier
    from penstock.vllm._plan import Plan
    from penstock.vllm.connector import Metadata

    class Tier(PenstockTier):
        """In place of FileSystemTierManager. Tiers with the same root_dir share a namespace."""

        def __init__(self, *args: Any, root_dir: str, n_read_threads: int = 0, n_write_threads: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, namespace=f"upstream{root_dir}", **kwargs)
            self._lookup_manager = self._lookups
            self.file_mapper = Files(self, Path(root_dir))
            self.events = self._events
            _open.append(self.shutdown)

        def drain_jobs(self) -> None:
            """Wait, as the tests expect. PenstockTier also begins another epoch, since vLLM calls it in a reset only."""
            _wait(self)

        def submit_load(self, job_metadata: Any) -> None:
            """A test damages blocks by writing to their files. Then the node loses them."""
            link = self._link.value
            assert link is not None
            for key in job_metadata.keys:
                path = self.file_mapper.path(key)
                if path.exists() and path.stat().st_size:
                    link.ns.delete([key])
                    path.unlink()
            super().submit_load(job_metadata)

        @property
        def _store_job_keys(self) -> dict[Any, Any]:
            return {job: transfer.keys for job, transfer in self._jobs.items() if not transfer.load}

    class Files:
        """Names of files that exist exactly if the node has the key."""

        def __init__(self, tier: PenstockTier, root: Path) -> None:
            self._tier = tier
            self.base_path = str(root / tier._name.replace("/", "_"))

        def path(self, key: bytes) -> Path:
            return Path(self.base_path) / key.hex()

        def get_file_name(self, key: bytes) -> str:
            link = self._tier._link.value
            assert link is not None
            path = self.path(key)
            path.parent.mkdir(exist_ok=True)
            if link.ns.exists([key]).done()[0]:
                path.touch()
            else:
                path.unlink(missing_ok=True)
            return str(path)

    class Immediate(PenstockTier):
        """In place of ExampleSecondaryTierManager, whose calls end when they return. A MagicMock as view or spec becomes a real one."""

        def __init__(self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, custom_param: int = 0, **kwargs: Any) -> None:
            if isinstance(primary_kv_view, MagicMock):
                import numpy

                self._memory = numpy.zeros((4, 16), dtype=numpy.int8)
                primary_kv_view = memoryview(self._memory)
            if isinstance(offloading_spec, MagicMock):
                offloading_spec = spec
            super().__init__(offloading_spec, primary_kv_view, tier_type, namespace=_name(), **kwargs)
            self.chunks = Chunks(self)
            self._keys: list[bytes] = []
            _open.append(self.shutdown)

        def lookup(self, key: bytes, req_context: Any) -> Any:
            while (answer := super().lookup(key, req_context)) is LookupResult.RETRY:
                self.on_schedule_end(ScheduleEndContext((), ()))
                os.sched_yield()
            return answer

        def _submit(self, job: Any, *, load: bool) -> None:
            super()._submit(job, load=load)
            _wait(self)

        @property
        def completed_jobs(self) -> list[Any]:
            finished: list[Any] = self._finished
            return finished

        def submit_store(self, job_metadata: Any) -> None:
            self._keys.extend(job_metadata.keys)
            super().submit_store(job_metadata)

        def get_num_chunks(self) -> int:
            return sum(self.find(self._keys))

    class Chunks:
        """A key that is set is stored, with the first row of the view."""

        def __init__(self, tier: PenstockTier) -> None:
            self._tier = tier

        def __setitem__(self, key: bytes, value: bool) -> None:
            link = self._tier._link.value
            assert link is not None
            link.ns.put([key], Pointers([self._tier._base], [self._tier._row]))
            self._tier._lookups.cleanup("test")  # a request's answers are kept until it has finished

    class Connector(PenstockConnector):
        """In place of ExampleConnector, without the options of the tests."""

        def __init__(self, config: Any, *args: Any) -> None:
            config.kv_transfer_config.kv_connector_extra_config.pop("name", None)
            config.kv_transfer_config.kv_connector_extra_config.pop("shared_storage_path", None)
            super().__init__(config, *args)

    def _wait(tier: PenstockTier) -> None:
        for job in list(tier._jobs):
            job.wait()
            tier._collect(job)

    parallel = OffloadingParallelConfig(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0, data_parallel_size=1,
        data_parallel_rank_local=None, is_parallelism_agnostic=False,
    )  # fmt: skip
    spec = SimpleNamespace(
        config=OffloadingConfig(
            groups=(), worker_kv_bytes_per_block=0, enable_kv_cache_events=False, extra_config={}, engine_id="test",
            model=OffloadingModelConfig(name="test", dtype="float32"), cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=parallel,
        ),
        blocks_per_chunk=1, kv_events_config=OffloadingKVEventsConfig(False, False),
    )  # fmt: skip
    files.FileSystemTierManager = Tier
    example.ExampleSecondaryTierManager = Immediate
    example_connector.ExampleConnector = Connector
    example_connector.ExampleConnectorMetadata = lambda: Metadata(Plan())


# -- LMCache


def _lmcache() -> None:
    """Replace LMCache's L2 in memory by its wrapper of native connectors over PenstockL2."""
    from lmcache.v1.distributed.l2_adapters import mock_l2_adapter
    from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter, _object_key_to_string

    class Adapter(NativeConnectorL2Adapter):
        def __init__(self, config: Any) -> None:
            super().__init__(_l2()(), max_capacity_gb=config.max_size_gb, type_name="mock")
            # A native connector gets addresses, and LMCache's L1 keeps the memory. Some tests keep nothing.
            self._objects: list[Any] = []

        def submit_store_task(self, keys: Any, objects: Any) -> Any:
            self._objects.append(objects)
            return super().submit_store_task(keys, objects)

        def submit_load_task(self, keys: Any, objects: Any) -> Any:
            self._objects.append(objects)
            return super().submit_load_task(keys, objects)

        def debug_has_key(self, key: Any) -> bool:
            return key in self._key_sizes and self._client_has(_object_key_to_string(key))

        def debug_get_stored_object_count(self) -> int:
            return sum(self.debug_has_key(key) for key in list(self._key_sizes))

        def debug_get_locked_key_count(self) -> int:
            return sum(count > 0 for count in self._locked_keys.values())

        def _client_has(self, key: str) -> bool:
            client = self._client
            return any(ns.exists([key]).done()[0] for ns in list(client._namespaces.values()))

    mock_l2_adapter.MockL2Adapter = Adapter


def _l2() -> type:
    from penstock.lmcache import PenstockL2

    class Client(PenstockL2):
        def __init__(self) -> None:
            super().__init__(namespace=_name())

    return Client


def _native_connector(module: types.ModuleType) -> None:
    """Replace the client that this module defines, also as the base of its subclass that records lengths."""
    client = _l2()
    module.MockNativeConnector = client  # type: ignore[attr-defined]
    module.RecordingNativeConnector.__bases__ = (client,)


# -- SGLang


def _sglang() -> None:
    """Provide the modules of other storage backends that the tests import, with PenstockHiCache in them."""
    sys.path.insert(0, str(Path(__file__).parent / "sglang_cpu"))
    import sgl_kernel  # noqa: F401
    from sglang.srt.mem_cache.pool_host import base

    from penstock.sglang import PenstockHiCache

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # the pools are small

    class Storage(PenstockHiCache):
        def __init__(self, config: Any, pool: Any = None) -> None:
            config.extra_config = {"namespace": _name(), "interface_v1": 1}
            super().__init__(config)
            _open.append(self.close)
            if pool is not None:
                self.register_mem_pool_host(pool)

        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            if not hasattr(mem_pool_host, "available_size"):
                mem_pool_host.available_size = lambda: 0  # nothing to write the pattern to
            super().register_mem_pool_host(mem_pool_host)

    def module(name: str, **names: Any) -> None:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(names)

    module("sglang.srt.mem_cache.storage.mooncake_store.mooncake_store", MooncakeStore=Storage)


_FILES = "injects faults into vLLM's reads and writes of files"
_OWN = "tests a part of vLLM that the tier does not use"
_MEDIUM = "expects a tier with the medium CPU"

# For each engine its suites, and for each suite the tests that do not apply, with the reason. vLLM's and LMCache's paths are in their
# source archives, SGLang's in its package.
SUITES: dict[str, dict[str, dict[str, str]]] = {
    "vllm": {
        "tests/v1/kv_offload/tiering/test_fs_tier.py": {
            "test_invalid_path_raises_at_construction": "a tier without a node starts, and the engine serves without it",
            "test_shutdown_discards_pending_tasks": _OWN,
            "test_wait_idle_*": _OWN,
            "test_batch_lookup_c_extension": _OWN,
            "test_store_load_roundtrip_without_o_direct": _OWN,
            "test_batched_load_first_block_fails_*": "expects that a load ends at its first failed block; PenstockTier loads the others",
            "test_transient_load_failure_*": _FILES,
            "test_mixed_job_results_*": _FILES,
            "test_partially_failed_store_*": _FILES,
        },
        "tests/v1/kv_offload/tiering/test_tiering_offloading.py": {
            "test_tier_filter_skips_filtered_secondary[[]non_matching_medium]": _MEDIUM,
            "test_tier_filter_allows_matching_secondary[[]explicit_cpu]": _MEDIUM,
        },
        "tests/v1/kv_offload/tiering/test_factory.py": {"test_pre_registered_*": _MEDIUM, "test_register_new_tier_type*": _MEDIUM},
        "tests/v1/kv_connector/unit/test_kv_connector_lifecycle.py": {},
    },
    "lmcache": {
        "tests/v1/distributed/test_native_connector_l2_adapter.py": {},
        "tests/v1/distributed/test_mock_l2_adapter.py": {
            "test_store_completion_is_delayed_*": "expects the bandwidth that the replaced class simulates",
            "test_listener_*load*": "LMCache's wrapper signals the descriptor before it calls listeners, for which the test does not wait",
        },
        "tests/v1/distributed/test_fault_inject_l2_adapter.py": {},
        "tests/v1/distributed/test_store_controller.py": {},
        "tests/v1/distributed/test_prefetch_controller.py": {},
        "tests/v1/distributed/test_distributed_storage_manager.py": {},
    },
    "sglang": {
        "srt/mem_cache/storage/mooncake_store/test_mooncake_store.py": {
            "test_single_operation": "gives addresses to set and get, where SGLang gives tensors",
            "test_batch_operation[[]config3]": "expects that rank 3 stores latent KV, of which SGLang stores rank 0's only",
        },
    },
}

REPLACE = {"vllm": _vllm, "lmcache": _lmcache, "sglang": _sglang}


class Plugin:
    """Skips tests that do not apply, and replaces the engine's own classes in the other tests."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            path = next(path for path in SUITES[self._engine] if item.path.as_posix().endswith(path))
            for pattern, reason in SUITES[self._engine][path].items():
                if fnmatch(item.name, pattern):
                    item.add_marker(pytest.mark.skip(reason=reason))
            if path.endswith("test_native_connector_l2_adapter.py") and isinstance(item, pytest.Function):
                _native_connector(item.module)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """SGLang's scripts pass a configuration for each kind of model and rank."""
        if self._engine == "sglang" and "config" in metafunc.fixturenames:
            make = metafunc.module.make_hicache_storage_config
            ranks = [(False, 0, 1), (True, 0, 1), (False, 1, 4), (True, 3, 8)]
            metafunc.parametrize("config", [make(is_mla_model=mla, tp_rank=rank, tp_size=size) for mla, rank, size in ranks])

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        while _open:
            _open.pop()()


def main(engine: str, source: Path, args: Sequence[str]) -> int:
    """Run the suites of an engine against one node. Return pytest's exit code."""
    with ExitStack() as stack:
        node = stack.enter_context(testing.node())
        os.environ["PENSTOCK_SERVERS"] = node.address
        stage = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-upstream-")))
        if engine != "sglang":
            # The source also has the engine's package, which lacks the compiled parts. Only its tests may be found.
            (stage / "tests").symlink_to(source / "tests")
        if engine == "vllm":
            make_llama(stage / "facebook" / "opt-125m")  # the name of a model that the tests take from a hub
        os.chdir(stage)
        REPLACE[engine]()
        paths = [str(stage / path if engine != "sglang" else source / path) for path in SUITES[engine]]
        top = stage / "tests" / "v1" if engine == "vllm" else stage  # vLLM's conftest.py above that needs packages for its other tests
        own = ["-q", "-rs", "-W", "ignore", "-p", "no:cacheprovider", f"--rootdir={stage}", f"--confcutdir={top}"]
        return int(pytest.main([*own, *paths, *args], plugins=[Plugin(engine)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3:]))

"""LMCache's L2 adapters on a file system: "fs" in Python and "fs_native" in C++. The caller names one."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

# LMCache reads these when it is imported.
os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="ERROR")

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry, ensure_adapter_loaded
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd
from worker import Area, Directory, main


class LMCache(Directory):
    def __init__(self, source: Area, target: Area, options: dict[str, Any]) -> None:
        super().__init__(source, target, options)
        kind = options["adapter"]
        ensure_adapter_loaded(kind)
        config = get_l2_adapter_config_class(kind).from_dict({"type": kind, "base_path": str(self.directory)})
        self.adapter = create_l2_adapter_from_registry(config)
        self.tensors = [torch.frombuffer(area.map, dtype=torch.uint8) for area in (source, target)]
        self.stores = Completions(self.adapter.get_store_event_fd(), self.adapter.pop_completed_store_tasks)
        self.loads = Completions(self.adapter.get_load_event_fd(), None)

    def put(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        objects = [self.object(0, offset, value_bytes) for offset in offsets]
        done = self.stores.wait(lambda: self.adapter.submit_store_task([_key(key) for key in keys], objects))
        if not done.is_successful():
            raise RuntimeError("a store task failed")

    def get(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        objects = [self.object(1, offset, value_bytes) for offset in offsets]
        found = self.loads.wait(lambda: self.adapter.submit_load_task([_key(key) for key in keys], objects), self.adapter.query_load_result)
        if found.popcount() != len(keys):
            raise RuntimeError(f"{found.popcount()} of {len(keys)} values were loaded")

    def object(self, area: int, offset: int, value_bytes: int) -> TensorMemoryObj:
        data = self.tensors[area][offset : offset + value_bytes]
        shape = torch.Size([value_bytes])
        meta = MemoryObjMetadata(
            shape, torch.uint8, offset, value_bytes, 1, fmt=MemoryFormat.BINARY_BUFFER, shapes=[shape], dtypes=[torch.uint8]
        )
        return TensorMemoryObj(data, meta, None)

    def key_of(self, name: str) -> str:
        # MODEL@RANK@GROUP@HASH.data, where the hash is our key in hexadecimal digits.
        return bytes.fromhex(name.removesuffix(".data").split("@")[3]).decode()


def _key(key: str) -> ObjectKey:
    return ObjectKey(chunk_hash=key.encode(), model_name="bench", kv_rank=0)


class Completions:
    """Waits for tasks of several threads on one event descriptor, as LMCache's controllers do in one thread."""

    def __init__(self, fd: int, pop: Callable[[], dict[int, Any]] | None) -> None:
        self.fd = fd
        self.pop = pop
        self.results: dict[int, Any] = {}
        self.changed = threading.Condition()
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        while True:
            poll.poll()
            consume_fd(self.fd)
            with self.changed:
                if self.pop is not None:
                    self.results.update(self.pop())
                self.changed.notify_all()

    def wait(self, submit: Callable[[], int], query: Callable[[int], Any] | None = None) -> Any:
        task = submit()
        with self.changed:
            while True:
                result = self.results.pop(task, None) if query is None else query(task)
                if result is not None:
                    return result
                self.changed.wait()


if __name__ == "__main__":
    main(LMCache, "lmcache")

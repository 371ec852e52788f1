"""SGLang's HiCacheFile, which keeps a file for each page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

# SGLang decides when it is imported whether it runs on a CPU.
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from worker import Area, Directory, main

_SUFFIX = "_bench_0_1"


class HiCache(Directory):
    def __init__(self, source: Area, target: Area, options: dict[str, Any]) -> None:
        super().__init__(source, target, options)
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False, enable_storage_metrics=False,
            is_page_first_layout=True, model_name="bench",
        )  # fmt: skip
        self.store = HiCacheFile(config, str(self.directory))
        self.tensors = [torch.frombuffer(area.map, dtype=torch.uint8) for area in (source, target)]

    def pages(self, area: int, offsets: Sequence[int], value_bytes: int) -> list[torch.Tensor]:
        return [self.tensors[area][offset : offset + value_bytes] for offset in offsets]

    def put(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        if not self.store.batch_set(list(keys), self.pages(0, offsets, value_bytes)):
            raise RuntimeError("a page was not stored")

    def get(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        got = self.store.batch_get(list(keys), self.pages(1, offsets, value_bytes))
        if any(page is None for page in got):
            raise RuntimeError("a page is absent")

    def key_of(self, name: str) -> str:
        return name.removesuffix(".bin").removesuffix(_SUFFIX)


if __name__ == "__main__":
    main(HiCache, "sglang")

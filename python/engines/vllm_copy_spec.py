"""vLLM's TieringOffloadingSpec for the CPU engine, whose copy worker is for GPUs only.

Nothing but that worker is replaced: blocks are copied between the engine's KV cache and the shared region when they are submitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):  # type: ignore[misc]
    def __init__(self, caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._results: list[Any] = []
        self._groups = caches.group_data_refs
        # For each tensor, its pages in the engine's KV cache and in the rows of the region.
        self._pages = [
            (
                cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes),
                region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk),
            )
            for cache in caches.tensors
        ]

    def _places(self, blocks: Any, chunks: Any) -> Iterator[tuple[int, int, int, int]]:
        """Yield group, block of the KV cache, chunk, and place of the block in the chunk."""
        block_ids, chunk_ids = iter(blocks.block_ids), iter(chunks.block_ids)
        for group, (count, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            chunk = -1
            for index in range(first, first + count):
                place = index % self._blocks_per_chunk
                if index == first or place == 0:
                    chunk = int(next(chunk_ids))
                yield group, int(next(block_ids)), chunk, place

    def _copy(self, job: int, blocks: Any, chunks: Any, *, store: bool) -> bool:
        moved = 0
        for group, block, chunk, place in self._places(blocks, chunks):
            for reference in self._groups[group]:
                pages, rows = self._pages[reference.tensor_idx]
                size = pages.shape[1]
                engine, host = pages[block], rows[chunk, place * size : (place + 1) * size]
                (host if store else engine).copy_(engine if store else host)
                moved += size
        self._results.append(TransferResult(job, True, moved, 0.0))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[Any]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Every copy has ended when its submit returned."""

    def shutdown(self) -> None:
        self._pages = []
        if self._region is not None:
            self._region.cleanup()
            self._region = None


class CopySpec(TieringOffloadingSpec):  # type: ignore[misc]
    _worker: Any = None

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker

"""Stands in for SGLang's compiled CPU kernels, whose build is on no package index. For tests alone.

SGLang imports this package first in each of its processes. A small Llama runs on torch's own operators and calls no
kernel; one that is called raises. HiCache on a machine without a GPU needs what follows: registering host memory with
CUDA does nothing, memory is not pinned, and the copies between device pool and host pool are written in torch.
Everything else is SGLang's own: the tree of prefixes, the host pools, the controller with its storage threads.
"""

import builtins
from typing import Any

import torch


class _Cudart:
    def cudaHostRegister(self, *_: Any) -> int:
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:
        return 0


def _unpinned(function: Any) -> Any:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return make


def _device_to_host(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    for i in range(0, src_indices.numel(), page_size):
        token, page = int(src_indices[i]), int(dst_indices[i]) // page_size
        for side, host in enumerate(dst_ptrs):
            for layer in range(layers):
                rows = src_ptrs[side * layers + layer][token : token + page_size]
                host[page, layer].copy_(rows.reshape(host[page, layer].shape))


def _host_to_device(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int) -> None:
    for i in range(0, src_indices.numel(), page_size):
        page, token = int(src_indices[i]) // page_size, int(dst_indices[i])
        for host, device in zip(src_ptrs, dst_ptrs, strict=True):
            rows = device[token : token + page_size]
            rows.copy_(host[page, layer_id].reshape(rows.shape))


torch.cuda.cudart = _Cudart
torch.zeros, torch.empty = _unpinned(torch.zeros), _unpinned(torch.empty)
# SGLang binds these two names only where it has a GPU of some kind.
builtins.transfer_kv_all_layer_direct_lf_pf = _device_to_host  # type: ignore[attr-defined]
builtins.transfer_kv_per_layer_direct_pf_lf = _host_to_device  # type: ignore[attr-defined]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on this CPU")

    return missing

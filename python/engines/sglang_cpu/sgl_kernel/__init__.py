"""Stands in for SGLang's compiled CPU kernels, whose build is on no package index. For tests alone.

SGLang imports this package first in each of its processes. A small Llama runs on torch's own operators and calls no
kernel; one that is called raises. HiCache on a machine without a GPU needs what follows: registering host memory with
CUDA does nothing, memory is not pinned, and the copies between device pool and host pool are torch's or memmove.
Everything else is SGLang's own: the tree of prefixes, the host pools, the controller with its storage threads.
"""

import builtins
import ctypes
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


def _layers_to_layers(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def _layers_to_rows(src: Any, dst: Any, src_indices: Any, dst_indices: Any, item_size: int, dst_layout_dim: int) -> None:
    """Copy items of item_size bytes from layers, given by their addresses, to rows of dst_layout_dim bytes that have all layers."""
    for layer, address in enumerate(src.tolist()):
        for item, row in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
            ctypes.memmove(dst.data_ptr() + row * dst_layout_dim + layer * item_size, address + item * item_size, item_size)


def _mha_layers_to_rows(src_k_layers: Any, dst_k: Any, src_v_layers: Any, dst_v: Any, *, num_layers: int, **more: Any) -> None:
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        _layers_to_rows(src[:num_layers], dst, **more)


def _mla_layers_to_rows(src_layers: Any, dst: Any, *, num_layers: int, **more: Any) -> None:
    _layers_to_rows(src_layers[:num_layers], dst, **more)


def _rows_to_layer(src: Any, dst: Any, src_indices: Any, dst_indices: Any, layer_id: int, item_size: int, src_layout_dim: int) -> None:
    """Copy one layer of rows that have all layers."""
    for row, item in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
        ctypes.memmove(dst.data_ptr() + item * item_size, src.data_ptr() + row * src_layout_dim + layer_id * item_size, item_size)


def _mha_rows_to_layer(src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, **more: Any) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        _rows_to_layer(src, dst, **more)


torch.cuda.cudart = _Cudart
torch.zeros, torch.empty = _unpinned(torch.zeros), _unpinned(torch.empty)
# SGLang binds these names only where it has a GPU of some kind.
builtins.transfer_kv_all_layer_direct_lf_pf = _device_to_host  # type: ignore[attr-defined]
builtins.transfer_kv_per_layer_direct_pf_lf = _host_to_device  # type: ignore[attr-defined]
builtins.transfer_kv_direct = _layers_to_layers  # type: ignore[attr-defined]
builtins.transfer_kv_all_layer_lf_pf = _mha_layers_to_rows  # type: ignore[attr-defined]
builtins.transfer_kv_per_layer_pf_lf = _mha_rows_to_layer  # type: ignore[attr-defined]
builtins.transfer_kv_all_layer_mla_lf_pf = _mla_layers_to_rows  # type: ignore[attr-defined]
builtins.transfer_kv_per_layer_mla_pf_lf = _rows_to_layer  # type: ignore[attr-defined]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on this CPU")

    return missing

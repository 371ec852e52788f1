"""Where the engine keeps a block: an address for each layer."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InvalidError

__all__ = ["Definition", "Layer", "Layout", "read_layout"]


@dataclass(frozen=True)
class Definition:
    """The namespace of one rank. The workers send it to the scheduler."""

    name: str
    tenant: str
    block_tokens: int
    layers: int
    token_bytes: int
    dtype: str
    layout: str
    rank: int


@dataclass(frozen=True)
class Layer:
    """Block b of a layer is the page bytes from address + b × stride on."""

    name: str
    address: int
    stride: int
    page: int


@dataclass
class Layout:
    layers: list[Layer]
    blocks: int
    block_tokens: int
    memory: list[tuple[int, int, Any]]
    """Address and length of each allocation, and what keeps it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What decides the bytes of a page, as JSON's types."""

    def fragments(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return addresses and lengths of the blocks: of each all layers in order."""
        addresses = [layer.address + block * layer.stride for block in blocks for layer in self.layers]
        return addresses, [layer.page for layer in self.layers] * len(blocks)


def read_layout(tensors: Mapping[str, Any], config: Any) -> Layout:
    """Return the layout of the KV cache that the engine registers.

    Raises InvalidError, with the name of the layer or group, for everything that would not be stored whole: a second pool, a
    layer that no group has, a shape whose first dimension is not the block, memory that is not the host's.
    """
    if len(config.kv_cache_groups) != 1:
        names = "; ".join(f"{type(g.kv_cache_spec).__name__} with {g.layer_names[0]}" for g in config.kv_cache_groups)
        raise InvalidError(f"the model has {len(config.kv_cache_groups)} KV cache groups ({names}); the connector stores models with one")
    group = config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    if type(spec).__name__ not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise InvalidError(f"layer {group.layer_names[0]} has a {type(spec).__name__}; the connector stores full attention and MLA")
    if missing := sorted(set(group.layer_names) - set(tensors)):
        raise InvalidError(f"layer {missing[0]} has no KV cache that was registered")
    layers: list[Layer] = []
    memory: dict[int, tuple[int, int, Any]] = {}
    facts: list[Any] = []
    for name, tensor in tensors.items():
        layer = _layer(name, tensor, config.num_blocks)
        if name not in group.layer_names:
            if any(layer.address == known.address for known in layers):
                continue  # it shares the KV cache of a layer that is stored
            raise InvalidError(f"layer {name} has a KV cache of its own and is in no KV cache group; it would not be stored")
        if layers and layer.page != layers[0].page:
            raise InvalidError(f"layer {name} has {layer.page} bytes a block, and {layers[0].name} has {layers[0].page}; want the same")
        if layer.page % spec.block_size:
            raise InvalidError(f"layer {name}: {layer.page} bytes a block of {spec.block_size} tokens; want a whole number for each token")
        storage = tensor.untyped_storage()
        memory.setdefault(storage.data_ptr(), (storage.data_ptr(), storage.nbytes(), tensor))
        facts.append([name, list(tensor.shape[1:]), list(tensor.stride()[1:]), str(tensor.dtype)])
        layers.append(layer)
    layout = Layout(layers, config.num_blocks, spec.block_size, list(memory.values()), {"layers": facts, "spec": type(spec).__name__})
    _check(layout, tensors)
    return layout


def _layer(name: str, tensor: Any, blocks: int) -> Layer:
    if not hasattr(tensor, "data_ptr"):
        raise InvalidError(f"layer {name} registers a {type(tensor).__name__} (recurrent state?); the connector stores tensors")
    if tensor.device.type != "cpu":
        raise InvalidError(f"layer {name} is on device {tensor.device}; the connector moves host memory: use PenstockTier")
    if not tensor.shape or tensor.shape[0] != blocks or not tensor[0].is_contiguous():
        raise InvalidError(
            f"layer {name}: shape {list(tensor.shape)}, strides {list(tensor.stride())}; want {blocks} blocks as the first dimension,"
            " each contiguous"
        )
    page = tensor[0].numel() * tensor.element_size()
    return Layer(name, tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), page)


def _check(layout: Layout, tensors: Mapping[str, Any]) -> None:
    """Write a pattern through the connector's addresses and read it through the engine's tensors. Then restore the blocks' contents."""
    import torch

    for block in {layout.blocks - 1, layout.blocks // 2}:
        addresses, lengths = layout.fragments([block])
        before = [ctypes.string_at(a, n) for a, n in zip(addresses, lengths, strict=True)]
        patterns = [bytes((i * 37 + k * 11) % 251 for k in range(251)) * (n // 251 + 1) for i, n in enumerate(lengths)]
        try:
            for address, n, pattern in zip(addresses, lengths, patterns, strict=True):
                ctypes.memmove(address, pattern, n)
            for layer, n, pattern in zip(layout.layers, lengths, patterns, strict=True):
                seen = tensors[layer.name][block].reshape(-1).view(torch.uint8).numpy().tobytes()
                if seen != pattern[:n]:
                    raise InvalidError(
                        f"layer {layer.name}: block {block} is not at {layer.address:#x} + {block} × {layer.stride}, where the connector"
                        " expects it: this version of the engine has another layout"
                    )
        finally:
            for address, content in zip(addresses, before, strict=True):
                ctypes.memmove(address, content, len(content))

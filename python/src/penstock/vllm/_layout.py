"""The location of a block in the engine's memory: an address for each layer, or for each fragment of a layer.

engine     KV cache groups     full         window       window
           layers              0            1            2          they may share memory: a block id belongs to one group
Penstock   layer groups        0: layer 0   1: layers 1 and 2

Where the bytes of a block in a layer are not in one piece, each contiguous piece is a fragment, and a layer of the namespace. The
fragments of all layers have the same distance from a block to the next:

engine     layer 0, heads apart   │head 0: b0 b1 b2 …│head 1: b0 b1 b2 …│    vLLM's LHBNC; also K and V apart
Penstock   layers 0 and 1         a block: head 0 of b1, head 1 of b1
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock._core import Group
from penstock._memory import Pointers, copy_device
from penstock.errors import InvalidError
from penstock.vllm._plan import NULL, Blocks

__all__ = [
    "APART",
    "LATENT",
    "Definition",
    "Layer",
    "LayerGroup",
    "Layout",
    "Part",
    "read_layout",
    "rows_apart",
    "split",
    "wait_for_engine",
]

LATENT = "MLAAttentionSpec"
"""The specification of layers whose KV is latent: the same in all ranks, without heads."""


@dataclass(frozen=True)
class Definition:
    """The namespace of one rank. The workers send it to the scheduler."""

    name: str
    tenant: str
    block_tokens: int
    groups: tuple[Group, ...]
    dtype: str
    layout: str
    rank: int
    state_pools: tuple[int, ...] = field(default=(), kw_only=True)
    """The engine's KV cache groups of layers with recurrent state."""


@dataclass(frozen=True)
class Layer:
    """A layer, or a fragment of one. Block b is the page bytes from address + b × stride on. pool is the engine's KV cache group of the
    layer."""

    name: str
    address: int
    stride: int
    page: int
    pool: int
    fragment: int = 0
    """The number of the fragment in the engine's layer."""


@dataclass
class LayerGroup:
    """Layers that read the same tokens, of one KV cache group of the engine or of several: a layer group of the namespace."""

    window: int
    """Number of tokens before a token that its layers read; 0: all."""
    layers: list[Layer]
    """All fragments of a layer, then those of the next one."""
    state: bool = False
    """Whether the layers have recurrent state. The block of a prefix's end then holds the state after all tokens of the prefix."""
    fragments: int = 1
    """Fragments of each layer."""
    rows: int = 0
    """The rows of the state, one after the other, each with all channels of the rank. 0: the state is no matrix of channels."""

    @property
    def pools(self) -> list[int]:
        return sorted({layer.pool for layer in self.layers})


@dataclass(frozen=True)
class Part:
    """Consecutive layers of a layer group, which one read loads, with all their fragments."""

    group: int
    first: int
    layers: tuple[Layer, ...]

    @property
    def range(self) -> tuple[int, int]:
        return self.first, len(self.layers)


@dataclass
class Layout:
    groups: list[LayerGroup]
    """The group that reads all tokens is the first."""
    pools: int
    """The number of the engine's KV cache groups. They share one pool of block ids."""
    blocks: int
    block_tokens: int
    memory: list[tuple[int, int, Any]]
    """Address and length of each allocation, and the object that keeps it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The facts that determine the bytes of a page, as JSON's types."""
    cuda: int | None = None
    """The CUDA device that has the KV cache. None: host memory."""

    @property
    def state_pools(self) -> list[int]:
        return sorted({pool for group in self.groups if group.state for pool in group.pools})

    @property
    def block_bytes(self) -> int:
        """The bytes of one block in all layers."""
        return sum(layer.page for group in self.groups for layer in group.layers)

    def in_order(self) -> tuple[list[Layer], list[int]]:
        """Return all layers in the order in which the model computes them, each with its index in a value of the namespace, which has
        the layers of one group after the other."""
        placed = sorted(enumerate(layer for group in self.groups for layer in group.layers), key=lambda one: _place(one[1].name))
        return [layer for _, layer in placed], [index for index, _ in placed]

    def parts(self, layers: int) -> list[Part]:
        """Return all layers in parts of at most ``layers``, in the order in which the model computes them."""
        parts = [
            Part(g, first, tuple(group.layers[first : first + layers * group.fragments]))
            for g, group in enumerate(self.groups)
            for first in range(0, len(group.layers), layers * group.fragments)
        ]
        return sorted(parts, key=lambda part: min(_place(layer.name) for layer in part.layers))

    def pieces(self, first: int, blocks: Blocks, part: Part | None = None) -> tuple[list[tuple[int, int]], Pointers]:
        """Return the pieces of the blocks from first on, and their locations in the engine's memory.

        A piece is (block of the prompt, layer group). The engine has no block for a piece that it does not need: one outside the
        group's window, or recurrent state before the end of the blocks. With a part the result has only the layers of that part.
        """
        pieces: list[tuple[int, int]] = []
        addresses: list[int] = []
        lengths: list[int] = []
        counts: list[int] = []
        chosen = [(g, group.pools, group.layers) for g, group in enumerate(self.groups)]
        if part is not None:
            chosen = [(part.group, self.groups[part.group].pools, list(part.layers))]
        for i in range(len(blocks[0])):
            for g, pools, layers in chosen:
                if any(blocks[pool][i] == NULL for pool in pools):
                    continue
                pieces.append((first + i, g))
                addresses += [layer.address + blocks[layer.pool][i] * layer.stride for layer in layers]
                lengths += [layer.page for layer in layers]
                counts.append(len(layers))
        return pieces, Pointers(addresses, lengths, fragments=counts, cuda=self.cuda)


def rows_apart(layout: Layout) -> Layout:
    """Return the layout with each row of recurrent state as a fragment, for a KV cache in several shards.

    A shard has some channels of each row. On a rank with several shards these lie apart, so they do on each rank.
    """
    facts = {fact[0]: fact for fact in layout.facts["layers"]}

    def apart(group: LayerGroup) -> LayerGroup:
        if not group.rows:
            return group
        row = group.layers[0].page // group.rows
        for layer in group.layers:
            name, reads, _, _, dtype = facts[layer.name]
            facts[name] = [name, reads, [group.rows, row], [APART, 1], dtype]
        rows = [replace(one, address=one.address + i * row, page=row, fragment=i) for one in group.layers for i in range(group.rows)]
        return replace(group, layers=rows, fragments=group.rows)

    groups = [apart(group) for group in layout.groups]
    return replace(layout, groups=groups, facts={**layout.facts, "layers": list(facts.values())})


def split(layout: Layout, shards: int, heads: int) -> list[Layout]:
    """Return the layout of each shard of a KV cache whose pages are cut by KV heads, ``heads`` on this rank, and whose states are cut by
    channels, after ``rows_apart``.

    A shard's facts are those of a rank that has only its heads and channels. Raises InvalidError for pages that are not heads one after
    the other, in one piece or each a fragment, and for a state that is no matrix of channels.
    """
    if shards == 1:
        return [layout]
    rows = {layer.name: group.rows for group in layout.groups if group.state for layer in group.layers}
    facts: list[list[Any]] = []
    for name, window, shape, strides, dtype in layout.facts["layers"]:
        if name in rows:
            if not rows[name] or shape[1] % shards:
                raise InvalidError(
                    f"layer {name}: its recurrent state ({window}, shape {shape}) cannot be cut into {shards} shards; want that of a short"
                    " convolution, whose channels are a multiple of the shards, with VLLM_SSM_CONV_STATE_LAYOUT=SD: start all engines with"
                    " the same --tensor-parallel-size"
                )
            facts.append([name, window, [shape[0], shape[1] // shards], strides, dtype])
            continue
        by_head = len(shape) == 3 and shape[:2] == [heads, layout.block_tokens]
        by_head = by_head and strides in ([shape[1] * shape[2], shape[2], 1], [APART, shape[2], 1])
        if not by_head or heads % shards or set(layout.facts["specs"]) - {"MambaSpec"} != {"FullAttentionSpec"}:
            raise InvalidError(
                f"layer {name}: pages of shape {shape}, strides {strides}, with {heads} KV heads in blocks of {layout.block_tokens} tokens"
                f" ({', '.join(layout.facts['specs'])}) cannot be cut into {shards} shards; want [heads, tokens, bytes] of full attention,"
                f" and a multiple of {shards} heads"
            )
        part = [heads // shards, *shape[1:]]
        facts.append([name, window, part, [part[1] * part[2] if strides[0] else APART, part[2], 1], dtype])

    def cut(shard: int) -> Layout:
        def layers(group: LayerGroup) -> list[Layer]:
            if group.fragments == 1 or group.state:
                page = group.layers[0].page // shards
                return [replace(layer, address=layer.address + shard * page, page=page) for layer in group.layers]
            count = group.fragments // shards
            mine = range(shard * count, (shard + 1) * count)
            return [replace(layer, fragment=layer.fragment - mine.start) for layer in group.layers if layer.fragment in mine]

        groups = [replace(g, layers=layers(g), fragments=g.fragments if g.state else max(1, g.fragments // shards)) for g in layout.groups]
        return replace(layout, groups=groups, facts={**layout.facts, "layers": facts})

    return [cut(shard) for shard in range(shards)]


def read_layout(tensors: Mapping[str, Any], config: Any, windows: Mapping[str, int] | None = None) -> Layout:
    """Return the layout of the KV cache that the engine registers. windows has the windows of layers in which the engine keeps the KV of
    all tokens.

    Raises InvalidError, with the name of the layer or group, for a layout that cannot be stored whole: recurrent state without
    snapshots, a layer that is in no group, a shape of which neither of the first two dimensions is the block, memory that is neither
    host memory nor a CUDA device's, or a CUDA device that the library cannot use.
    """
    groups: dict[tuple[_Reads, int, int], LayerGroup] = {}
    named: dict[str, tuple[int, _Reads]] = {}  # by layer: its KV cache group, and the tokens that it reads
    sizes = set()
    for pool, kv_group in enumerate(config.kv_cache_groups):
        sizes.add(kv_group.kv_cache_spec.block_size)
        for name in kv_group.layer_names:
            # Layers of one kind and several sizes have their specifications within one of the group.
            spec = getattr(kv_group.kv_cache_spec, "kv_cache_specs", {}).get(name, kv_group.kv_cache_spec)
            window = (windows or {}).get(name)
            named[name] = pool, _Reads(window=window) if window else _reads(name, spec)
    if len(sizes) != 1:
        raise InvalidError(f"the model's KV cache groups have blocks of {sorted(sizes)} tokens; the connector stores blocks of one size")
    block_tokens = sizes.pop()
    if missing := sorted(set(named) - set(tensors)):
        raise InvalidError(f"layer {missing[0]} has no KV cache that was registered")
    stored: set[int] = set()
    memory: dict[int, tuple[int, int, Any]] = {}
    facts: list[Any] = []
    for name, tensor in tensors.items():
        pool, reads = named.get(name, (-1, _Reads()))
        pages, layers = _layers(name, tensor, config.num_blocks, pool)
        layer, fragments = layers[0], len(layers)
        if pool < 0:
            if layer.address in stored:
                continue  # it shares the KV cache of a layer that is stored
            raise InvalidError(f"layer {name} has a KV cache of its own and is in no KV cache group; it would not be stored")
        if layer.page % block_tokens and not reads.state:
            raise InvalidError(
                f"layer {name}: {layer.page} contiguous bytes in a block of {block_tokens} tokens; want a whole number for each token"
            )
        storage = tensor.untyped_storage()
        memory.setdefault(storage.data_ptr(), (storage.data_ptr(), storage.nbytes(), tensor))
        facts.append([name, reads.fact, *pages.facts(tensor), str(tensor.dtype)])
        group = groups.setdefault((reads, layer.page, fragments), LayerGroup(reads.window, [], bool(reads.state), fragments, reads.rows))
        group.layers += layers
        stored.add(layer.address)
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise InvalidError(f"the layers are on the devices {', '.join(sorted(map(str, devices)))}; want one for all layers")
    full = [group for (reads, *_), group in groups.items() if reads == _Reads()]
    if not full and (states := [group.layers[0] for (reads, *_), group in groups.items() if reads.state]):
        raise InvalidError(
            f"layer {states[0].name} has recurrent state (MambaSpec), and no layer of the model has full attention; PenstockConnector"
            " stores recurrent state beside full attention: start the engine without PenstockConnector"
        )
    if len(full) > 1:
        (a, x), (b, y) = ((group.layers[0], group.fragments) for group in full[:2])
        raise InvalidError(
            f"layer {b.name} has {y * b.page} bytes a block, and {a.name} has {x * a.page}, in {y} and {x} pieces; want the same in layers"
            " that read all tokens"
        )
    specs = sorted({type(g.kv_cache_spec).__name__ for g in config.kv_cache_groups})
    ordered = [groups[key] for key in sorted(groups)]
    layout = Layout(
        ordered, len(config.kv_cache_groups), config.num_blocks, block_tokens, list(memory.values()), {"layers": facts, "specs": specs},
        next((int(d.index) for d in devices if d.type == "cuda"), None),
    )  # fmt: skip
    _check(layout, tensors)
    return layout


def _place(name: str) -> list[tuple[int, str]]:
    """Return a sort key of a layer's name that compares its numbers as numbers: layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


class _Reads(NamedTuple):
    """The tokens before the next one that a layer reads, for a next token at the beginning of a block: all of them by default."""

    state: str = ""
    """Of recurrent state: the shapes and dtypes of its tensors, without the number of channels of ``rows``. Such a layer reads its state
    after the last token."""
    window: int = 0
    """At most this number of tokens. 0: all."""
    chunk: int = 0
    """The tokens of the next token's chunk, if chunks have this number of tokens. 0: there are no chunks, and ``window`` holds."""
    rows: int = 0
    """As in LayerGroup."""

    @property
    def fact(self) -> int | str:
        if self.state:
            return self.state
        return f"chunk {self.chunk}" if self.chunk else self.window


def _reads(name: str, spec: Any) -> _Reads:
    """Return the tokens that a layer reads. Raise InvalidError for a layer that the connector does not store."""
    kind = type(spec).__name__
    if kind in ("FullAttentionSpec", LATENT):
        return _Reads()
    if kind == "SlidingWindowSpec":
        return _Reads(window=max(1, int(spec.sliding_window) - 1 + int(spec.extra_retained_tokens)))
    if kind == "ChunkedLocalAttentionSpec":
        # The next token is the first of a block, so at most chunk - gcd tokens of its chunk are before it. With chunks of one block
        # these are none, and a namespace's window has at least one.
        chunk = int(spec.attention_chunk_size)
        return _Reads(window=max(1, chunk - math.gcd(chunk, int(spec.block_size))), chunk=chunk)
    what, remedy = kind, "without PenstockConnector"
    if kind == "CrossAttentionSpec":
        what = f"attention to an encoder ({kind})"
    if kind == "MambaSpec":
        if not (why := _no_snapshots(spec)):
            kind = spec.mamba_type.name
            # vLLM's layout SD of a convolution; in its layout DS the few elements of a channel are together.
            if kind == "SHORT_CONV" and (rows := spec.shapes[0][0]) < spec.shapes[0][1]:
                return _Reads(state=f"{kind} {rows} rows {spec.dtypes}", rows=rows)
            return _Reads(state=f"{kind} {spec.shapes} {spec.dtypes}")
        what, remedy = f"recurrent state ({kind}) {why[0]}", why[1]
    raise InvalidError(
        f"layer {name} has {what}; PenstockConnector stores full attention, MLA, sliding windows, chunked attention and snapshots of"
        f" recurrent state: start the engine {remedy}"
    )


def _no_snapshots(spec: Any) -> tuple[str, str] | None:
    """Return why the engine offers no snapshots of a layer's recurrent state that the connector can take, and how to start it."""
    if spec.mamba_cache_mode != "align":
        return f'in the cache mode "{spec.mamba_cache_mode}"', "with --enable-prefix-caching or without PenstockConnector"
    if spec.num_speculative_blocks:
        return "and blocks for drafts", "without speculative decoding or without PenstockConnector"
    if spec.num_prefill_checkpoint_blocks:
        return f"of {spec.mamba_type.name}, with checkpoints within a step", "without PenstockConnector"
    return None


APART = 0
"""In the facts of a layer, the stride of a dimension along which its fragments lie apart. The real stride depends on the size of the
engine's memory, and the bytes of a block do not."""


class _Pages(NamedTuple):
    """Where the bytes of a block are in a layer's tensor."""

    block: int
    """The dimension of the blocks."""
    apart: tuple[int, ...]
    """The dimensions along which fragments lie apart, in the order of the tensor."""
    together: tuple[int, ...]
    """The dimensions of a fragment, whose elements are contiguous, in the order of memory."""

    def facts(self, tensor: Any) -> list[list[int]]:
        """Return sizes and strides of the dimensions of a block."""
        dims = [d for d in range(tensor.dim()) if d != self.block]
        size = math.prod(tensor.shape[d] for d in self.together)
        # A dimension of size 1 may have any stride.
        return [
            [tensor.shape[d] for d in dims],
            [tensor.stride(d) if tensor.stride(d) <= size and d not in self.apart else APART for d in dims],
        ]

    def fragments(self, tensor: Any) -> list[tuple[int, ...]]:
        """Return the place of each fragment in the dimensions apart."""
        return list(itertools.product(*(range(tensor.shape[d]) for d in self.apart)))

    def content(self, tensor: Any, block: int, fragment: int) -> bytes:
        """Return the bytes of a fragment of a block, in the order of memory, as the engine sees them."""
        import torch

        one = tensor
        places = {self.block: block, **dict(zip(self.apart, self.fragments(tensor)[fragment], strict=True))}
        for d in sorted(places, reverse=True):
            one = one.select(d, places[d])
        rest = [d for d in range(tensor.dim()) if d not in places]
        ones = [d for d in rest if d not in self.together]  # of size 1
        one = one.permute([rest.index(d) for d in (*ones, *self.together)])
        content: bytes = one.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        return content


def _pages(name: str, tensor: Any, blocks: int) -> _Pages:
    block = next((d for d in range(min(2, tensor.dim())) if tensor.shape[d] == blocks), None)
    run = 1
    together: list[int] = []
    for d in sorted(range(tensor.dim()), key=tensor.stride):
        if d != block and tensor.shape[d] > 1 and tensor.stride(d) == run:
            together.insert(0, d)
            run *= tensor.shape[d]
    if block is None or not together:
        raise InvalidError(
            f"layer {name}: shape {list(tensor.shape)}, strides {list(tensor.stride())}; want {blocks} blocks as the first or second"
            " dimension, each in contiguous pieces"
        )
    return _Pages(block, tuple(d for d in range(tensor.dim()) if d != block and d not in together and tensor.shape[d] > 1), tuple(together))


def _layers(name: str, tensor: Any, blocks: int, pool: int) -> tuple[_Pages, list[Layer]]:
    if not hasattr(tensor, "data_ptr"):
        raise InvalidError(f"layer {name} registers a {type(tensor).__name__}; the connector stores tensors")
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidError(
            f"layer {name} is on device {tensor.device}; the connector moves memory of the host and of CUDA: use PenstockTier"
        )
    pages = _pages(name, tensor, blocks)
    size = tensor.element_size()
    page = math.prod(tensor.shape[d] for d in pages.together) * size
    stride = tensor.stride(pages.block) * size
    layers = []
    for k, place in enumerate(pages.fragments(tensor)):
        offset = sum(i * tensor.stride(d) for i, d in zip(place, pages.apart, strict=True)) * size
        layers.append(Layer(name, tensor.data_ptr() + offset, stride, page, pool, k))
    return pages, layers


def _check(layout: Layout, tensors: Mapping[str, Any]) -> None:
    """Write a pattern through the connector's addresses and read it through the engine's tensors. Then restore the blocks' contents."""
    if layout.cuda is not None:
        wait_for_engine(layout.cuda)
    # Layers of different KV cache groups may have the same memory, in which each block belongs to one of the groups.
    for pool in range(layout.pools):
        layers = [layer for group in layout.groups for layer in group.layers if layer.pool == pool]
        for block in {layout.blocks - 1, layout.blocks // 2}:
            _check_block(layout, layers, block, tensors)


def wait_for_engine(device: int) -> None:
    """Wait for the work that the engine has put into its stream, before the library reads and writes blocks in another one."""
    import torch

    torch.cuda.current_stream(device).synchronize()


def _read(layout: Layout, address: int, length: int) -> bytes:
    if layout.cuda is None:
        return ctypes.string_at(address, length)
    content = ctypes.create_string_buffer(length)
    copy_device(layout.cuda, address, content, to_device=False)
    return content.raw


def _write(layout: Layout, address: int, content: bytes) -> None:
    if layout.cuda is None:
        ctypes.memmove(address, content, len(content))
    else:
        copy_device(layout.cuda, address, ctypes.create_string_buffer(content, len(content)), to_device=True)


def _check_block(layout: Layout, layers: list[Layer], block: int, tensors: Mapping[str, Any]) -> None:
    addresses = [layer.address + block * layer.stride for layer in layers]
    before = [_read(layout, address, layer.page) for address, layer in zip(addresses, layers, strict=True)]
    patterns = []
    for i, layer in enumerate(layers):
        period = bytes((i * 37 + k * 11) % 251 for k in range(251))
        patterns.append((period * (layer.page // len(period) + 1))[: layer.page])
    try:
        for address, pattern in zip(addresses, patterns, strict=True):
            _write(layout, address, pattern)
        for layer, pattern in zip(layers, patterns, strict=True):
            tensor = tensors[layer.name]
            if _pages(layer.name, tensor, layout.blocks).content(tensor, block, layer.fragment) != pattern:
                raise InvalidError(
                    f"layer {layer.name}: block {block} is not at {layer.address:#x} + {block} × {layer.stride}, where the connector"
                    " expects it: this version of the engine has another layout"
                )
    finally:
        for address, content in zip(addresses, before, strict=True):
            _write(layout, address, content)

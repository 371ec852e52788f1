"""One host pool of SGLang: the addresses of its pages, and the namespace that holds them."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from penstock import Namespace, Pointers, Store
from penstock._adapter import Connection, digest, namespace_name
from penstock.errors import InvalidError

__all__ = ["Pool", "geometry"]

_PAGE_FIRST = ("page_first", "page_first_direct")
# The longest part of a value that has its own checksum, in bytes. Up to this length a part is verified while it arrives.
_PART_BYTES = 1 << 20
_PARTS_MAX = 1 << 12

# Attributes of SGLang's host pools that determine the bytes of a page and their order.
_SHAPE = (
    "layer_num", "target_layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim", "head_group_num",
    "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "dsa_kv_cache_store_fp8", "storage_format_tag", "dcp_size", "dcp_rank",
)  # fmt: skip


def geometry(fragments: Sequence[int], tokens: int) -> dict[str, int]:
    """Return the geometry of pages, as keywords of ``Store.namespace``, from their tokens and the lengths of their fragments in bytes."""
    step, total = math.gcd(*fragments), sum(fragments)
    if step % tokens:
        tokens = 1
    # A part is the longest divisor of all fragments that is short enough, and has the same number of bytes for each token.
    counts = range(-(-step // _PART_BYTES), _PARTS_MAX + 1)
    part = next((step // n for n in counts if step % n == 0 and step // n % tokens == 0), 0)
    if not part or total // part > _PARTS_MAX:
        raise InvalidError(f"fragments of {list(fragments)} bytes have no {_PARTS_MAX} or fewer equal parts of at most {_PART_BYTES} bytes")
    return {"block_tokens": tokens, "layers": total // part, "token_bytes": part // tokens}


class Pool:
    """A host pool of the engine.

    All fragments of a page are one value, for example K and V, so a page is stored whole or not at all. ``fragments`` are
    their lengths. A pool without memory of its own, which only allocates indices, has none.
    """

    def __init__(self, name: str, host: Any, config: Any, *, chained: bool, version: str) -> None:
        self.name = name
        self.host = host
        self.chained = chained
        self.page_tokens = int(getattr(host, "page_size", 1) or 1)
        self.namespace: Namespace | None = None
        self.outdated = False
        """Its weights have changed, and the namespace is still at the epoch of the old ones."""
        self.replicated = self._replicated(config)
        self.fragments = self._fragments(config)
        self._facts = self._identity(config, version)
        self._place = self._ranks(config)

    @property
    def page_bytes(self) -> int:
        return sum(self.fragments)

    def _replicated(self, config: Any) -> bool:
        """Whether each rank of tensor parallelism has the same bytes: latent KV has no heads to divide."""
        if not config.is_mla_model or self.name == "mamba":
            return False
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

        # The draft model of a model with latent KV may have heads.
        return not isinstance(self.host, MHATokenToKVPoolHost)

    def _fragments(self, config: Any) -> list[int]:
        what = f"SGLang's host pool {self.name!r} ({type(self.host).__name__})"
        if getattr(self.host, "stores_page_envelope", False):
            raise InvalidError(f"{what}: pages that hold several pools (page envelopes) are not supported")
        if not list(self.buffers()):
            # A dummy leaves its pages to another rank on the host; a logical pool only allocates indices.
            if getattr(self.host, "_is_dummy", False) or self.host.get_page_buffer_meta(_indices(self.page_tokens)) is None:
                return []
            raise InvalidError(
                f"{what} has pages and names no buffers: this release stores them in a way that the adapter does not support"
            )
        layout = getattr(self.host, "layout", None)
        allowed = (*_PAGE_FIRST, "layer_first") if self.replicated and self.name == "kv" else _PAGE_FIRST
        if layout not in allowed:
            raise InvalidError(
                f"{what} has the layout {layout!r}; want {' or '.join(allowed)}: start SGLang with"
                " --hicache-mem-layout page_first (--hicache-io-backend kernel) or page_first_direct (direct)"
            )
        if getattr(config, "should_split_heads", False):
            raise InvalidError(f"{what}: pages that are split by heads (tp_lcm_size) are not supported")
        try:
            addresses, lengths = self.host.get_page_buffer_meta(_indices(self.page_tokens))
        except (NotImplementedError, ValueError) as e:
            raise InvalidError(f"{what} gives no addresses of its pages: {e}") from e
        if len(addresses) != len(lengths):
            raise InvalidError(f"{what} gives {len(addresses)} addresses and {len(lengths)} lengths for a page")
        fragments = [int(n) for n in lengths if n]
        if not fragments:
            raise InvalidError(f"{what} has pages of 0 bytes")
        return fragments

    def _identity(self, config: Any, version: str) -> dict[str, Any]:
        host = self.host
        return {
            "engine": "sglang",
            "version": version,
            "model": config.model_name or "",
            "pool": self.name,
            "class": type(host).__name__,
            "dtype": str(getattr(host, "dtype", "")),
            "layout": getattr(host, "layout", ""),
            "page": self.page_tokens,
            "fragments": self.fragments,
            "shape": {name: str(getattr(host, name)) for name in _SHAPE if hasattr(host, name)},
            "index": "chained" if self.chained else "flat",
            "ranks": self._ranks(config),
        }

    def _ranks(self, config: Any) -> str:
        """Return which part of a page this rank has."""
        part = f"tp{config.tp_size}" if self.replicated else f"tp{config.tp_rank}of{config.tp_size}"
        if config.pp_size > 1:
            part += f"-pp{config.pp_rank}of{config.pp_size}"
        if config.attn_cp_size > 1:
            part += f"-cp{config.attn_cp_rank}of{config.attn_cp_size}"
        return part

    def open(self, store: Store, options: Connection) -> None:
        """Create the namespace on the nodes, or check that it is the same there."""
        facts = self._facts
        name = namespace_name(options.namespace, facts["model"], facts, f"{self.name}-{self._place}")
        self.namespace = store.namespace(
            name,
            flat=not self.chained,
            tenant=options.tenant,
            dtype=facts["dtype"],
            layout=f"{facts['layout']} {digest(facts)}"[:64],
            **geometry(self.fragments, self.page_tokens),  # type: ignore[arg-type]
        )

    def buffers(self) -> Iterator[tuple[int, int, Any]]:
        """Yield address, length and tensor of each buffer that is not empty."""
        get = getattr(self.host, "get_hybrid_pool_buffer", None)
        found = get() if get is not None else getattr(self.host, "kv_buffer", None)
        for tensor in found if isinstance(found, (list, tuple)) else [found]:
            if tensor is not None and tensor.numel():
                yield tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor

    def pointers(self, indices: Any, pages: int) -> Pointers:
        """Return the addresses of pages. Raises InvalidError unless there is one index for each token of ``pages`` pages."""
        want = pages * self.page_tokens
        if indices is None or len(indices) != want:
            have = "none" if indices is None else len(indices)
            raise InvalidError(f"{have} host indices for {pages} pages of {self.page_tokens} tokens; want {want}")
        addresses, lengths = self.host.get_page_buffer_meta(indices)
        if 0 in lengths:
            addresses = [a for a, n in zip(addresses, lengths, strict=True) if n]
            lengths = [n for n in lengths if n]
        return Pointers(addresses, lengths, fragments=len(self.fragments), keep=self.host)

    def check(self) -> bool:
        """Write a pattern to free pages through their addresses, and read it through SGLang's own indexing.

        Raises InvalidError if they differ: this adapter would store other bytes than those of the page. Returns False if
        the pool has no free page to write to.
        """
        try:
            free = self.host.available_size() // self.page_tokens
        except NotImplementedError:
            # Its pages are at the indices of another pool. Any page is suitable, because its content is restored, and
            # SGLang moves no page while it registers pools.
            pages = min(3, self.host.size // self.page_tokens)
            self._check(_indices(pages * self.page_tokens), pages)
            return True
        pages = min(3, free)
        indices = self.host.alloc(pages * self.page_tokens) if pages else None
        if indices is None:
            return False
        try:
            self._check(indices, pages)
        finally:
            self.host.free(indices)
        return True

    def _check(self, indices: Any, pages: int) -> None:
        pointers = self.pointers(indices, pages)
        each = len(self.fragments)
        spans = list(zip(pointers.addresses, pointers.lengths, strict=True))
        before = [ctypes.string_at(address, length) for address, length in spans]
        random_bytes = random.Random(0)
        patterns = [random_bytes.randbytes(length) for _, length in spans]
        try:
            for (address, length), pattern in zip(spans, patterns, strict=True):
                ctypes.memmove(address, pattern, length)
            for page in range(pages):
                start = int(indices[page * self.page_tokens])
                if self._read(start) != b"".join(patterns[page * each : (page + 1) * each]):
                    raise InvalidError(
                        f"SGLang's host pool {self.name!r} ({type(self.host).__name__}, layout {self.host.layout}): the page at"
                        f" index {start}, read as the engine reads it, is not what was written to the addresses that the pool"
                        " gives: this release has another layout than the adapter takes it for"
                    )
        finally:
            for (address, length), data in zip(spans, before, strict=True):
                ctypes.memmove(address, data, length)

    def _read(self, start: int) -> bytes:
        """Return the bytes of the page at an index, by the engine's own tensors."""
        try:
            parts = [self.host.get_data_page(start)]
        except NotImplementedError:  # K and V of different lengths
            where = start // self.page_tokens if self.host.layout == "page_first_direct" else slice(start, start + self.page_tokens)
            parts = [self.host.k_buffer[where], self.host.v_buffer[where]]
        return b"".join(_bytes(part) for part in parts)


def _indices(tokens: int) -> Any:
    import torch

    return torch.arange(tokens)


def _bytes(tensor: Any) -> bytes:
    import torch

    raw: bytes = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return raw

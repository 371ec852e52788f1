"""Penstock through its Python package: libpenstock by ctypes, registered memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker import Area, Store, main

import penstock

_TOKENS = 16


class Penstock(Store):
    # Twice the arena that the suite gives the node, so that the values of an area have left it when their turn comes again.
    cold_areas = 8

    def __init__(self, source: Area, target: Area, options: dict[str, Any]) -> None:
        super().__init__(source, target, options)
        self.store = penstock.Store(options["server"], any_memory=False)
        self.registered = [self.store.register(area.map) for area in (source, target)]
        self.namespaces: dict[int, penstock.Namespace] = {}

    def namespace(self, value_bytes: int) -> penstock.Namespace:
        layers = 16 if value_bytes <= 1 << 20 else 64
        return self.store.namespace(
            f"values-{value_bytes}", block_tokens=_TOKENS, layers=layers, token_bytes=value_bytes // layers // _TOKENS, flat=True
        )

    def prepare(self, value_bytes: int) -> penstock.Namespace:
        found = self.namespaces.get(value_bytes)
        if found is None:
            found = self.namespaces.setdefault(value_bytes, self.namespace(value_bytes))
        return found

    def put(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        self.check("stored", keys, self.prepare(value_bytes).put(_encoded(keys), _pointers(self.source, offsets, value_bytes)))

    def get(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        self.check("loaded", keys, self.prepare(value_bytes).get(_encoded(keys), _pointers(self.target, offsets, value_bytes)))

    def remove(self, keys: Sequence[str], value_bytes: int) -> None:
        self.check("removed", keys, self.prepare(value_bytes).delete(_encoded(keys)))

    def check(self, what: str, keys: Sequence[str], result: penstock.Result) -> None:
        if result.ok != len(keys):
            raise RuntimeError(f"{result.ok} of {len(keys)} values were {what}: {result}")


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _pointers(area: Area, offsets: Sequence[int], value_bytes: int) -> penstock.Pointers:
    return penstock.Pointers([area.address + offset for offset in offsets], [value_bytes] * len(offsets))


if __name__ == "__main__":
    main(Penstock, "penstock")

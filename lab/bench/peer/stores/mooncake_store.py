"""Mooncake Store over TCP, with registered memory. Its values lie in the segment of another process (mooncake_segment.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake.store import MooncakeDistributedStore
from worker import Area, Store, main


class Mooncake(Store):
    def __init__(self, source: Area, target: Area, options: dict[str, Any]) -> None:
        super().__init__(source, target, options)
        self.store = MooncakeDistributedStore()
        code = self.store.setup(options["address"], "P2PHANDSHAKE", 0, 2 * source.length, "tcp", "", options["master"])
        if code:
            raise RuntimeError(f"setup failed with code {code}")
        for area in (source, target):
            code = self.store.register_buffer(area.address, area.length)
            if code:
                raise RuntimeError(f"register_buffer failed with code {code}")

    def put(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        places = [self.source.address + offset for offset in offsets]
        if len(keys) == 1:
            codes = [self.store.put_from(keys[0], places[0], value_bytes)]
        else:
            codes = self.store.batch_put_from(list(keys), places, [value_bytes] * len(keys))
        if any(codes):
            raise RuntimeError(f"a put failed: codes {codes}")

    def get(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        places = [self.target.address + offset for offset in offsets]
        if len(keys) == 1:
            counts = [self.store.get_into(keys[0], places[0], value_bytes)]
        else:
            counts = self.store.batch_get_into(list(keys), places, [value_bytes] * len(keys))
        if any(count != value_bytes for count in counts):
            raise RuntimeError(f"a get failed: {counts}, want {value_bytes} bytes each")

    def remove(self, keys: Sequence[str], value_bytes: int) -> None:
        # A value that was read recently has a lease, which only force overrides.
        codes = self.store.batch_remove(list(keys), True)
        if any(codes):
            raise RuntimeError(f"a remove failed: codes {codes}")


if __name__ == "__main__":
    main(Mooncake, "mooncake-transfer-engine-non-cuda")

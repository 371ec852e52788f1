"""Redis through redis-py with hiredis. Each thread has a connection; a batch is MGET, and a pipeline of SET."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis
from redis.utils import HIREDIS_AVAILABLE
from worker import Area, Store, main


class Redis(Store):
    def __init__(self, source: Area, target: Area, options: dict[str, Any]) -> None:
        super().__init__(source, target, options)
        if not HIREDIS_AVAILABLE:
            raise RuntimeError("redis-py does not find hiredis, without which it parses in Python")
        self.clients = [redis.Redis(host="127.0.0.1", port=options["port"]) for _ in range(options["threads"])]

    def put(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        pipe = self.clients[caller].pipeline(transaction=False)
        for key, offset in zip(keys, offsets, strict=True):
            pipe.set(key, self.source.view[offset : offset + value_bytes])
        if not all(pipe.execute()):
            raise RuntimeError("a SET was refused")

    def get(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        client = self.clients[caller]
        values = [client.get(keys[0])] if len(keys) == 1 else client.mget(keys)
        for value, offset in zip(values, offsets, strict=True):
            if value is None:
                raise RuntimeError("a value is absent")
            self.target.view[offset : offset + value_bytes] = value

    def remove(self, keys: Sequence[str], value_bytes: int) -> None:
        if self.clients[0].delete(*keys) != len(keys):
            raise RuntimeError("a value that was put is absent")


if __name__ == "__main__":
    main(Redis, "redis")

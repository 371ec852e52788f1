"""A file for each value, written under another name and renamed when it is complete. With the option "sync" it is flushed too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from worker import Area, Directory, main


class Files(Directory):
    def __init__(self, source: Area, target: Area, options: dict[str, Any]) -> None:
        super().__init__(source, target, options)
        self.sync = options.get("sync", False)

    def put(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        for key, offset in zip(keys, offsets, strict=True):
            unfinished = self.directory / f"{key}.unfinished"
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                n = os.write(fd, self.source.view[offset : offset + value_bytes])
                if self.sync:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
            if n != value_bytes:
                raise RuntimeError(f"{n} of {value_bytes} bytes of {key} were written")
            os.rename(unfinished, self.directory / key)

    def get(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        for key, offset in zip(keys, offsets, strict=True):
            fd = os.open(self.directory / key, os.O_RDONLY)
            try:
                n = os.preadv(fd, [self.target.view[offset : offset + value_bytes]], 0)
            finally:
                os.close(fd)
            if n != value_bytes:
                raise RuntimeError(f"{n} of {value_bytes} bytes of {key} were read")

    def key_of(self, name: str) -> str:
        return name


if __name__ == "__main__":
    main(Files)

"""The keys of a batch, packed for the library."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import overload

from penstock.errors import InvalidError

__all__ = ["KEY_MAX", "Key", "Keys"]

KEY_MAX = 256  # PENSTOCK_KEY_MAX

Key = bytes | str


class Keys(Sequence[bytes]):
    """Packed keys. Pack the keys once to use them in several calls, for example in a match and a get.

    >>> keys = Keys([b"a", "bc"])
    >>> list(keys), keys[:1] == Keys([b"a"])
    ([b'a', b'bc'], True)
    """

    __slots__ = ("blob", "offsets")

    def __init__(self, keys: Iterable[Key]) -> None:
        if isinstance(keys, (bytes, str)):
            raise TypeError(f"keys: {keys!r:.60}; want a sequence of keys, not a single key")
        try:
            parts = [key.encode() if isinstance(key, str) else key for key in keys]
        except UnicodeEncodeError as e:
            raise InvalidError(f"key {e.object[:40]!r} is not UTF-8: {e.reason}") from e
        for part in parts:
            if not isinstance(part, bytes):
                raise TypeError(f"a key of type {type(part).__name__}; want bytes or str")
        lengths = list(map(len, parts))
        if parts and not 1 <= min(lengths) <= max(lengths) <= KEY_MAX:
            bad = next(part for part in parts if not 1 <= len(part) <= KEY_MAX)
            raise InvalidError(f"key {bad[:40]!r} is {len(bad)} bytes long; want 1 to {KEY_MAX}")
        self.blob = b"".join(parts)
        self.offsets = array("I", accumulate(lengths, initial=0))

    @classmethod
    def packed(cls, blob: bytes, size: int) -> Keys:
        """Return the keys in blob, which are ``size`` bytes each."""
        if not 1 <= size <= KEY_MAX or len(blob) % size:
            raise InvalidError(f"{len(blob)} bytes are not a whole number of keys of {size} bytes")
        keys = cls.__new__(cls)
        keys.blob = bytes(blob)
        keys.offsets = array("I", range(0, len(blob) + 1, size))
        return keys

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Keys: ...
    def __getitem__(self, index: int | slice) -> bytes | Keys:
        if isinstance(index, slice):
            return Keys([self[i] for i in range(*index.indices(len(self)))])
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"key {index} of {len(self)}")
        return self.blob[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[bytes]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and self.blob == other.blob and self.offsets == other.offsets

    def __hash__(self) -> int:
        return hash((self.blob, len(self)))

    def __repr__(self) -> str:
        return f"<Keys of {len(self)} keys, {len(self.blob)} bytes>"

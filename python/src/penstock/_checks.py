"""Checks of arguments."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable

from penstock import errors

_ID_BYTES = 16


def _ms(what: str, seconds: float | None) -> int:
    """Return milliseconds, or 0 for None. 0 selects the library's default."""
    if seconds is None:
        return 0
    ms = float(seconds) * 1000
    if not 0 < ms < 2**32:
        raise errors.InvalidError(f"{what} of {seconds} s; want more than 0 s and less than {2**32 // 1000} s")
    return max(1, round(ms))


def _count(what: str, value: int, bits: int = 32) -> int:
    """Return value if it is an integer of that many bits. Without the check ctypes would drop the upper bits."""
    if not isinstance(value, int):
        raise TypeError(f"{what}: {value!r} of type {type(value).__name__}; want an integer")
    if not 0 <= value < 1 << bits:
        raise errors.InvalidError(f"{what}: {value}; want 0 to {(1 << bits) - 1}")
    return value


def _numbers(what: str, values: Iterable[int], bits: int = 64) -> array[int]:
    """Return a copy of values as an array of integers of 32 or 64 bits."""
    try:
        return array("I" if bits == 32 else "Q", values)
    except (OverflowError, TypeError) as e:
        raise errors.InvalidError(f"{what}: {e}; want integers from 0 to 2**{bits}-1") from e


def _address(numbers: array[int]) -> int | None:
    return numbers.buffer_info()[0] if numbers else None


def _chain(ids: Iterable[bytes]) -> bytes:
    """Return the ids of blocks, one after the other, as the library takes them."""
    chain = b"".join(ids)
    if len(chain) % _ID_BYTES:
        raise errors.InvalidError(f"ids of {len(chain)} bytes; want {_ID_BYTES} for each block")
    return chain


def _text(what: str, value: str | os.PathLike[str] | None) -> bytes | None:
    if value is None:
        return None
    text = os.fspath(value)
    if not isinstance(text, str):
        raise TypeError(f"{what}: {value!r} of type {type(value).__name__}; want a string")
    if "\0" in text:
        raise errors.InvalidError(f"{what}: {text!r} has a zero character")
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise errors.InvalidError(f"{what}: {text!r} is not UTF-8: {e.reason}") from e

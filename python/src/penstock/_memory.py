"""The addresses of values in buffers and tensors."""

from __future__ import annotations

import ctypes
import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from ctypes import POINTER, Structure, addressof, byref, c_char_p, c_int, c_ssize_t, c_void_p, py_object
from typing import Any, Protocol, runtime_checkable

from penstock import _abi
from penstock._checks import _numbers
from penstock.errors import InvalidError

__all__ = ["Buffer", "Pins", "Pointers", "Tensor", "Value", "copy_device", "current_stream"]


@runtime_checkable
class Tensor(Protocol):
    """The methods of a torch tensor that the package calls. torch is not imported."""

    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...
    def is_contiguous(self) -> bool: ...


# An object with the buffer protocol: bytes, bytearray, memoryview, mmap, array.array, a NumPy array. Python has no
# type for it before 3.12.
Buffer = Any
# The value of one key: one fragment, or several fragments in order.
Value = Buffer | Tensor | Sequence[Buffer | Tensor]


class Pointers:
    """The values of a batch as addresses, for callers that have addresses already.

    ``fragments`` is the number of fragments of each key. The memory must stay allocated until the call or the job has
    ended. ``keep`` is an object that is referenced until then. ``cuda`` is the CUDA device that has the memory; None means
    host memory.
    """

    def __init__(
        self,
        addresses: Iterable[int],
        lengths: Iterable[int],
        *,
        fragments: int | Sequence[int] = 1,
        keep: object = None,
        cuda: int | None = None,
    ) -> None:
        self.cuda = cuda
        self.addresses = _numbers("addresses", addresses)
        self.lengths = _numbers("lengths", lengths)
        self.keep = keep
        if len(self.addresses) != len(self.lengths):
            raise InvalidError(f"{len(self.addresses)} addresses and {len(self.lengths)} lengths; want equal numbers")
        n = len(self.addresses)
        if isinstance(fragments, int):
            if fragments < 1 or n % fragments:
                raise InvalidError(f"{n} addresses; want a multiple of {fragments}, the fragments of each key")
            self.counts = [fragments] * (n // fragments)
        else:
            self.counts = list(fragments)
            if sum(self.counts) != n or min(self.counts, default=1) < 1:
                raise InvalidError(f"fragments {self.counts} for {n} addresses; want positive numbers whose sum is {n}")


class _PyBuffer(Structure):
    """Py_buffer of CPython, which has not changed since 3.0."""

    _fields_ = [
        ("buf", c_void_p),
        ("obj", c_void_p),
        ("len", c_ssize_t),
        ("itemsize", c_ssize_t),
        ("readonly", c_int),
        ("ndim", c_int),
        ("format", c_char_p),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("suboffsets", c_void_p),
        ("internal", c_void_p),
    ]


_Byte = ctypes.c_char

_WRITABLE = 1  # PyBUF_WRITABLE; 0 requests any contiguous buffer

# These functions need the interpreter's lock, which PYFUNCTYPE keeps.
_get_buffer = ctypes.PYFUNCTYPE(c_int, py_object, POINTER(_PyBuffer), c_int)(("PyObject_GetBuffer", ctypes.pythonapi))
_release_buffer = ctypes.PYFUNCTYPE(None, POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))


class Pins:
    """Keeps the memory of values allocated and in place while the library uses it.

    It exports buffers, so that a bytearray cannot be resized, and references tensors. ``release`` ends both and may be
    called twice.
    """

    __slots__ = ("_held", "_views", "addresses", "device", "lengths")

    def __init__(self) -> None:
        self.addresses = array("Q")
        self.lengths = array("Q")
        self.device: int | None = None
        """The CUDA device of the memory, or None for host memory."""
        self._views: list[_PyBuffer] = []
        self._held: list[object] = []

    def __del__(self) -> None:
        # ctypes does not end an export with its Py_buffer. A coroutine that is cancelled before it runs calls no release.
        self.release()

    def add(self, value: Any, *, writable: bool) -> None:
        """Append one fragment, a buffer or a tensor. With ``writable`` the memory must be writable."""
        if hasattr(value, "data_ptr"):
            self._add_tensor(value)
            return
        try:
            # This is several times faster than _add_view, which also accepts read-only memory and has clear errors.
            start = _Byte.from_buffer(value)
        except (TypeError, ValueError, BufferError):
            self._add_view(value, writable)
            return
        view = memoryview(value)
        _refuse_objects(value, view.format)
        self._place(None)
        self._held.append(start)
        self.addresses.append(addressof(start))
        self.lengths.append(view.nbytes)

    def _add_view(self, value: Buffer, writable: bool) -> None:
        view = _PyBuffer()
        try:
            layout = memoryview(value).format
            _get_buffer(value, byref(view), _WRITABLE if writable else 0)
        except TypeError:
            raise TypeError(
                f"a value of type {type(value).__name__}; want an object with the buffer protocol (bytearray, memoryview, mmap,"
                " NumPy array), a tensor, or a sequence of those, one for each fragment"
            ) from None
        except (BufferError, ValueError) as e:
            want = "writable, contiguous memory" if writable else "contiguous memory"
            raise InvalidError(f"a value of type {type(value).__name__}: {e}; want {want}") from e
        self._views.append(view)
        _refuse_objects(value, layout)
        self._place(None)
        self.addresses.append(view.buf or 0)
        self.lengths.append(view.len)

    def _add_tensor(self, tensor: Any) -> None:
        device: Any = getattr(tensor, "device", None)
        kind = getattr(device, "type", "cpu")
        if kind not in ("cpu", "cuda"):
            raise InvalidError(
                f"a tensor on device {device}; the library reads and writes memory of the host and of CUDA: copy it to the CPU"
            )
        if not tensor.is_contiguous():
            raise InvalidError("a tensor that is not contiguous; give its contiguous parts as fragments")
        for lazy in ("is_conj", "is_neg"):
            if hasattr(tensor, lazy) and getattr(tensor, lazy)():
                raise InvalidError(f"a tensor with {lazy}(), whose memory has other values: give resolve_conj() and resolve_neg() of it")
        self._place(int(device.index) if kind == "cuda" else None)
        self._held.append(tensor)
        self.addresses.append(tensor.data_ptr())
        self.lengths.append(tensor.numel() * tensor.element_size())

    def _place(self, device: int | None) -> None:
        """Set the device of the next fragment."""
        if self.addresses and device != self.device:
            raise InvalidError("values of one call in host memory and on a CUDA device, or on two devices; want all in one place")
        self.device = device

    def hold(self, pointers: Pointers) -> None:
        """Use the addresses of pointers, instead of calls of add."""
        self.addresses, self.lengths, self.device = pointers.addresses, pointers.lengths, pointers.cuda
        self._held.append(pointers)

    def release(self) -> None:
        """End the exports and drop the references."""
        while self._views:
            _release_buffer(byref(self._views.pop()))
        self._held.clear()


def _refuse_objects(value: Buffer, layout: str) -> None:
    """Refuse a buffer of references to Python objects. layout is the format of its elements, as in module struct."""
    if "O" in layout and "O" in re.sub(":[^:]*:", "", layout):  # the names of fields are between colons
        raise InvalidError(
            f"a value of type {type(value).__name__} with elements of format {layout!r}: its memory has references to Python objects"
        )


def fragments(values: Sequence[Value] | Pointers, pins: Pins, *, writable: bool) -> array[int] | None:
    """Pin the values of a batch. Return the index of each value's first fragment, or None if each has one fragment."""
    if isinstance(values, Pointers):
        pins.hold(values)
        counts = values.counts
    else:
        counts = []
        for value in values:
            if isinstance(value, (list, tuple)):
                for fragment in value:
                    pins.add(fragment, writable=writable)
                counts.append(len(value))
            else:
                pins.add(value, writable=writable)
                counts.append(1)
    if counts.count(1) == len(counts):
        return None
    starts = array("I", [0])
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def copy_device(device: int, address: int, host: ctypes.Array[Any], *, to_device: bool) -> None:
    """Copy all bytes of host to memory of a CUDA device, or from there, and wait for the copy. It does not wait for streams."""
    _abi.call(_abi.load().penstock_copy_device, device, address, addressof(host), ctypes.sizeof(host), int(to_device))


def current_stream(device: int) -> int:
    """Return the CUDA stream in which torch puts the work of this thread on a device."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise InvalidError("values on a CUDA device, and torch is not imported: give the argument stream")
    return int(torch.cuda.current_stream(device).cuda_stream)

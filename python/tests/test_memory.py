"""Tests of the time during which the library uses the caller's memory."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import mmap
import sys
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MakeNamespace, paused, value

from penstock import Buffer, CanceledError, ClosedError, InvalidError, Namespace, Store, Tensor, testing


@pytest.mark.parametrize(
    "make_buffer",
    [
        bytearray,
        lambda n: memoryview(bytearray(n)),
        lambda n: memoryview(bytearray(n)).cast("B", [2, n // 2]),
        lambda n: array("d", bytes(n)),
        lambda n: mmap.mmap(-1, n),
        lambda n: (ctypes.c_uint16 * (n // 2))(),
    ],
    ids=["bytearray", "memoryview", "two dimensions", "array of doubles", "mmap", "ctypes"],
)
def test_anything_with_the_buffer_protocol(make: MakeNamespace, make_buffer: Callable[[int], Buffer]) -> None:
    ns = make(flat=True)
    source, into = make_buffer(ns.value_bytes), make_buffer(ns.value_bytes)
    memoryview(source).cast("B")[:] = value(ns, 3)
    assert ns.put(["a", "b"], [source, bytes(ns.value_bytes)]).ok == 2
    assert ns.get(["a"], [into]).ok == 1
    assert bytes(memoryview(into).cast("B")) == value(ns, 3)


class HostTensor:
    """An object with the methods of a torch tensor that the package calls. The tests do not depend on torch."""

    def __init__(self, data: bytes, *, device: str = "cpu", contiguous: bool = True) -> None:
        self.data = array("H", data)
        self.device = type("device", (), {"type": device})()
        self.contiguous = contiguous

    def data_ptr(self) -> int:
        return self.data.buffer_info()[0]

    def numel(self) -> int:
        return len(self.data)

    def element_size(self) -> int:
        return self.data.itemsize

    def is_contiguous(self) -> bool:
        return self.contiguous


def test_tensors_without_torch(store: Store, ns: Namespace) -> None:
    assert "torch" not in sys.modules
    source, into = HostTensor(value(ns, 4)), HostTensor(bytes(ns.value_bytes))
    assert isinstance(source, Tensor)
    assert ns.put(["a"], [source]).ok == 1
    with store.register(into):
        assert ns.get(["a"], [into]).ok == 1
    assert into.data == source.data
    with pytest.raises(InvalidError, match="device"):
        ns.get(["a"], [HostTensor(bytes(ns.value_bytes), device="xpu")])
    with pytest.raises(InvalidError, match="contiguous"):
        ns.get(["a"], [HostTensor(bytes(ns.value_bytes), contiguous=False)])
    for lazy in ("is_conj", "is_neg"):
        view = HostTensor(value(ns, 4))
        setattr(view, lazy, lambda: True)
        with pytest.raises(InvalidError, match=lazy):
            ns.put(["b"], [view])


def test_tensors_of_torch(ns: Namespace) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: it is no dependency, and too large for these tests")
    source = torch.arange(ns.value_bytes // 2, dtype=torch.bfloat16).reshape(2, -1)
    into = torch.zeros_like(source)
    assert ns.put(["a"], [source]).ok == 1
    assert ns.get(["a"], [[into[0], into[1]]]).ok == 1
    assert torch.equal(source, into)
    with pytest.raises(InvalidError, match="contiguous"):
        ns.get(["a"], [into.t()])


def test_a_call_drops_its_references(ns: Namespace) -> None:
    source, into = bytearray(value(ns, 0)), bytearray(ns.value_bytes)
    tensor = HostTensor(bytes(ns.value_bytes))
    reference = weakref.ref(tensor)
    ns.put(["a"], [source])
    ns.get(["a"], [into])
    ns.get(["a"], [tensor])
    for bad in ([into, into], [into[:3]]):
        with pytest.raises(InvalidError):
            ns.get(["a"], bad)
    source.append(0)  # raises BufferError if source is still exported
    into.append(0)
    del tensor
    gc.collect()
    assert reference() is None


def test_a_task_that_never_runs_drops_its_references(ns: Namespace) -> None:
    source, into = bytearray(value(ns, 0)), bytearray(ns.value_bytes)

    async def cancelled() -> None:
        for call in (ns.aio.put(["a"], [memoryview(source).toreadonly()]), ns.aio.get(["a"], [into])):
            task = asyncio.ensure_future(call)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    gc.collect()
    source.append(0)  # raises BufferError if source is still exported
    into.append(0)
    assert ns.exists(["a"]).ok == 0


def test_values_of_a_get_may_not_share_memory(ns: Namespace) -> None:
    """The library registers each value of a call by itself, unless the value before it has the memory."""
    keys = ["a", "b", "c"]
    ns.put(keys, [value(ns, i) for i in range(3)])
    one, two, both = bytearray(ns.value_bytes), bytearray(ns.value_bytes), bytearray(2 * ns.value_bytes)
    half = ns.value_bytes // 2
    parts = [memoryview(both)[i * half :][: ns.value_bytes] for i in range(3)]
    for into in ([one, two, one], [parts[0], two, parts[1]], [parts[0], parts[1], two]):
        with pytest.raises(InvalidError):
            ns.get(keys, into)
    assert ns.get(keys, [parts[0], two, parts[2]]).ok == 3
    assert both == value(ns, 0) + value(ns, 2)


def test_memory_is_not_written_to_after_a_timeout() -> None:
    """After a job has failed with a timeout, the library does not write to the job's memory."""
    with testing.node() as n, Store(n.address, dead_for=0.1) as store:
        mine = store.namespace("a", block_tokens=4, layers=2, token_bytes=64)
        keys = [f"{i}" for i in range(32)]
        mine.put(keys, [value(mine, i) for i in range(32)])
        into = [bytearray(b"\xaa" * mine.value_bytes) for _ in keys]
        n.pause()
        late = mine.jobs.get(keys, into, timeout=0.3)
        with pytest.raises((TimeoutError, CanceledError)):
            late.wait()
        for buffer in into:
            buffer[:] = b"\x55" * mine.value_bytes
        n.resume()
        again = [bytearray(mine.value_bytes) for _ in keys]
        while mine.get(keys, again).ok != len(keys):
            pass  # until the client connects to the node again
        assert all(buffer == b"\x55" * mine.value_bytes for buffer in into)


def test_a_job_exports_its_memory_until_it_is_complete() -> None:
    with paused() as (_, store, ns):
        into = bytearray(ns.value_bytes)
        job = ns.jobs.get(["a"], [into], timeout=60)
        with pytest.raises(BufferError):
            into.append(0)
        job.cancel()
        with pytest.raises(CanceledError):
            job.wait()
        into.append(0)

        into = bytearray(ns.value_bytes)
        job = ns.jobs.get(["a"], [into], timeout=60)
        store.close()
        with pytest.raises(ClosedError):
            job.wait()
        into.append(0)


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE // 1024


def test_calls_do_not_grow_the_process(make: MakeNamespace) -> None:
    ns = make(flat=True)
    keys = [f"key {i}" for i in range(16)]
    values = [value(ns, i) for i in range(16)]
    into = [bytearray(ns.value_bytes) for _ in keys]
    ns.put(keys, values)

    def some(rounds: int) -> None:
        for _ in range(rounds):
            ns.match(keys)
            ns.put(keys, values)
            ns.get(keys, into)
            with pytest.raises(InvalidError):
                ns.get(["a"], [b""])

    some(300)  # fill pools and caches
    objects, before = len(gc.get_objects()), resident_kib()
    some(1000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 200
    # A leak of one CResult per call would be 2 MiB. The Go heap may grow by some MiB between two collections.
    assert resident_kib() - before < 16 << 10

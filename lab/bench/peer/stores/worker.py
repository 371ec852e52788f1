"""Memory, threads, clocks and protocol of all workers of `penstock bench engines`.

A worker is a process that holds one store's client. It reads requests from its standard input and writes answers to its standard
output, one JSON object per line, and it ends with its standard input. Its first line reports that the client is connected.

    {"client": "redis 8.1.0"}                                           ◄── ready
    {"op": "get", "cold": false, "value_bytes": 1048576, "threads": 4,  ──►
     "batch": 8, "seconds": 1.0, "pids": [17, 18]}
    {"bytes": 1879048192, "seconds": 1.02, "cpu_seconds": 1.3}          ◄── or {"error": "…"}

A request is answered by passes: a pass puts or gets values of the size of an area once. All threads start a pass together. Only the
time and the processor time of the passes count. Between them the worker clears the target, compares every byte that a get delivered
with the source, and removes the values that a put stored. The first pass does not count. For a get from memory it brings the values into
memory. The values of the first pass of a put are read back and compared.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


class Area:
    """Memory that values are put from or loaded into, on transparent huge pages where the machine has them."""

    def __init__(self, length: int) -> None:
        self.length = length
        # Python's default is shared memory, which gets huge pages only if the administrator allows them for shmem.
        self.map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


class Store:
    """One store's client. Several threads call put and get at once; `caller` is the number of the thread."""

    # A get from disk cycles through this number of areas of values. One area is enough where drop_cached empties the cache.
    cold_areas = 1

    def __init__(self, source: Area, target: Area, options: dict[str, Any]) -> None:
        self.source = source
        self.target = target

    def put(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        """Store a value for each key, from these offsets of the source. Raises if one is not stored."""
        raise NotImplementedError

    def get(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        """Load the value of each key to these offsets of the target. Raises if one is absent."""
        raise NotImplementedError

    def remove(self, keys: Sequence[str], value_bytes: int) -> None:
        """Remove these keys, which were put."""
        raise NotImplementedError

    def drop_cached(self) -> None:
        """Write the store's dirty pages back and drop its pages from the kernel's cache, so that no later pass does either."""


class Directory(Store):
    """A store that keeps a file for each value below a directory. Files are removed as files: not every client can remove one key."""

    def __init__(self, source: Area, target: Area, options: dict[str, Any]) -> None:
        super().__init__(source, target, options)
        self.directory = Path(options["directory"])
        self.directory.mkdir(parents=True, exist_ok=True)

    def files(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.directory) as entries:
            yield from (e for e in entries if e.is_file())

    def drop_cached(self) -> None:
        for entry in self.files():
            fd = os.open(entry.path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def remove(self, keys: Sequence[str], value_bytes: int) -> None:
        wanted = set(keys)
        removed = 0
        for entry in list(self.files()):
            if self.key_of(entry.name) in wanted:
                os.unlink(entry.path)
                removed += 1
        if removed != len(wanted):
            raise RuntimeError(f"{self.directory} has {removed} of the files of {len(wanted)} values")

    def key_of(self, name: str) -> str:
        """Return the key whose value is in the file of this name."""
        raise NotImplementedError


class Worker:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.stored: set[tuple[int, int]] = set()  # value_bytes and area of the values that gets read
        self.puts = 0
        self.next_area = 0

    def serve(self, client: str, answers: Any) -> None:
        print(json.dumps({"client": client}), file=answers, flush=True)
        for line in sys.stdin:
            try:
                answer = self.answer(json.loads(line))
            except Exception as e:
                answer = {"error": f"{type(e).__name__}: {e}"}
            print(json.dumps(answer), file=answers, flush=True)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        total = Total(request["pids"])
        run = Run(self.store, request["value_bytes"], request["threads"], request["batch"])
        cold = request["cold"]
        warm = True
        while total.bytes == 0 or total.seconds < request["seconds"]:
            counted = None if warm else total
            if request["op"] == "put":
                self.put_pass(run, counted)
            else:
                self.get_pass(run, cold, counted)
            warm = False
        return {"bytes": total.bytes, "seconds": total.seconds, "cpu_seconds": total.cpu}

    def put_pass(self, run: Run, total: Total | None) -> None:
        self.puts += 1
        keys = run.names(f"put-{self.puts}")
        run.passes(self.store.put, keys, 0, total)
        self.store.drop_cached()
        if total is None:
            self.read(run, keys, 0, None)
        self.store.remove(keys, run.value_bytes)

    def get_pass(self, run: Run, cold: bool, total: Total | None) -> None:
        areas = self.store.cold_areas if cold else 1
        for area in range(areas):
            if (run.value_bytes, area) not in self.stored:
                run.passes(self.store.put, run.names(f"get-{area}"), area, None)
                self.store.drop_cached()
                self.stored.add((run.value_bytes, area))
        if cold:
            self.next_area += 1
            self.store.drop_cached()
        area = self.next_area % areas
        self.read(run, run.names(f"get-{area}"), area, total)

    def read(self, run: Run, keys: Sequence[str], shift: int, total: Total | None) -> None:
        """Get the values of an area, and compare each byte with the stored byte."""
        target = self.store.target.address
        _libc.memset(target, 0, self.store.target.length)
        run.passes(self.store.get, keys, 0, total)
        for i in range(run.values):
            place = target + i * run.value_bytes
            if _libc.memcmp(place, self.store.source.address + run.source(i, shift), run.value_bytes):
                raise RuntimeError(f"the value of {keys[i]} differs from the stored value")


class Total:
    """The time and the processor time of the counted passes of a request."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.bytes = 0
        self.seconds = 0.0
        self.cpu = 0.0
        # The kernel's clock of the processor time of a process: linux/posix-timers.h, CPUCLOCK_SCHED.
        self.clocks = [time.CLOCK_PROCESS_CPUTIME_ID, *((~pid << 3) | 2 for pid in pids)]

    def cpu_now(self) -> float:
        return sum(time.clock_gettime(clock) for clock in self.clocks)


# Store.put or Store.get.
Move = Callable[[int, Sequence[str], Sequence[int], int], None]


class Run:
    """How a pass goes through the area: which thread moves which values, in which batches."""

    def __init__(self, store: Store, value_bytes: int, threads: int, batch: int) -> None:
        self.store = store
        self.value_bytes = value_bytes
        self.values = store.source.length // value_bytes
        self.threads = threads
        self.batch = batch
        if self.values == 0 or self.values % (threads * batch):
            raise ValueError(f"{threads} threads with batches of {batch} do not divide {self.values} values")

    def names(self, prefix: str) -> list[str]:
        return [f"{prefix}-{self.value_bytes}-{i}" for i in range(self.values)]

    def source(self, i: int, shift: int) -> int:
        """Return the offset of value i in the source. Values of equal number in several areas differ by the shift."""
        return (i + shift) % self.values * self.value_bytes

    def passes(
        self, move: Callable[[int, Sequence[str], Sequence[int], int], None], keys: Sequence[str], shift: int, total: Total | None
    ) -> None:
        """Do one pass, and add it to total if one is given."""
        offsets = [self.source(i, shift) for i in range(self.values)]
        barrier = threading.Barrier(self.threads + 1)
        failures: list[BaseException] = []
        share = self.values // self.threads

        def part(caller: int) -> None:
            barrier.wait()
            try:
                for at in range(caller * share, (caller + 1) * share, self.batch):
                    move(caller, keys[at : at + self.batch], offsets[at : at + self.batch], self.value_bytes)
            except BaseException as e:
                failures.append(e)
            barrier.wait()

        threads = [threading.Thread(target=part, args=(caller,)) for caller in range(self.threads)]
        for thread in threads:
            thread.start()
        cpu = 0.0 if total is None else total.cpu_now()
        start = time.perf_counter()
        barrier.wait()
        barrier.wait()
        seconds = time.perf_counter() - start
        if total is not None:
            total.cpu += total.cpu_now() - cpu
            total.seconds += seconds
            total.bytes += self.values * self.value_bytes
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def main(make: Callable[[Area, Area, dict[str, Any]], Store], package: str | None = None) -> None:
    """Run a worker. Its only argument is a JSON object of options, which make gets. The package is that of the store's client."""
    # Libraries print to standard output too, so answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    source, target = Area(options["area_bytes"]), Area(options["area_bytes"])
    source.view[:] = random.Random(1).randbytes(source.length)
    client = f"Python {sys.version.split()[0]}" if package is None else f"{package} {importlib.metadata.version(package)}"
    Worker(make(source, target, options)).serve(client, answers)
    # Some clients have threads that do not end.
    os._exit(0)

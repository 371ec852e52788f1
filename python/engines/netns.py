"""Network namespaces on this machine, which stand for hosts: switches join them, and each port of a switch has a rate. They need root.

    Namespace "p0"  storage 10.80.0.2/24 ══ 40 Mbit/s each way ══╗
    Namespace "d0"  storage 10.80.0.3/24 ══ 40 Mbit/s each way ══╬ Switch
    Namespace "n0"  storage 10.80.0.4/24 ═════════ no limit ═════╝

The namespaces have no names in the file system, so nothing of them is left when the process ends: the kernel removes a namespace with
its last user. The interfaces and routes of the namespace in which the process was started do not change.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_OWN = "/proc/thread-self/ns/net"
_LIBC = ctypes.CDLL(None, use_errno=True)

# The burst of a rate has room for the largest packet that a socket sends, 64 KiB and headers.
_BURST_BYTES = 128 << 10
_QUEUE_BYTES = 256 << 10


def _check(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}; network namespaces need root")


def _make() -> int:
    """Move the calling thread into a new namespace and return a file descriptor of the namespace."""
    _check(_LIBC.unshare(_CLONE_NEWNET), "unshare")
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


class Namespace:
    """A network namespace with a loopback interface. It exists until ``close`` and until the last process in it has ended."""

    def __init__(self) -> None:
        with ThreadPoolExecutor(1) as thread:
            self._fd = thread.submit(_make).result()
        self.run("ip", "link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """The file of the namespace for setns(2), also for other processes."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Move the calling thread into the namespace until the block ends. Sockets, processes and threads that it makes belong to it."""
        home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_LIBC.setns(self._fd, _CLONE_NEWNET), "setns")
            try:
                yield
            finally:
                _check(_LIBC.setns(home, _CLONE_NEWNET), "setns")
        finally:
            os.close(home)

    def run(self, *command: str) -> str:
        """Run a command in the namespace and return its standard output."""
        with self.inside():
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr}")
        return done.stdout

    def close(self) -> None:
        os.close(self._fd)


class Nic:
    """An interface of a namespace, which a cable joins with a port of a switch."""

    def __init__(self, namespace: Namespace, device: str, switch: Namespace, port: str, address: str) -> None:
        self.address = address
        self._ends = ((namespace, device), (switch, port))

    def limit(self, bits: int) -> None:
        """Limit each direction to a rate, in bits per second."""
        shape = ("root", "tbf", "rate", f"{bits}bit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES))
        for namespace, device in self._ends:
            namespace.run("tc", "qdisc", "replace", "dev", device, *shape)

    def unplug(self) -> None:
        """Take the link down, as a cable that is pulled at the switch does."""
        switch, port = self._ends[1]
        switch.run("ip", "link", "set", port, "down")

    def plug(self) -> None:
        """Take the link up again."""
        switch, port = self._ends[1]
        switch.run("ip", "link", "set", port, "up")

    def received(self) -> int:
        """Return how many bytes the interface has received since it was made, with headers."""
        namespace, device = self._ends[0]
        (link,) = json.loads(namespace.run("ip", "-json", "-statistics", "link", "show", "dev", device))
        count: int = link["stats64"]["rx"]["bytes"]
        return count


class Switch:
    """A switch, whose ports are in a namespace of their own. ``network`` is the first three bytes of the addresses, as in 10.80.0."""

    def __init__(self, name: str, network: str) -> None:
        self._name = name
        self._network = network
        self._namespace = Namespace()
        self._ports = 0
        self._namespace.run("ip", "link", "add", "bridge", "type", "bridge")
        self._namespace.run("ip", "link", "set", "bridge", "up")

    def connect(self, namespace: Namespace, bits: int = 0) -> Nic:
        """Give a namespace an interface with the next address, named as the switch, and a rate in bits per second. 0 is no limit."""
        self._ports += 1
        port, address = f"port{self._ports}", f"{self._network}.{self._ports}"
        peer = ("peer", "name", self._name, "netns", namespace.path)
        self._namespace.run("ip", "link", "add", port, "type", "veth", *peer)
        self._namespace.run("ip", "link", "set", port, "master", "bridge", "up")
        namespace.run("ip", "address", "add", f"{address}/24", "dev", self._name)
        namespace.run("ip", "link", "set", self._name, "up")
        nic = Nic(namespace, self._name, self._namespace, port, address)
        if bits:
            nic.limit(bits)
        return nic

    def close(self) -> None:
        self._namespace.close()

"""Redis through bare sockets: all requests of a batch are sent first, and each value is received straight into its destination."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from worker import Area, Store, main


class Sockets(Store):
    def __init__(self, source: Area, target: Area, options: dict[str, Any]) -> None:
        super().__init__(source, target, options)
        self.connections = [socket.create_connection(("127.0.0.1", options["port"])) for _ in range(options["threads"])]
        for connection in self.connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        connection = self.connections[caller]
        for key, offset in zip(keys, offsets, strict=True):
            connection.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key.encode(), value_bytes))
            connection.sendall(self.source.view[offset : offset + value_bytes])
            connection.sendall(b"\r\n")
        for _ in keys:
            self.expect(connection, b"+OK\r\n")

    def get(self, caller: int, keys: Sequence[str], offsets: Sequence[int], value_bytes: int) -> None:
        connection = self.connections[caller]
        connection.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key.encode()) for key in keys))
        for offset in offsets:
            self.expect(connection, b"$%d\r\n" % value_bytes)
            self.receive(connection, self.target.view[offset : offset + value_bytes])
            self.expect(connection, b"\r\n")

    def remove(self, keys: Sequence[str], value_bytes: int) -> None:
        connection = self.connections[0]
        for key in keys:
            connection.sendall(b"*2\r\n$3\r\nDEL\r\n$%d\r\n%s\r\n" % (len(key), key.encode()))
            self.expect(connection, b":1\r\n")

    def expect(self, connection: socket.socket, want: bytes) -> None:
        got = bytearray(len(want))
        self.receive(connection, memoryview(got))
        if got != want:
            raise RuntimeError(f"Redis answered {bytes(got)!r}, want {want!r}")

    def receive(self, connection: socket.socket, into: memoryview) -> None:
        while into:
            n = connection.recv_into(into, 0, socket.MSG_WAITALL)
            if n == 0:
                raise RuntimeError("Redis closed the connection")
            into = into[n:]


if __name__ == "__main__":
    main(Sockets)

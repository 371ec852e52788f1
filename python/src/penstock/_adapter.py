"""Shared code of the engine adapters: options, namespace names, block ids, and the connection in the background."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import hashlib
import importlib
import json
import logging
import os
import queue
import re
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib import metadata
from typing import Any, Generic, TypedDict, TypeVar

from penstock import errors
from penstock._store import Namespace, Store

__all__ = ["Chain", "Connection", "Counters", "Link", "canonical", "digest", "namespace_name", "options", "release", "row"]

_T = TypeVar("_T")
_R = TypeVar("_R")

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclasses.dataclass(frozen=True)
class Connection:
    """Options of every adapter. An option NAME that is not given is read from the variable PENSTOCK_NAME. Times are in seconds."""

    servers: str = ""
    """``host:port`` of each node, separated by commas or as a list; spelled the same in every engine."""
    discover: bool = False
    """The servers are some members of a cluster, whose other members the adapter finds. The same in every engine."""
    zone: str | None = None
    """The zone of this host. Of the replicas of a block, one in the same zone is read first."""
    token: str | None = None
    token_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    insecure: bool = False
    """Send the token in plaintext to hosts that are not loopback."""
    tenant: str = ""
    namespace: str = ""
    """First part of the namespaces' names. Empty: the name of the model and a digest of all facts that determine the
    bytes."""
    connect_timeout: float = 5.0
    """Time for which the start waits for the nodes. After that the engine serves without the cache until a node answers."""
    retry_interval: float = 5.0
    """Time for which an adapter sends nothing to nodes that did not answer."""

    def open(self, *, timeout: float | None = None, any_memory: bool = True, jobs_max: int = 0, jobs_parallel: int = 0) -> Store:
        return Store(
            self.servers, token=self.token, token_file=self.token_file, ca_file=self.ca_file, cert_file=self.cert_file,
            key_file=self.key_file, insecure=self.insecure, timeout=timeout, any_memory=any_memory, jobs_max=jobs_max,
            jobs_parallel=jobs_parallel,
            dial_timeout=self.connect_timeout, dead_for=self.retry_interval, discover=self.discover,
            zone=self.zone,
        )  # fmt: skip


def options(kind: type[_T], given: Mapping[str, Any], *, where: str, environ: Mapping[str, str] = os.environ) -> _T:
    """Return the dataclass kind. Values come from given, then from PENSTOCK_* variables, then from the defaults.

    Raises InvalidError with the name of the option if one is unknown, has another type, or is missing.
    """
    hints = typing.get_type_hints(kind)
    fields = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(fields)}"
            raise errors.InvalidError(f"{where}: unknown option {name!r}: {hint}")
    values = {}
    for name in fields:
        if name in given:
            values[name] = _convert(f"{where}: option {name!r}", given[name], hints[name])
        elif variable := environ.get(f"PENSTOCK_{name.upper()}", ""):
            values[name] = _convert(f"the variable PENSTOCK_{name.upper()}", variable, hints[name])
    if "servers" in fields and not values.get("servers"):
        raise errors.InvalidError(f"{where}: no option 'servers', and no variable PENSTOCK_SERVERS: give host:port of each node")
    return kind(**values)


def _convert(what: str, value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) is typing.Literal:
        if value in typing.get_args(hint):
            return value
        raise errors.InvalidError(f"{what}: {value!r}; want {' or '.join(map(repr, typing.get_args(hint)))}")
    kinds = typing.get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = next(k for k in kinds if k is not type(None))
    try:
        if kind is bool and isinstance(value, str):
            if value.lower() not in _TRUE + _FALSE:
                raise ValueError
            return value.lower() in _TRUE
        if kind is str and isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
            return ",".join(value)
        if kind in (int, float) and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            number = kind(value)
            if number < 0 or number != float(value):
                raise ValueError
            return number
        if kind in (str, bool) and isinstance(value, kind):
            return value
    except ValueError:
        pass
    raise errors.InvalidError(f"{what}: {value!r}; want {'a number of at least 0' if kind in (int, float) else kind.__name__}")


def digest(facts: Mapping[str, Any]) -> str:
    """Return 32 hexadecimal digits for facts of JSON's types. Equal facts have equal digests in every process."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def namespace_name(given: str, model: str, facts: Mapping[str, Any], part: str) -> str:
    """Return the name of a namespace: given/part, or model-DIGEST/part if nothing is given.

    With a given name, engines whose facts differ get a MismatchError; without one they get namespaces of their own.
    """
    if not given:
        last = os.path.basename(os.path.normpath(model)) or "model"
        given = re.sub(r"[^A-Za-z0-9._-]", "-", last)[:64] + "-" + digest(facts)[:16]
    return f"{given}/{part}"


def canonical(value: object) -> bytes:
    """Return bytes for a value of None, bool, int, str, bytes, and tuples or lists of those. They are equal in every
    process.

    Raises InvalidError for any other type, because its text may contain an address.
    """
    if isinstance(value, (list, tuple)):
        return b"(" + b",".join(map(canonical, value)) + b")"
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return ascii(value).encode()
    raise errors.InvalidError(f"{value!r} of type {type(value).__name__} cannot be part of a block's id")


class Chain:
    """Penstock's own ids of a prompt's whole blocks, computed as tokens are added (Namespace.chain).

    Facts other than tokens that determine the KV (LoRA, a cache salt, hashes of images) are an extra of the block in which
    they begin. An extra that differs from the extra of the preceding block is hashed in front of the block, and changes all
    following ids.
    """

    SIZE = 16

    def __init__(self, ns: Namespace, block_tokens: int) -> None:
        self._ns = ns
        self._block = block_tokens
        self._extra = b""
        self.ids = bytearray()

    def __len__(self) -> int:
        return len(self.ids) // self.SIZE

    def extend(self, tokens: Sequence[int], extra: Callable[[int, int], object] | None = None) -> int:
        """Take all tokens of the prompt so far and return the number of whole blocks.

        extra is called with the index of the first token of a block and the index after its last token.
        """
        done, total = len(self), len(tokens) // self._block
        while done < total:
            salt, until = b"", total
            if extra is not None:
                salt = self._change(extra, done)
                until = done + 1
                while until < total and self._peek(extra, until) == self._extra:
                    until += 1
            parent = bytes(self.ids[-self.SIZE :]) if self.ids else None
            run = self._ns.chain(tokens[done * self._block : until * self._block], parent=parent, extra=salt)
            self.ids += run.blob
            done = until
        return total

    def _peek(self, extra: Callable[[int, int], object], block: int) -> bytes:
        value = extra(block * self._block, (block + 1) * self._block)
        return b"" if value is None else canonical(value)

    def _change(self, extra: Callable[[int, int], object], block: int) -> bytes:
        before, self._extra = self._extra, self._peek(extra, block)
        if self._extra == before:
            return b""
        return self._extra or canonical(None)


class Link(Generic[_T]):
    """Opens an object in a thread of its own, so that no thread of the engine waits for a node.

    It retries after ``retry`` seconds while no node answers, and logs that once. Any other refusal (a wrong token, another
    geometry) is final: the engine serves without the cache, and ``refused`` has the reason.
    """

    def __init__(self, what: str, open_: Callable[[], _T], *, retry: float, log: logging.Logger) -> None:
        self._what = what
        self._open = open_
        self._retry = retry
        self._log = log
        self._calls: queue.SimpleQueue[Callable[[_T], None] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._settled = threading.Event()
        self._lock = threading.Lock()  # of _ended
        self._ended = False  # close was called: _calls takes no more calls
        self.value: _T | None = None
        """The opened object, or None."""
        self.refused: errors.Error | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-link", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Wait until the object is open or refused, and return whether it is open."""
        self._settled.wait(timeout)
        return self.value is not None

    def call(self, function: Callable[[_T], _R]) -> Future[_R]:
        """Call a function with the opened object, in the link's thread, as soon as the object is open."""
        future: Future[_R] = Future()

        def run(value: _T | None) -> None:
            try:
                if value is None:
                    raise self.refused or errors.ClosedError(f"{self._what}: closed")
                future.set_result(function(value))
            except BaseException as e:
                future.set_exception(e)

        with self._lock:
            if not self._ended:
                self._calls.put(run)
                return future
        future.set_exception(errors.ClosedError(f"{self._what}: closed"))
        return future

    def close(self) -> None:
        """End the thread, when it has performed the calls so far. The opened object stays open."""
        self._closing.set()
        with self._lock:
            self._ended = True
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._connect()
        self._settled.set()
        while (call := self._calls.get()) is not None:
            call(self.value)  # type: ignore[arg-type]

    def _connect(self) -> None:
        warned = False
        while not self._closing.is_set():
            try:
                self.value = self._open()
            except (errors.UnavailableError, errors.TimedOutError) as e:
                if not warned:
                    self._log.warning("%s: %s. The engine serves without the cache until a node answers", self._what, e)
                warned = True
                self._closing.wait(self._retry)
            except errors.Error as e:
                self._log.error("%s: %s. The engine serves without the cache", self._what, e)
                self.refused = e
                return
            except Exception as e:
                self._log.exception("%s: the engine serves without the cache", self._what)
                self.refused = errors.InternalError(f"{type(e).__name__}: {e}")
                return
            else:
                if warned:
                    self._log.warning("%s: the nodes answer", self._what)
                return


class Row(TypedDict):
    """The geometry of a value, as keywords of ``Store.namespace``."""

    block_tokens: int
    layers: int
    token_bytes: int


# The longest layer of a row, in bytes, if the row's length can be divided. Up to this length a layer is verified while it
# arrives.
_LAYER_BYTES = 1 << 20
_LAYERS_MAX = 1 << 12
_TOKEN_BYTES_MAX = 1 << 24


def row(length: int) -> Row:
    """Return the geometry, as keywords of ``Store.namespace``, of values that are opaque rows of length bytes."""
    if length < 1:
        raise errors.InvalidError(f"values of {length} bytes; want at least 1")
    divisors = [n for n in range(1, min(length, _LAYERS_MAX) + 1) if length % n == 0]
    layers = next((n for n in divisors if length // n <= _LAYER_BYTES), divisors[-1])
    if length // layers > _TOKEN_BYTES_MAX:
        raise errors.InvalidError(
            f"values of {length} bytes have no {_LAYERS_MAX} or fewer equal parts of at most {_TOKEN_BYTES_MAX} bytes"
        )
    return {"block_tokens": 1, "layers": layers, "token_bytes": length // layers}


def release(package: str) -> str:
    """Return major and minor version of an installed package. They are part of the facts that determine the stored
    bytes."""
    return ".".join(metadata.version(package).split(".")[:2])


class Counters:
    """Counts the events of an adapter, and logs the first event of each kind.

    If prometheus_client is installed, ``penstock_adapter_events_total`` has the counts with the labels adapter and event.
    """

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter
        self._log = logging.getLogger(f"penstock.{adapter}")
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._warned: set[str] = set()
        self._metric = _metric()

    def add(self, event: str, n: int = 1) -> None:
        with self._lock:
            self._counts[event] += n
        if self._metric is not None:
            self._metric.labels(self._adapter, event).inc(n)

    def __getitem__(self, event: str) -> int:
        return self._counts[event]

    def warn(self, kind: str, text: str) -> None:
        """Log a warning, once for each kind until ``settle``."""
        with self._lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        self._log.warning("%s", text)

    def settle(self, *kinds: str) -> None:
        """Log the next warning of these kinds again, because the cause of the last one has ended. No kinds means all
        kinds."""
        if not self._warned or (kinds and self._warned.isdisjoint(kinds)):
            return  # the usual case takes no lock
        with self._lock:
            self._warned.difference_update(kinds or tuple(self._warned))


_metric_lock = threading.Lock()
_metrics: list[Any] = []


def _metric() -> Any:
    """Return the counter of prometheus_client, or None."""
    with _metric_lock:
        if not _metrics:
            try:
                prometheus_client = importlib.import_module("prometheus_client")
            except ImportError:
                return None
            _metrics.append(
                prometheus_client.Counter("penstock_adapter_events", "Events of Penstock's engine adapters.", ["adapter", "event"])
            )
        return _metrics[0]

"""Penstock, a storage tier for KV cache in LLM inference: the client.

``Store`` opens a connection, ``Store.namespace`` one model's KV, and ``match``, ``get`` and ``put`` move blocks. The
library is loaded by the first Store, so importing this package in a process that forks is safe.
"""

from __future__ import annotations

from penstock._keys import Key, Keys
from penstock._memory import Buffer, Pointers, Tensor, Value
from penstock._store import (
    Calls,
    Cut,
    Group,
    GroupKind,
    Job,
    KeyResult,
    Lease,
    Match,
    Memory,
    Namespace,
    Result,
    Store,
)
from penstock.errors import (
    AuthError,
    BusyError,
    CanceledError,
    ClosedError,
    Error,
    ForkedError,
    InternalError,
    InvalidError,
    MismatchError,
    NotFoundError,
    ProviderError,
    TimedOutError,
    UnavailableError,
    UnregisteredError,
    VersionError,
)

__all__ = [
    "AuthError",
    "Buffer",
    "BusyError",
    "Calls",
    "CanceledError",
    "ClosedError",
    "Cut",
    "Error",
    "ForkedError",
    "Group",
    "GroupKind",
    "InternalError",
    "InvalidError",
    "Job",
    "Key",
    "KeyResult",
    "Keys",
    "Lease",
    "Match",
    "Memory",
    "MismatchError",
    "Namespace",
    "NotFoundError",
    "Pointers",
    "ProviderError",
    "Result",
    "Store",
    "Tensor",
    "TimedOutError",
    "UnavailableError",
    "UnregisteredError",
    "Value",
    "VersionError",
]

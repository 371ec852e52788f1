"""Penstock, a storage tier for KV cache in LLM inference: the client.

``Store`` opens a connection, and ``Store.namespace`` opens the KV of one model, whose ``match``, ``get`` and ``put``
transfer blocks. The first Store loads the library, so a process that imports this package may fork.
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

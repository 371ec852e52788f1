"""What the package raises.

Every exception of Penstock is an ``Error``. A miss, a node that is down and a store that is full are none: they are
results of a key.
"""

from __future__ import annotations

__all__ = [
    "AuthError",
    "BusyError",
    "CanceledError",
    "ClosedError",
    "Error",
    "ForkedError",
    "InternalError",
    "InvalidError",
    "MismatchError",
    "NotFoundError",
    "ProviderError",
    "TimedOutError",
    "UnavailableError",
    "UnregisteredError",
    "VersionError",
]


class Error(Exception):
    """Something that a person or a program has to act on."""


class InvalidError(Error, ValueError):
    """An argument cannot be: fix the caller."""


class ClosedError(Error):
    """The store, the namespace or the memory is closed."""


class ForkedError(Error, RuntimeError):
    """This process was forked from one that had loaded the library, whose threads it does not have.

    Open the store after the fork, or start the process with ``spawn``.
    """


class AuthError(Error):
    """The node does not accept the token or the certificate."""


class MismatchError(Error):
    """The namespace on the node has another geometry, index, tenant or salt, or its epoch has moved on."""


class NotFoundError(Error, LookupError):
    """There is no such namespace, lease or job."""


class UnavailableError(Error, ConnectionError):
    """No node answers, and the call has no result that says so."""


class BusyError(Error):
    """As many jobs as ``jobs_max`` allows are under way, or were not drained."""


class TimedOutError(Error, TimeoutError):
    """The time limit has passed. The memory is the caller's again."""


class CanceledError(Error):
    """``Job.cancel`` or ``Store.close`` ended the job. The memory is the caller's again."""


class UnregisteredError(InvalidError):
    """A value does not lie in memory that ``Store.register`` knows, and the store was opened with ``any_memory=False``."""


class ProviderError(Error):
    """The node moves bytes by another transfer engine than TCP, the only one that the library has."""


class VersionError(Error):
    """The node, or the library, is of another version than the package and lacks what was asked for."""


class InternalError(Error):
    """None of the others; the text says what."""


# By PENSTOCK_ERR_* of penstock.h.
BY_CODE: dict[int, type[Error]] = {
    1: InvalidError,
    2: ClosedError,
    3: ForkedError,
    4: AuthError,
    5: MismatchError,
    6: NotFoundError,
    7: UnavailableError,
    8: BusyError,
    9: TimedOutError,
    10: CanceledError,
    11: UnregisteredError,
    12: ProviderError,
    13: VersionError,
    14: InternalError,
}

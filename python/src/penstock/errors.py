"""The exceptions of the package.

All of them derive from ``Error``. A miss, a node that is down and a full node raise no exception: the result of the key
(``KeyResult``) reports them.
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
    "RefusedError",
    "TimedOutError",
    "UnavailableError",
    "UnregisteredError",
    "VersionError",
]


class Error(Exception):
    """The base of all exceptions. The calling program or an operator has to react to it."""


class InvalidError(Error, ValueError):
    """An argument is invalid. Fix the caller."""


class ClosedError(Error):
    """The store, the namespace or the memory is closed."""


class ForkedError(Error, RuntimeError):
    """This process was forked from a process that had loaded the library. The library's threads do not exist here.

    Open the store after the fork, or start the process with ``spawn``.
    """


class AuthError(Error):
    """The node does not accept the token or the certificate."""


class MismatchError(Error):
    """The node's namespace has another geometry, index, tenant, salt or epoch."""


class NotFoundError(Error, LookupError):
    """The namespace, lease or job does not exist."""


class UnavailableError(Error, ConnectionError):
    """A required node does not answer, and the call has no KeyResult to report that. Or the engine on the other side of a
    job of a Traffic does not answer.
    """


class BusyError(Error):
    """``jobs_max`` jobs are running or not drained, the memory is in use, or another limit of the text is reached."""


class TimedOutError(Error, TimeoutError):
    """The time limit has passed. The library no longer uses the memory of the call."""


class CanceledError(Error):
    """``Job.cancel`` or ``Store.close`` ended the job, and the library no longer uses its memory. Or a job of a Traffic was
    cancelled, on this side or on the other.
    """


class UnregisteredError(InvalidError):
    """A value does not lie in registered memory, and the store was opened with ``any_memory=False``."""


class ProviderError(Error):
    """The node's data plane is not TCP, the only one of this library."""


class VersionError(Error):
    """The node is of another version than the library: run the same release of Penstock on both sides. Or the library's
    version does not fit the package.
    """


class InternalError(Error):
    """Another error; see its text."""


class RefusedError(Error):
    """The planner refuses the request; the text has its reason."""


# The exception of each PENSTOCK_ERR_* of penstock.h.
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
    15: RefusedError,
}

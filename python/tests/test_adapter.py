from __future__ import annotations

import logging

import pytest

from penstock import ClosedError, InternalError
from penstock._adapter import Counters, Link


def test_warnings_are_logged_once_until_their_cause_ends(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters("test")

    def warned() -> list[str]:
        caplog.clear()
        for kind in ("down", "full"):
            counters.warn(kind, kind)
        return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]

    assert warned() == ["down", "full"]
    assert warned() == []
    counters.settle("down", "other")
    assert warned() == ["down"]
    counters.settle("other")
    assert warned() == []
    counters.settle()
    assert warned() == ["down", "full"]


def test_calls_of_a_link_end(caplog: pytest.LogCaptureFixture) -> None:
    """A call ends also if the object could not be opened for an unforeseen reason, and if the link is closed."""

    def broken() -> dict[str, int]:
        raise RuntimeError("a defect")

    log = logging.getLogger("test")
    refused = Link("a link", broken, retry=0, log=log)
    assert not refused.wait(10)
    with pytest.raises(InternalError, match="a defect"):
        refused.call(len).result(10)
    assert any("the engine serves without the cache" in r.getMessage() for r in caplog.records)
    opened: Link[dict[str, int]] = Link("a link", dict, retry=0, log=log)
    assert opened.wait(10)
    assert opened.call(len).result(10) == 0
    for link in (refused, opened):
        link.close()
        with pytest.raises(ClosedError):
            link.call(len).result(10)

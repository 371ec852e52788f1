from __future__ import annotations

import logging

import pytest

from penstock._adapter import Counters


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

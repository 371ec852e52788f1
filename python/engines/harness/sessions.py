"""Sessions of coding agents from a recorded trace, scaled down to a tiny model.

The trace has no text: a request is a list of block ids, and two requests share a prefix where their ids are equal.
One token stands for several neighbouring blocks, so prompts are short and share prefixes as the recorded ones do,
context resets and sub-agents included.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness.model import FIRST_TOKEN, VOCABULARY

_TRACE = "kv_cache_tester_agentic.jsonl.gz"
_SAMPLE = Path(__file__).resolve().parents[3] / "internal/trace/sample/agentic_sample.jsonl.gz"


class Turn(NamedTuple):
    prompt: list[int]
    """Token ids of the whole prompt: context and what the turn adds."""
    output: int
    """How many tokens to generate."""


class Session(NamedTuple):
    name: str
    turns: list[Turn]


def sessions(count: int, *, turns: int = 4, tokens: int = 512, output: int = 8) -> list[Session]:
    """Return the first ``count`` sessions of the trace that have ``turns`` turns or more. Each session ends after these turns.

    No prompt is longer than ``tokens``, and the longest prompt of a session has at least half as many.

    The trace is in the directory that PENSTOCK_TRACES names. Without it, the sample in the repository stands in, whose
    32 sessions repeat with other tokens.
    """
    found: list[Session] = []
    for name, requests in _recorded():
        if len(found) == count:
            break
        if len(requests) >= turns:
            found.append(_scale(name, requests[:turns], tokens, output))
    if len(found) < count:
        raise ValueError(f"the trace has {len(found)} sessions of {turns} turns, not {count}")
    return found


def turn(agents: list[Session], k: int) -> list[list[int]]:
    """Return the prompt of a turn of each session."""
    return [session.turns[k].prompt for session in agents]


def _recorded() -> Iterator[tuple[str, list[Any]]]:
    """Yield the name and the requests of each session."""
    directory = os.environ.get("PENSTOCK_TRACES", "")
    file = Path(directory) / _TRACE
    repeat = 1
    if not directory or not file.exists():
        file, repeat = _SAMPLE, 100
    for round_ in range(repeat):
        with gzip.open(file, "rt") as lines:
            for line in lines:
                record = json.loads(line)
                yield f"{record['id']}/{round_}", record["reqs"]


def _scale(name: str, requests: list[Any], tokens: int, output: int) -> Session:
    prompts = []
    for agent, _, _, _, _, _, runs in requests:
        ids = [i for first, n in zip(runs[::2], runs[1::2], strict=True) for i in range(first, first + n)]
        prompts.append((agent, ids))
    blocks = max(len(ids) for _, ids in prompts)
    each = -(-blocks // tokens)  # blocks that one token stands for
    turns = []
    for agent, ids in prompts:
        # Where the trace is shorter than the prompts that are wanted, a block becomes several tokens.
        many = max(1, tokens // blocks)
        prompt = [_token(name, agent, ids[i], k) for i in range(0, len(ids), each) for k in range(many)]
        turns.append(Turn(prompt or [FIRST_TOKEN], output))
    return Session(name, turns)


def _token(session: str, agent: str, block: int, part: int) -> int:
    digest = hashlib.sha256(f"{session} {agent} {block} {part}".encode()).digest()
    return FIRST_TOKEN + int.from_bytes(digest[:4], "little") % (VOCABULARY - FIRST_TOKEN)

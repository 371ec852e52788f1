"""Dual path on torch tensors, in device memory or in host memory, without an inference engine.

    controller: storage node, planner, gateway
        ├── prefill process  ──┐  each has the scheduler and the worker of PenstockDualPath,
        └── decode process   ──┘  and a model whose KV is a hash of the tokens

Each process takes the steps that vLLM takes: prompts are computed in chunks, layer by layer, in torch's stream. The processes compare
the KV of cached prefixes in each layer, and a decode process that of whole prompts in all layers, with what the CPU computes. The prefill
process is killed in the middle of a prompt, and another one takes its place. The figures go to standard output as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from penstock import Event, EventKind, Gateway, Namespace, Role, Store, _adapter, testing
from penstock._cluster import Nic
from penstock.vllm._extra import Extras
from penstock.vllm._pd_plan import Options
from penstock.vllm._pd_scheduler import Scheduler
from penstock.vllm._pd_worker import Worker

TOKENS = 16  # of a block
WAIT = 120.0  # seconds; only a failure reaches the limit
SESSIONS = 4
OUTPUT = 2 * TOKENS + 3
MASK = (1 << 63) - 1


class Size(NamedTuple):
    layers: int
    row: int  # bytes of a token in a layer
    blocks: int  # of the KV cache
    prompt: int  # tokens of a first turn
    chunk: int  # tokens that a step computes of a prompt, at most
    buffer_mib: int
    node: dict[str, Any]

    @property
    def block_bytes(self) -> int:
        return self.layers * TOKENS * self.row


SIZES = {
    "small": Size(4, 256, 256, 200, 72, 8, {}),
    "large": Size(16, 4096, 2048, 2005, 704, 1024, {"capacity": "8GiB", "arena": "1GiB"}),
}


class FullAttentionSpec:
    block_size = TOKENS
    num_kv_heads = 1


def extended(states: list[int], tokens: Sequence[int]) -> list[int]:
    """Return the states of a sequence: the state of a token depends on all tokens up to it. ``states`` are those of the first tokens."""
    states = list(states)
    for token in tokens[len(states) :]:
        states.append(((states[-1] if states else 1) * 6364136223846793005 + token + 1) & MASK)
    return states


def following(state: int) -> int:
    """Return the token that the model generates after a token."""
    return state >> 40


def rows(states: torch.Tensor, layer: int, row: int) -> torch.Tensor:
    """Return the KV of tokens in a layer, a row of bytes for each."""
    x = states[:, None] * -7046029254386353131 + torch.arange(row // 8, device=states.device) * 2862933555777941757
    x = x + (layer * 3935559000370003845 & MASK)
    return ((x ^ (x >> 29)) * -4658895280553007687).contiguous().view(torch.uint8)


# -- an engine


@dataclass
class Request:
    """The part of vLLM's Request that the connector uses, and the engine's state of it."""

    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: dict[str, Any]
    output: int
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    blocks: list[int] = field(default_factory=list)
    waits: bool = False  # for an asynchronous load
    states: list[int] = field(default_factory=list)
    begun: float = 0.0  # decode: the time at which its load begins
    steps: int = 0  # that have computed a part of it
    wrong: Any = 0  # a tensor: rows of the cached prefix that differ, in the first step

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Engine:
    """The scheduler, the worker and the model of one process."""

    def __init__(self, size: Size, device: str, name: str, role: Role, node: str, planner: str) -> None:
        self.size, self.device, self.name, self.role = size, device, name, role
        self.kv = torch.zeros(size.layers, size.blocks, TOKENS, size.row, dtype=torch.uint8, device=device)
        self.layers = [f"model.layers.{i}" for i in range(size.layers)]
        limits: dict[str, Any] = {f"{what}_timeout": WAIT for what in ("connect", "start", "request", "job", "layer", "append")}
        o = Options(servers=node, planner=planner, engine=name, machine=name, namespace="device", buffer_mib=size.buffer_mib, **limits)
        counters = _adapter.Counters(name)
        self.worker = Worker(o, counters, role=role, broadcast=lambda spans: None)
        config = SimpleNamespace(
            num_blocks=size.blocks, kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=self.layers)]
        )
        self.worker.register(dict(zip(self.layers, self.kv, strict=True)), config, {}, {"model": "rows"}, 0, 1)
        self.side = Scheduler(o, counters, role=role, extras=Extras(lambda request, start, end: None, None))
        self.side.attach(self.worker.definitions, 1)
        self.free = list(range(1, size.blocks))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.held: dict[str, Request] = {}  # finished requests whose blocks the connector still uses
        self.halt = -1  # the layer at which the engine halts in a step that is not the first one of its prompt
        self.wrong = self.compared = 0  # rows
        self.loads: list[tuple[float, float, int]] = []  # begin, end and bytes of each prompt that a decode engine has received
        self.nics: dict[int, list[Nic]] = {}

    def add(self, request: Request) -> None:
        self.side.arrived(request)
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        for request in [*self.waiting, *self.running]:
            if request.request_id == request_id:
                self._finish(request)

    def _finish(self, request: Request) -> None:
        for requests in (self.waiting, self.running):
            if request in requests:
                requests.remove(request)
        if self.side.finished(request) or request.waits:
            self.held[request.request_id] = request
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        # A transfer that still uses these blocks sends or overwrites these bytes, and a comparison fails.
        if request.blocks:
            self.kv[:, request.blocks] = 0xCC
        self.free += request.blocks
        request.blocks = []

    def _take(self, request: Request, blocks: int) -> None:
        n = blocks - len(request.blocks)
        taken, self.free = self.free[: max(0, n)], self.free[max(0, n) :]
        assert len(taken) == max(0, n), "the engine has no block left"
        request.blocks += taken

    def _rows(self, request: Request, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a layer's memory that tokens have, and the states of the tokens."""
        at = torch.arange(start, end, device=self.device)
        blocks = torch.tensor(request.blocks, dtype=torch.int64, device=self.device)
        return blocks[at // TOKENS] * TOKENS + at % TOKENS, torch.tensor(request.states[start:end], dtype=torch.int64, device=self.device)

    def _compute(self, request: Request, layer: int, start: int, end: int) -> None:
        memory = self.kv[layer].view(-1, self.size.row)
        if self.role == Role.PREFILL and request.steps == 0:
            places, states = self._rows(request, 0, start)
            request.wrong = request.wrong + (memory[places] != rows(states, layer, self.size.row)).any(1).sum()
        if self.device != "cpu":  # the stream is behind the process, so that an early copy has other bytes
            a = torch.ones(2048, 2048, device=self.device)
            for _ in range(8):
                a = (a @ a).clamp(max=1)
        places, states = self._rows(request, start, end)
        memory[places] = rows(states, layer, self.size.row)

    def _forward(self, scheduled: dict[str, int]) -> None:
        for layer, name in enumerate(self.layers):
            if layer == self.halt and any(request.steps for request in self.running):
                reply(halted=self.name)
                signal.pause()
            self.worker.wait_for_layer(name)
            for request in self.running:
                start = request.num_computed_tokens
                self._compute(request, layer, start, start + scheduled[request.request_id])
            self.worker.save_layer(name)

    def step(self) -> None:
        for request in list(self.waiting):
            if request.waits:
                continue
            if request.num_computed_tokens == 0:  # it has no load yet
                tokens, later = self.side.lookup(request, 0)
                if tokens is None:
                    continue
                request.states = extended(request.states, request.all_token_ids)
                request.num_computed_tokens = tokens
                if later:
                    self._take(request, -(-request.num_tokens // TOKENS))
                    request.waits, request.begun = True, time.monotonic()
                    self.side.allocated(request, [request.blocks], tokens)
                    continue
            self.waiting.remove(request)
            self.running.append(request)
        scheduled = {}
        for request in self.running:
            n = scheduled[request.request_id] = min(self.size.chunk, request.num_tokens - request.num_computed_tokens)
            self._take(request, -(-(request.num_computed_tokens + n) // TOKENS))
        by_id = {r.request_id: r for r in self.running}
        self.worker.begin(self.side.plan(scheduled, lambda name: [by_id[name].blocks]))
        if self.running:
            self._forward(scheduled)
        self.worker.end()
        self.worker.poll()
        failed = self.worker.take_failed()
        for request in list(self.running):
            self._computed(request, scheduled[request.request_id], bool(failed.intersection(request.blocks)))
        report = self.worker.take_report()
        if report is not None:
            self.nics.update(report.nics)
            self.side.update(report)
        for name in self.worker.take_loaded():
            if name in self.held:
                self._release(self.held.pop(name))
            else:
                self._loaded(next(r for r in self.waiting if r.request_id == name), failed)
        for name in self.worker.take_freed():
            self._release(self.held.pop(name))

    def _computed(self, request: Request, tokens: int, failed: bool) -> None:
        """Take note of what a step has computed of a request."""
        if failed:
            request.num_computed_tokens = request.wrong = 0
            return
        if self.role == Role.PREFILL and request.steps == 0:
            self.wrong += int(request.wrong)
            self.compared += request.num_computed_tokens * self.size.layers
        request.steps += 1
        request.num_computed_tokens += tokens
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids = [*request.all_token_ids, following(request.states[-1])]
            request.states = extended(request.states, request.all_token_ids)
            request.num_output_tokens += 1
            if request.num_output_tokens == request.output:
                if self.role == Role.DECODE:
                    reply(finished=request.request_id, tokens=request.all_token_ids)
                self._finish(request)

    def _loaded(self, request: Request, failed: set[int]) -> None:
        """Take note of the end of a load on a decode engine, and compare the prompt with what the CPU computes."""
        request.waits = False
        if failed.intersection(request.blocks):
            self._release(request)
            request.num_computed_tokens = 0
            return
        self.loads.append((request.begun, time.monotonic(), len(request.blocks) * self.size.block_bytes))
        request.num_computed_tokens = request.num_tokens - 1  # the last token is computed again, for the first output
        places, states = self._rows(request, 0, request.num_tokens)
        for layer in range(self.size.layers):
            got = self.kv[layer].view(-1, self.size.row)[places].cpu()
            self.wrong += int((got != rows(states.cpu(), layer, self.size.row)).any(1).sum())
            self.compared += len(got)

    def serve(self, commands: queue.Queue[dict[str, Any]]) -> None:
        """Take steps until the controller ends the process."""
        while True:
            works = self.waiting or self.running or self.side.busy
            with contextlib.suppress(queue.Empty):
                command = commands.get(block=not works, timeout=0.05)
                if "add" in command:
                    name, tokens, params, output = command["add"]
                    self.add(Request(name, tokens, params, output))
                elif "abort" in command:
                    self.abort(command["abort"])
                elif "halt" in command:
                    self.halt = command["halt"]
                elif "figures" in command:
                    nics = [nic for shard in self.nics.values() for nic in shard]
                    sent, received = sum(n.bytes_out for n in nics), sum(n.bytes_in for n in nics)
                    counts = {"wrong_rows": self.wrong, "compared_rows": self.compared, "sent_bytes": sent, "received_bytes": received}
                    reply(figures=counts, loads=self.loads)
                    self.loads = []
                else:
                    break
            self.step()
        self.side.close()
        self.worker.close()


def reply(**message: Any) -> None:
    """Send a message to the controller."""
    print(json.dumps(message), flush=True)


def run_engine(o: argparse.Namespace) -> None:
    commands: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        commands.put({"stop": True})  # the controller has ended

    engine = Engine(SIZES[o.size], o.device, o.engine, Role[o.role], o.node, o.planner)
    threading.Thread(target=read, daemon=True).start()
    d = engine.worker.definitions[0]
    reply(ready=o.engine, namespace=d.name, dtype=d.dtype, layout=d.layout)
    engine.serve(commands)


# -- the controller


@dataclass
class Course:
    """A request as a gateway serves it: sent to both engines, and sent again after each new plan."""

    prompt: list[int]
    hit: int = 0  # tokens
    read: tuple[int, int] = (0, 0)  # tokens of the hit by prefill and by decode
    kinds: list[EventKind] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=dict)  # by engine: its id of the request
    tokens: list[int] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return EventKind.DONE in self.kinds and bool(self.tokens)


class Cluster:
    def __init__(self, o: argparse.Namespace, node: testing.Node, planner: testing.Planner) -> None:
        self.o, self.size = o, SIZES[o.size]
        self.addresses = ["--node", node.address, "--planner", planner.address]
        self.messages: queue.Queue[tuple[subprocess.Popen[str], dict[str, Any] | None]] = queue.Queue()
        self.engines: dict[str, subprocess.Popen[str]] = {}
        self.courses: dict[Any, Course] = {}
        self.answers: dict[str, dict[str, Any]] = {}  # the last message of each kind
        self.start("p0", Role.PREFILL)
        ready = self.start("d0", Role.DECODE)
        self.store = Store(node.address)
        definition = {k: ready[k] for k in ("dtype", "layout")}
        size = self.size
        self.ns: Namespace = self.store.namespace(
            ready["namespace"], block_tokens=TOKENS, layers=size.layers, token_bytes=size.row, ids=True, **definition
        )
        self.gateway = Gateway(self.ns, planner.address)

    def close(self) -> None:
        for process in self.engines.values():
            process.kill()
            process.wait()
        self.engines = {}
        self.gateway.close()
        self.store.close()

    def start(self, name: str, role: Role) -> dict[str, Any]:
        """Start an engine's process, and wait until it is ready."""
        command = [sys.executable, __file__, "--device", self.o.device, "--size", self.o.size, "--engine", name, "--role", role.name]
        process = subprocess.Popen([*command, *self.addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.engines[name] = process

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                self.messages.put((process, json.loads(line)))
            self.messages.put((process, None))

        threading.Thread(target=read, daemon=True).start()
        return self.answer("ready")

    def kill(self, name: str) -> None:
        process = self.engines.pop(name)
        process.kill()
        process.wait()

    def send(self, name: str, **command: Any) -> None:
        process = self.engines.get(name)
        if process is None:
            return  # it was killed, and the planner gives its requests to the next one
        assert process.stdin is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()

    def answer(self, kind: str) -> dict[str, Any]:
        """Wait for a message of an engine."""
        self.answers.pop(kind, None)
        self.until(lambda: kind in self.answers, kind)
        return self.answers[kind]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {WAIT:g} s: {what}; the requests' events are {[c.kinds for c in self.courses.values()]}")
            if self.courses:
                for event in self.gateway.drain():
                    self.event(event)
            with contextlib.suppress(queue.Empty):
                process, message = self.messages.get(timeout=0.005)
                self.message(process, message)

    def message(self, process: subprocess.Popen[str], message: dict[str, Any] | None) -> None:
        if process not in self.engines.values():
            return
        if message is None:
            raise RuntimeError(f"an engine's process has ended with code {process.wait()}")
        self.answers[next(iter(message))] = message
        for course in self.courses.values():
            if message.get("finished") in course.sent.values():
                course.tokens = message["tokens"]

    def event(self, event: Event) -> None:
        course = self.courses[event.request]
        course.kinds.append(event.kind)
        if event.kind == EventKind.FAILED:
            raise RuntimeError(f"{event.request} has failed: {event.error}")
        if event.kind == EventKind.MATCHED:
            course.hit = event.hit
        if event.kind == EventKind.REPLANNED:
            for engine, request in course.sent.items():
                self.send(engine, abort=request)
            course.sent, course.tokens = {}, []
        if event.kind == EventKind.STARTED:
            course.read = event.read_by_prefill, event.read_by_decode
            params = {"penstock": {"attempt": event.attempt, "epoch": event.epoch}}
            for engine, output in ((event.prefill, 1), (event.decode, OUTPUT)):
                course.sent[engine] = f"{event.attempt} at {engine}"
                self.send(engine, add=[course.sent[engine], course.prompt, params, output])

    def submit(self, prompt: list[int]) -> Course:
        request = self.gateway.submit(f"request {len(self.courses)}", ids=self.ns.chain(prompt), prompt=len(prompt), output=OUTPUT)
        course = self.courses[request] = Course(prompt)
        return course

    def serve(self, prompts: list[list[int]]) -> tuple[list[Course], dict[str, Any]]:
        """Serve prompts concurrently. Return their courses and the figures of their loads."""
        courses = [self.submit(prompt) for prompt in prompts]
        self.until(lambda: all(c.over for c in courses), "the requests end")
        for course in courses:
            self.right(course)
        self.figures("p0")
        loads = self.figures("d0")["loads"]
        seconds = max(end for _, end, _ in loads) - min(begin for begin, _, _ in loads)
        moved = sum(n for *_, n in loads)
        read = [sum(c.read[side] for c in courses) * self.size.layers * self.size.row for side in (0, 1)]
        return courses, {
            "requests": len(courses),
            "seconds": seconds,
            "decode_bytes": moved,
            "decode_GiB_per_second": moved / 2**30 / seconds,
            "read_by_prefill_bytes": read[0],
            "read_by_decode_bytes": read[1],
        }

    def right(self, course: Course) -> None:
        """Check the tokens of a request."""
        states = extended([], course.tokens)
        want = [*course.prompt, *(following(state) for state in states[len(course.prompt) - 1 : -1])]
        assert course.tokens == want, f"the tokens of {course}"

    def figures(self, name: str) -> dict[str, Any]:
        """Return what an engine has counted, after a check that it has seen no wrong byte."""
        self.send(name, figures=True)
        answer = self.answer("figures")
        assert answer["figures"]["wrong_rows"] == 0, answer
        return answer

    def stop(self) -> None:
        """End the engines in order."""
        for name in list(self.engines):
            self.send(name, stop=True)
            code = self.engines.pop(name).wait(WAIT)
            assert code == 0, f"engine {name} has ended with code {code}"

    def stored(self, tokens: list[int]) -> None:
        """Wait until storage has all full blocks of a sequence but for its last token, and compare them with what the CPU computes."""
        blocks, size = (len(tokens) - 1) // TOKENS, self.size
        ids = self.ns.chain(tokens)
        self.until(lambda: self.ns.match(ids).prefix >= blocks, "the blocks are stored")
        values = [bytearray(size.block_bytes) for _ in range(blocks)]
        assert self.ns.get(list(ids)[:blocks], values).ok == blocks
        states = torch.tensor(extended([], tokens)[: blocks * TOKENS])
        want = torch.stack([rows(states, layer, size.row).view(blocks, -1) for layer in range(size.layers)], 1).view(blocks, -1)
        for block, value in enumerate(values):
            assert torch.equal(torch.frombuffer(value, dtype=torch.uint8), want[block]), f"block {block} in storage"


def run(o: argparse.Namespace) -> dict[str, Any]:
    size = SIZES[o.size]
    # A busy machine may leave the processes without a CPU for long: no group is lost for that.
    flags = ["--schedule-group-timeout", "60s", "--schedule-patience", "60s", "--schedule-min-part", str(2 * TOKENS)]
    with testing.node(**size.node) as node, testing.planner(block_tokens=TOKENS, args=flags) as planner:
        cluster = Cluster(o, node, planner)
        try:
            return measure(cluster)
        finally:
            cluster.close()


def measure(c: Cluster) -> dict[str, Any]:
    size = c.size
    figures: dict[str, Any] = {"device": c.o.device, "block_bytes": size.block_bytes, "layers": size.layers}
    turns, figures["computed"] = c.serve([list(range(1000 * s, 1000 * s + size.prompt)) for s in range(SESSIONS)])
    for turn in turns:
        c.stored(turn.tokens)
    for name in ("cached", "cached_again"):
        prompts = [[*turn.tokens, *range(7 * s, 7 * s + 50)] for s, turn in enumerate(turns)]
        stored = [(len(turn.tokens) - 1) // TOKENS * TOKENS for turn in turns]
        turns, figures[name] = c.serve(prompts)
        assert [turn.hit for turn in turns] == stored, [turn.hit for turn in turns]
        for turn in turns:
            c.stored(turn.tokens)
    for side in ("read_by_prefill_bytes", "read_by_decode_bytes"):
        assert figures["cached"][side] + figures["cached_again"][side], f"{side}: 0"

    c.send("p0", halt=size.layers // 2)
    long = c.submit([*turns[0].tokens, *range(3 * size.chunk)])
    assert c.answer("halted")["halted"] == "p0"
    c.kill("p0")
    c.start("p0", Role.PREFILL)
    c.until(lambda: long.over, "the request of the killed process ends")
    assert EventKind.REPLANNED in long.kinds, long.kinds
    c.right(long)
    c.stored(long.tokens)
    figures["killed"] = {"plans": long.kinds.count(EventKind.STARTED), "hit_tokens": long.hit, "prompt_tokens": len(long.prompt)}

    for name in ("p0", "d0"):
        figures[name] = c.figures(name)["figures"]
        assert figures[name]["compared_rows"] > 0, figures
    c.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--size", choices=SIZES, default="small")
    for internal in ("engine", "role", "node", "planner"):
        parser.add_argument(f"--{internal}", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.engine:
        run_engine(o)
    else:
        print(json.dumps(run(o)))


if __name__ == "__main__":
    main()

"""A prefill/decode cluster of vLLM's servers on this machine. Each host is a network namespace with a storage NIC and a compute NIC.

    control  planner, gateway, clients      ══╦══════════ compute ══════════╦══ p0, d0, …  vLLM's HTTP server and engine
                                            ══╬══════════ storage ══════════╝   rate of each storage NIC: BITS
    n0, n1   penstock serve                 ══╝

Engines whose name begins with p prefill, the others decode. An engine of two ranks has a process for each.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from harness.faults import penstock
from harness.vllm import BLOCK, LFM2, OUTPUT, Vllm, connector, dual_path
from netns import Namespace, Nic, Switch

from penstock import testing

BITS = 40_000_000
"""The rate of an engine's storage NIC, each way, unless a cluster has another one."""
TOKEN_BYTES = 4 * 512
"""The KV of one token: layers times bytes of a layer."""
PATIENCE = 300
"""Seconds. Only a request that hangs reaches them, and a start on a machine that is very busy."""
REFUSALS = (429, 502, 503)

Chat = list[dict[str, Any]]
"""The messages of a chat."""

_PORTS = {"node": 7420, "data": 7421, "planner": 7430, "gateway": 7440, "engine": 8000, "metrics": 7499}
# With durability sync a node that is killed keeps its blocks. If the limits were shorter, a node without CPU would count its volume as
# hung, and the planner would count an engine without CPU as lost.
_NODE = """
    --capacity 1GiB --arena 64MiB --index-cache 8MiB --free-floor 16MiB --prewrite=false --scrub-rate 0B --limits-hung-after 300s --insecure
    --durability sync
"""
_PLANNER = f"--schedule-block-tokens {BLOCK} --schedule-group-timeout 30s --insecure"
_GATEWAY = f"""
    --queue-wait {PATIENCE}s --replan-wait {PATIENCE}s --drain-timeout {PATIENCE}s --health-timeout 60s --insecure
"""
_ENGINE = f"""
    --host 0.0.0.0 --port {_PORTS["engine"]} --dtype float32 --max-num-seqs 8 --block-size {BLOCK}
    --enforce-eager --worker-extension-cls dualpath_worker.Calls
"""
_RANKS = {1: "--distributed-executor-backend uni", 2: "--distributed-executor-backend mp --tensor-parallel-size 2"}
_ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines whose threads are bound to the same cores wait for each other
}


class Gateway(testing.Server):
    """``penstock gateway`` as a child process."""

    _COMMAND = "gateway"
    _LISTEN: ClassVar[dict[str, str]] = {"--listen": "listen", "--http": "http"}


@dataclass(frozen=True)
class Host:
    network: Namespace
    compute: Nic
    storage: Nic


@dataclass(frozen=True)
class Answer:
    """What a client got. broken is how many connections broke before an answer began."""

    status: int
    tokens: list[int] = field(default_factory=list)
    whole: bool = False
    text: str = ""
    broken: int = 0
    first: float = 0
    """Seconds until the first token of a stream."""
    seconds: float = 0
    """Seconds until the end of a stream."""

    @property
    def right(self) -> bool:
        """Whether it is a whole answer; ``check`` compares its tokens."""
        return self.status == 200 and self.whole

    @property
    def refused(self) -> bool:
        return self.status in REFUSALS


def check(answers: Sequence[Answer], *wanted: Sequence[list[int]]) -> Counter[str]:
    """Return how many answers are right, cut and refused. Each whole answer must have the tokens of one engine alone, of one of wanted.

    A stream that was cut must be a part of them. Any other answer fails.
    """
    found: Counter[str] = Counter()
    for i, answer in enumerate(answers):
        possible = [tokens[i] for tokens in wanted]
        if answer.right:
            assert answer.tokens in possible, (i, answer, possible)
        elif answer.status == 200:
            assert answer.tokens in [tokens[: len(answer.tokens)] for tokens in possible], (i, answer, possible)
        else:
            assert answer.refused, (i, answer)
        found["right" if answer.right else "cut" if answer.status == 200 else "refused"] += 1
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"no {what} within {PATIENCE} s"
        _pause()


def _pause() -> None:
    """Leave the CPU to the processes that a poll waits for."""
    time.sleep(0.02)


def request(network: Namespace, address: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Return status and body of a GET, or of a POST of JSON if there is a body."""
    with network.inside():
        connection = http.client.HTTPConnection(address, timeout=PATIENCE)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


class Engine:
    """vLLM's server in a host, with an engine of one or two ranks."""

    def __init__(
        self,
        vllm: Vllm,
        name: str,
        host: Host,
        connector: dict[str, Any],
        ranks: int,
        length: int,
        directory: Path,
        options: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._options = options
        self._ranks, self._length = ranks, length
        self.host = host
        self.address = f"{host.compute.address}:{_PORTS['engine']}"
        self.running = False
        self.log = directory / f"{name}.log"
        self._vllm = vllm
        self._connector = connector

    def start(self, model: str) -> None:
        """Fork the server. ``wait`` waits until it is ready."""
        pipe = self.log.with_suffix(".pipe")
        os.mkfifo(pipe)
        self._ready, self._ended = threading.Event(), threading.Event()
        self._reader = threading.Thread(target=self._follow, args=(pipe,), daemon=True)
        self._reader.start()
        hybrid = self._connector["kv_connector"] == "PenstockDualPathHybrid"
        kind = [f"--compilation-config={json.dumps(LFM2['compilation_config'])}"] if hybrid else ["--no-enable-prefix-caching"]
        kind += ["--enable-prefix-caching"] * hybrid
        words = [*_ENGINE.split(), *kind, *_RANKS[self._ranks].split(), "--model", model]
        words += ["--served-model-name", "tiny", "--max-model-len", str(self._length)]
        words += ["--kv-transfer-config", json.dumps(self._connector), *self._options]
        network = self.host.network.path
        self._vllm.host.call("serve", name=self.name, arguments=words, environ=_ENVIRON, network=network, log=str(pipe))
        self.running = True

    def wait(self) -> None:
        assert self._ready.wait(PATIENCE), self._tail()
        assert not self._ended.is_set(), self._tail()

    def _follow(self, pipe: Path) -> None:
        with pipe.open(errors="replace") as lines, self.log.open("a") as log:
            pipe.unlink()
            for line in lines:
                log.write(line)
                log.flush()
                if "Application startup complete" in line:
                    self._ready.set()
        self._ended.set()
        self._ready.set()

    def _tail(self) -> str:
        return f"engine {self.name}:\n" + "\n".join(self.log.read_text().splitlines()[-60:])

    def kill(self) -> None:
        """End all processes of the server with SIGKILL."""
        if self.running:
            self.running = False
            self._vllm.host.call("end", name=self.name)
            self._reader.join()

    def kill_rank(self, rank: int) -> None:
        """End the process of one rank with SIGKILL, and wait until vLLM has ended the server because of that."""
        os.kill(int(self.rpc("process")[rank]), signal.SIGKILL)
        assert self._ended.wait(PATIENCE), self._tail()
        self.kill()

    def rpc(self, method: str, *arguments: str, **keywords: str) -> list[str]:
        """Call a method of each rank's worker, and return the results, numbers as strings."""
        body = {"method": method, "args": arguments, "kwargs": keywords}
        status, text = request(self.host.network, self.address, "/collective_rpc", body)
        assert status == 200, text
        results: list[str] = json.loads(text)["results"] if text else []
        return results

    def event(self, name: str) -> float:
        """Return how often an event of the connector has happened."""
        return samples(request(self.host.network, self.address, "/metrics")[1], f"vllm:penstock_{name}_total")


def samples(page: str, name: str, label: str = "") -> float:
    """Return the sum of a metric's series, or of those that have a label, as in side="prefill"."""
    lines = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", page, re.M)
    return sum(float(value) for labels, value in lines if label in labels)


class Batch:
    """Requests that clients send at once, each client one after the other. ``generating`` is set when a stream has its first tokens."""

    def __init__(self, cluster: Cluster, prompts: Sequence[list[int] | Chat], output: int, stream: bool, clients: int) -> None:
        self.generating = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._futures = [self._pool.submit(cluster.complete, p, output, self.generating if stream else None) for p in prompts]

    def ended(self) -> int:
        return sum(future.done() for future in self._futures)

    def answers(self) -> list[Answer]:
        """Wait for all requests. A request that hangs raises TimeoutError."""
        with self._pool:
            return [future.result() for future in self._futures]


class Hosts:
    """Hosts on a compute and a storage network, and the servers that run on them. ``stack`` ends all."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._switches = [Switch("compute", "10.81.0"), Switch("storage", "10.80.0")]
        for switch in self._switches:
            stack.callback(switch.close)
        self._where: dict[testing.Server, Namespace] = {}
        self._clients = self.host()
        self.control = self._clients.network

    def host(self, bits: int = 0) -> Host:
        network = Namespace()
        self._stack.callback(network.close)
        compute, storage = (switch.connect(network) for switch in self._switches)
        if bits:
            storage.limit(bits)
        return Host(network, compute, storage)

    def add(self, server: testing.Server, network: Namespace, *listen: str) -> None:
        """Start a server in a network, with its addresses of gRPC or HTTP; that of metrics is a loopback address of the host."""
        server._listen = [*listen, f"127.0.0.1:{_PORTS['metrics'] + len(self._where)}"]
        self._where[server] = network
        self._stack.callback(server.kill)
        self.start(server)

    def node(self, name: str, host: Host | None = None) -> testing.Node:
        host = host or self.host()
        # In memory: the volume of a node on a disk that other work saturates fails, and blocks are not stored.
        directory = Path(tempfile.mkdtemp(prefix="penstock-node-", dir="/dev/shm"))
        self._stack.callback(shutil.rmtree, directory)
        (directory / "data").mkdir()
        node = testing.Node(directory, args=["--node", name, *_NODE.split()], timeout=PATIENCE)
        self.add(node, host.network, f"{host.storage.address}:{_PORTS['node']}", f"{host.storage.address}:{_PORTS['data']}")
        return node

    def start(self, server: testing.Server) -> None:
        """Start a node, the planner or the gateway on its host."""
        with self._where[server].inside():
            server.start()

    def metric(self, server: testing.Server, name: str, label: str = "") -> float:
        return samples(request(self._where[server], server.http, "/metrics")[1], name, label)

    def stored(self, name: str = "penstock_store_blocks") -> int:
        """Return a metric of all nodes, by default how many blocks they have."""
        return sum(int(self.metric(server, name)) for server in self._where if isinstance(server, testing.Node))


@dataclass(frozen=True)
class Elsewhere:
    """Another datacenter. All bytes between its storage and the rest pass the link."""

    node: testing.Node
    link: Nic
    engine: Engine


class Cluster(Hosts):
    """A cluster whose processes run."""

    def __init__(
        self,
        vllm: Vllm,
        directory: Path,
        names: Sequence[str],
        *,
        wide: Sequence[str],
        nodes: int,
        bits: int,
        length: int,
        model: str,
        hybrid: bool,
        options: Sequence[str],
        stack: contextlib.ExitStack,
    ) -> None:
        self._hybrid = hybrid
        self._options = options
        self.shards = 2 if wide else 1
        self._namespaces = [f"dual/tp{self.shards}.{shard}" for shard in range(self.shards)]
        super().__init__(directory, stack)
        self._bits, self._length = bits, length
        self.model = model or vllm.model
        control = self._clients
        self.nodes = [self.node(f"n{i}") for i in range(nodes)]
        self.planner = testing.Planner(directory, args=self._planning("split"), timeout=PATIENCE)
        self.add(self.planner, control.network, f"{control.compute.address}:{_PORTS['planner']}")
        servers = ",".join(node.address for node in self.nodes)
        self.engines = {name: self._engine(vllm, name, servers, 2 if name in wide else 1) for name in names}
        urls = [word for name, engine in self.engines.items() for word in ("--engine", f"{name}=http://{engine.address}")]
        words = [*_GATEWAY.split(), "--namespace", self._namespaces[0], "--planner", self.planner.address, "--servers", servers, *urls]
        self._front = words
        self.gateway = Gateway(directory, args=words, timeout=PATIENCE)
        self.start_engines()
        self.add(self.gateway, control.network, f"{control.compute.address}:{_PORTS['gateway']}")
        self.ready()

    def _engine(self, vllm: Vllm, name: str, servers: str, ranks: int) -> Engine:
        host = self.host(self._bits)
        listen = f"{host.compute.address}:0"
        connection = dual_path(servers, self.planner, name, prefill=name[0] == "p", listen=listen, shards=self.shards, hybrid=self._hybrid)
        engine = Engine(vllm, name, host, connection, ranks, self._length, self._directory, self._options)
        self._stack.callback(engine.kill)
        return engine

    def elsewhere(self, vllm: Vllm, name: str, bits: int, ranks: int) -> Elsewhere:
        """Start another datacenter: a node whose storage NIC has a rate, and an engine with PenstockConnector that uses the node."""
        at = self.host(bits)
        node = self.node(name, at)
        engine = Engine(vllm, name, self.host(), connector(node, namespace="dual"), ranks, self._length, self._directory)
        self._stack.callback(engine.kill)
        engine.start(self.model)
        engine.wait()
        return Elsewhere(node, at.storage, engine)

    def front(self, *options: str) -> None:
        """Start the gateway again with further options."""
        self.gateway.kill()
        self.gateway._args = [*self._front, *options]
        self.start(self.gateway)
        self.ready()

    def start_engines(self) -> None:
        """Start the engines that do not run."""
        started = [engine for engine in self.engines.values() if not engine.running]
        for engine in started:
            engine.start(self.model)
        for engine in started:
            engine.wait()

    def repair(self) -> None:
        """Start all that does not run, give the NICs their rates and cables, and wait until all engines get requests."""
        for engine in self.engines.values():
            engine.host.storage.plug()
            engine.host.storage.limit(self._bits)
        for server in self._where:
            server.resume()
            if not server.running:
                server.kill()
                self.start(server)
        self.start_engines()
        self.ready()

    def _planning(self, policy: str) -> list[str]:
        return [*_PLANNER.split(), "--schedule-read-rate", str(self._bits // 8 // TOKEN_BYTES), "--schedule-read-policy", policy]

    def plan_by(self, policy: str) -> None:
        """Start the planner again with another policy for the sides that read storage."""
        self.planner.kill()
        self.planner._args = self._planning(policy)
        self.start(self.planner)
        self.ready()

    def ready(self) -> None:
        """Wait until the gateway reaches all engines, and the planner has a group of each."""
        count = len(self.engines)
        until(lambda: self.metric(self.gateway, "penstock_gateway_engine_healthy") == count, "healthy engines")
        until(lambda: self.metric(self.planner, "penstock_planner_groups") == count, "groups of engines")

    def complete(
        self, prompt: list[int] | Chat, output: int = OUTPUT, generating: threading.Event | None = None, model: str = "tiny"
    ) -> Answer:
        """Send a prompt to the gateway as a client does. With an event the answer is a stream; its first tokens set the event.

        If the connection breaks before an answer begins, as it does when the gateway ends, the client sends the prompt again.
        """
        end = time.monotonic() + PATIENCE
        broken = 0
        while (answer := send(self.control, self.gateway.address, prompt, output, generating, model)).status == 0:
            assert time.monotonic() < end, answer
            broken += 1
            _pause()
        return replace(answer, broken=broken)

    def begin(self, prompts: Sequence[list[int] | Chat], output: int = OUTPUT, *, stream: bool = False, clients: int = 0) -> Batch:
        return Batch(self, prompts, output, stream, clients or len(prompts))

    def serve(self, prompts: Sequence[list[int] | Chat], output: int = OUTPUT, *, stream: bool = False, clients: int = 0) -> list[Answer]:
        return self.begin(prompts, output, stream=stream, clients=clients).answers()

    def reading(self) -> bool:
        """Whether a cached prefix is being read."""
        return self.metric(self.planner, "penstock_planner_loading_requests") > 0

    def limit(self, bits: int) -> None:
        """Limit the storage NICs of all engines."""
        for engine in self.engines.values():
            engine.host.storage.limit(bits)

    def bump(self, policy: str, *, wait: bool) -> int:
        """Begin another epoch on the nodes and in the planner, and return its number. With wait no started request has older weights."""
        epoch = 0
        with self.control.inside():
            for node in self.nodes:
                for namespace in self._namespaces:
                    words = ("--keep", "2", "--to", str(epoch), "--server", node.address)
                    epoch = penstock("ns", "bump-epoch", namespace, *words)["new_epoch"]
            words = ("--epoch", str(epoch), "--policy", policy, "--planner", self.planner.address)
            waiting = ["--wait", "--timeout", f"{PATIENCE}s"] if wait else []
            penstock("plan", "bump", self._namespaces[0], *words, *waiting, timeout=PATIENCE)
        return epoch

    def update(self, epoch: int, model: str = "") -> None:
        """Give all engines the weights of an epoch: those of a model, or the same again."""
        self.model = model or self.model
        for engine in self.engines.values():
            if model:
                engine.rpc("reload_weights", weights_path=model)
            engine.rpc("begin_version", str(epoch))


def send(
    network: Namespace, address: str, prompt: list[int] | Chat, output: int, generating: threading.Event | None, model: str = "tiny"
) -> Answer:
    """Send a prompt to a gateway or an engine. With an event the answer is a stream, whose first tokens set the event."""
    path, name = ("/v1/chat/completions", "messages") if isinstance(prompt[0], dict) else ("/v1/completions", "prompt")
    body = {
        "model": model, name: prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        "stream": generating is not None,
    }  # fmt: skip
    begin = time.perf_counter()
    with network.inside(), contextlib.closing(http.client.HTTPConnection(address, timeout=PATIENCE)) as connection:
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                return Answer(answer.status, text=answer.read().decode())
            if generating is None:
                tokens = _tokens(json.loads(answer.read()))
                return Answer(200, tokens, whole=len(tokens) == output)
        except (ConnectionError, http.client.HTTPException) as e:
            return Answer(0, text=repr(e))
        return _stream(answer, output, generating, begin)


def _tokens(part: dict[str, Any]) -> list[int]:
    return [token for choice in part["choices"] for token in choice.get("token_ids") or []]


def _stream(answer: http.client.HTTPResponse, output: int, generating: threading.Event, begin: float) -> Answer:
    """Read a stream of events to its end. The request began at begin."""
    tokens: list[int] = []
    first = 0.0
    text = "the stream ended early"
    with contextlib.suppress(ConnectionError, http.client.HTTPException):
        for line in answer:
            event = line.decode().strip().removeprefix("data: ")
            if event == "[DONE]":
                seconds = time.perf_counter() - begin
                with contextlib.suppress(ConnectionError, http.client.HTTPException):
                    answer.read()  # a client that disconnects before the end of the response counts as gone
                return Answer(200, tokens, whole=len(tokens) == output, first=first, seconds=seconds)
            if event and "choices" not in (part := json.loads(event)):
                return Answer(200, tokens, text=event)
            if event:
                tokens += _tokens(part)
            if tokens:
                first = first or time.perf_counter() - begin
                generating.set()
    return Answer(200, tokens, text=text)


@contextlib.contextmanager
def cluster(
    vllm: Vllm,
    directory: Path,
    names: Sequence[str],
    *,
    wide: Sequence[str] = (),
    nodes: int = 1,
    bits: int = BITS,
    length: int = 1024,
    model: str = "",
    hybrid: bool = False,
    options: Sequence[str] = (),
) -> Iterator[Cluster]:
    """Run a cluster until the block ends.

    The engines in ``wide`` have two ranks. ``bits`` is the rate of an engine's storage NIC, ``length`` the tokens of the longest request.
    With ``hybrid`` the model is LFM2, which has recurrent state. ``options`` are further ones of vLLM's server.
    """
    with contextlib.ExitStack() as stack:
        yield Cluster(
            vllm,
            directory,
            names,
            wide=wide,
            nodes=nodes,
            bits=bits,
            length=length,
            model=model,
            hybrid=hybrid,
            options=options,
            stack=stack,
        )

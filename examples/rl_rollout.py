"""Rollouts of reinforcement learning with vLLM, and three policies for the KV of older weights.

    pip install penstock-*.whl vllm matplotlib
    penstock serve --data /mnt/nvme0 &
    python examples/rl_rollout.py --servers 127.0.0.1:7420 --plot rollout.svg

Groups of agents work on a task each. In every turn an agent generates an action, a tool answers, and both are appended to the
agent's prompt. Every --update rounds the trainer has new weights, and the engines load them by their own calls while agents
are in the middle of their tasks. An engine then empties its own prefix cache. What agents have computed so far is in Penstock,
under the version of the weights (its epoch), which each request names:

    policy    a turn of an agent takes KV of                engines get new weights
    strict    the newest version                            all at once
    bounded   the newest version or the one before,         all at once
              but none from before its group began
    pinned    the version with which its group has begun    when no group needs their old version

strict computes every prompt again after an update. bounded continues with KV that is one version old, as PipelineRL does;
its tokens are not those of one version. pinned computes nothing again and its tokens are those of the group's version, but
an engine waits for its groups before it gets new weights.

The model and its updates are random. --check repeats each turn of strict and pinned in an engine without Penstock, with the
weights of the turn's version, and compares the tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # an engine is one process, which this program forks
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB of an engine on CPUs
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of this process would not survive the fork

BLOCK = 32  # tokens
POLICIES = ("strict", "bounded", "pinned")


class Trainer:
    """Makes versions of a model's weights, each in a directory of its own: random ones, then random steps from them."""

    def __init__(self, directory: Path, seed: int, positions: int) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        self.random = torch.Generator().manual_seed(seed)
        self.directory = directory
        self.version = 0
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=512,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=positions,
                initializer_range=0.15,
            )
        )
        self.step()

    def step(self) -> int:
        """Write the next version of the weights, and return its number."""
        import torch

        if self.version:
            with torch.no_grad():
                for weights in self.model.parameters():
                    weights += 0.02 * torch.randn(weights.shape, generator=self.random)
        self.version += 1
        self.model.save_pretrained(self.path(self.version))
        return self.version

    def path(self, version: int) -> str:
        return str(self.directory / f"version-{version}")


@dataclass
class Request:
    """One turn of an agent, for an engine."""

    prompt: list[int]
    params: dict[str, Any] | None
    salt: str | None


class Engine:
    """A vLLM engine in a process of its own, with the weights of one version."""

    def __init__(self, trainer: Trainer, connector: dict[str, Any] | None, options: argparse.Namespace) -> None:
        self.trainer = trainer
        self.version = trainer.version
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, trainer.path(self.version), connector, options.action, options.positions)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.receive()

    def send(self, call: str, *arguments: Any) -> None:
        self.pipe.send((call, arguments))

    def receive(self) -> Any:
        try:
            error, value = self.pipe.recv()
        except EOFError:
            raise RuntimeError("an engine has ended; its messages are above") from None
        if error:
            raise RuntimeError(f"an engine has failed: {error}")
        return value

    def update(self, version: int) -> None:
        """Load the weights of a version."""
        if version != self.version:
            self.send("update", self.trainer.path(version))
            self.receive()
            self.version = version

    def close(self) -> None:
        if self.process.is_alive():
            self.send("")
        self.process.join(60)
        self.process.kill()


def _serve(pipe: Any, model: str, connector: dict[str, Any] | None, action: int, positions: int) -> None:
    """Run an engine, and answer calls until one without a name."""
    try:
        calls = _Calls(model, connector, action, positions)
        pipe.send((None, None))
        for call, arguments in iter(pipe.recv, ("", ())):
            pipe.send((None, getattr(calls, call)(*arguments)))
    except Exception as e:
        pipe.send((f"{type(e).__name__}: {e}", None))


class _Calls:
    """What an engine's process does."""

    def __init__(self, model: str, connector: dict[str, Any] | None, action: int, positions: int) -> None:
        from vllm import LLM

        more = {} if connector is None else {"kv_transfer_config": connector}
        self.action = action
        self.llm = LLM(
            model=model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=BLOCK, max_model_len=positions,
            max_num_seqs=8, enable_prefix_caching=connector is not None, disable_log_stats=False, **more,
        )  # fmt: skip

    def generate(self, requests: list[Request]) -> list[tuple[list[int], int]]:
        """Return the action of each request, and how many of its tokens were not computed. Saves are complete when it returns."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": r.prompt, **({"cache_salt": r.salt} if r.salt else {})} for r in requests]
        params = [
            SamplingParams(
                temperature=0, max_tokens=self.action, ignore_eos=True, detokenize=False,
                extra_args={"kv_transfer_params": {"penstock": r.params}} if r.params else None,
            )
            for r in requests
        ]  # fmt: skip
        done = self.llm.generate(prompts, params, use_tqdm=False)
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.connector is not None and core.scheduler.connector.has_pending_push_work():
            self.llm.llm_engine.step()
        return [(list(d.outputs[0].token_ids), d.num_cached_tokens or 0) for d in done]

    def update(self, model: str) -> None:
        """Load other weights. The KV in the engine's own cache belongs to those before."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the engine has not emptied its prefix cache")

    def older_hits(self) -> int:
        """Return how many requests took KV of an older version."""
        return sum(int(m.value) for m in self.llm.get_metrics() if m.name == "vllm:penstock_older_hits")


@dataclass
class Agent:
    """One trajectory. version is that with which its group has begun."""

    group: int
    version: int
    tokens: list[int]
    turns: int = 0
    computed: int = 0  # tokens whose KV an engine has computed

    def take(self, action: list[int], tool: int) -> None:
        """Append an action, and the answer of the tool."""
        self.computed = len(self.tokens) + len(action) - 1
        self.tokens += action
        self.tokens += _tokens(f"tool {self.group} {action}", tool)
        self.turns += 1


@dataclass
class Round:
    """What all agents did in one turn."""

    version: int
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    """Tokens of which an engine had computed the KV before, for an earlier turn of the same agent."""
    bytes_by_version: dict[int, int] = field(default_factory=dict)

    def add(self, agent: Agent, cached: int) -> None:
        """Count a turn of an agent, of whose prompt an engine did not compute the first ``cached`` tokens."""
        self.turns += 1
        self.prompt_tokens += len(agent.tokens)
        self.cached_tokens += cached
        self.recomputed_tokens += max(0, agent.computed - cached)


@dataclass
class Rollout:
    """The rounds of one policy."""

    policy: str
    rounds: list[Round] = field(default_factory=list)
    older_hits: int = 0
    checked: int = 0
    differing: int = 0

    def total(self, name: str) -> int:
        return sum(getattr(r, name) for r in self.rounds)

    def summary(self) -> dict[str, Any]:
        prompt, cached = self.total("prompt_tokens"), self.total("cached_tokens")
        return {
            "policy": self.policy,
            "rounds": len(self.rounds),
            "updates": len({r.version for r in self.rounds}) - 1,
            "turns": self.total("turns"),
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "hit_rate": cached / prompt,
            "recomputed_tokens": self.total("recomputed_tokens"),
            "older_hits": self.older_hits,
            "most_bytes": max(sum(r.bytes_by_version.values()) for r in self.rounds),
            "checked_turns": self.checked,
            "differing_turns": self.differing,
        }


def rollout(policy: str, trainer: Trainer, options: argparse.Namespace) -> Rollout:
    """Run all groups to the end of their tasks under one policy."""
    name = f"rl-{os.getpid()}-{policy}"
    connector = {
        "kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "servers": options.servers,
            "model": name,
            "live_epochs": max(2, options.engines),
            # A rollout can wait for a busy node. After its time limit an engine computes the blocks for which it waits.
            "lookup_timeout": 30,
            "load_timeout": 60,
        },
    }
    result = Rollout(policy)
    engines: list[Engine] = []
    try:
        engines += [Engine(trainer, connector, options) for _ in range(options.engines)]
        alone = Engine(trainer, None, options) if options.check and policy != "bounded" else None
        engines += [alone] if alone else []
        _rounds(result, trainer, engines[: options.engines], alone, Usage(options.servers, name), options)
        for engine in engines[: options.engines]:
            engine.send("older_hits")
            result.older_hits += engine.receive()
    finally:
        for engine in engines:
            engine.close()
    return result


def _rounds(
    result: Rollout, trainer: Trainer, engines: list[Engine], alone: Engine | None, usage: Usage, options: argparse.Namespace
) -> None:
    waiting, agents = list(range(options.groups)), []
    while waiting or agents:
        number = len(result.rounds)
        newest = trainer.step() if number and number % options.update == 0 else trainer.version
        for engine in engines:
            if result.policy != "pinned" or all(a.version != engine.version for a in agents) or _spare(engine, engines):
                engine.update(newest)
        version = max(engine.version for engine in engines)
        while waiting and len({a.group for a in agents}) < options.active:
            group = waiting.pop(0)
            task = _tokens("system", options.system) + _tokens(f"task {group}", options.tool)
            agents += [Agent(group, version, task + _tokens(f"agent {group} {i}", BLOCK)) for i in range(options.group_size)]
        done = Round(newest)
        placed = _placed(result.policy, agents, engines, number)
        for engine, turns in placed.items():
            requests = [_request(result.policy, agent, engines[engine].version) for agent in turns]
            engines[engine].send("generate", requests)
        for engine, turns in placed.items():
            answers = engines[engine].receive()
            if alone is not None:
                alone.update(engines[engine].version)
                alone.send("generate", [Request(a.tokens, None, None) for a in turns])
                result.checked += len(turns)
                result.differing += sum(want != got for (want, _), (got, _) in zip(alone.receive(), answers, strict=True))
            for agent, (action, cached) in zip(turns, answers, strict=True):
                done.add(agent, cached)
                agent.take(action, options.tool)
        done.bytes_by_version = usage.by_version()
        result.rounds.append(done)
        agents = [a for a in agents if a.turns < options.turns]
        if options.format == "table":
            print(
                f"{result.policy}: round {number + 1}, version {newest}, {len(agents)} agents, {len(waiting)} groups wait", file=sys.stderr
            )


def _spare(engine: Engine, engines: list[Engine]) -> bool:
    """Report whether another engine has the same version."""
    return any(other is not engine and other.version == engine.version for other in engines)


def _placed(policy: str, agents: Iterable[Agent], engines: list[Engine], number: int) -> dict[int, list[Agent]]:
    """Return the agents of each engine in a round. Agents move between engines, among which those of their version under pinned."""
    placed: dict[int, list[Agent]] = {}
    for i, agent in enumerate(agents):
        able = [e for e, engine in enumerate(engines) if policy != "pinned" or engine.version == agent.version]
        placed.setdefault(able[(i + number) % len(able)], []).append(agent)
    return placed


def _request(policy: str, agent: Agent, version: int) -> Request:
    if policy == "bounded":
        return Request(agent.tokens, {"epoch": version, "oldest": max(agent.version, version - 1)}, "bounded")
    return Request(agent.tokens, {"epoch": version}, None)


def _tokens(name: str, count: int) -> list[int]:
    seed = hashlib.sha256(name.encode()).digest()
    made = random.Random(seed)
    return [made.randrange(3, 512) for _ in range(count)]


class Usage:
    """How many bytes the nodes store for each version of one model."""

    def __init__(self, servers: str, model: str) -> None:
        self.servers, self.model = servers.split(","), model

    def namespaces(self) -> list[tuple[str, str]]:
        """Return each namespace of the model, with its node."""
        return [
            (server, n["name"]) for server in self.servers for n in self._penstock(server, "list")["namespaces"] if self.model in n["name"]
        ]

    def by_version(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for server, name in self.namespaces():
            for live in self._penstock(server, "show", name)["live"]:
                found[live["epoch"]] = found.get(live["epoch"], 0) + live["bytes"]
        return {version: size for version, size in found.items() if size}

    @staticmethod
    def _penstock(server: str, *arguments: str) -> Any:
        command = [sys.executable, "-m", "penstock", "ns", *arguments, "--server", server, "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"penstock ns {' '.join(arguments)}: {done.stderr.strip()}")
        return json.loads(done.stdout)


def show(rollouts: list[Rollout]) -> None:
    print("policy   turns  updates  prompt tokens  hit rate  recomputed  turns on older KV  most MiB stored")
    for r in rollouts:
        s = r.summary()
        line = (
            f"{s['policy']:7}  {s['turns']:5}  {s['updates']:7}  {s['prompt_tokens']:13}  {s['hit_rate']:8.1%}  {s['recomputed_tokens']:10}"
            f"  {s['older_hits']:17}  {s['most_bytes'] / 2**20:15.1f}"
        )
        if s["checked_turns"]:
            line += f"   {s['differing_turns']} of {s['checked_turns']} turns differ from an engine alone"
        print(line)


def plot(rollouts: list[Rollout], file: str) -> None:
    """Draw the hit rate and the recomputed tokens of each round, and the stored bytes of each version."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, len(rollouts), sharex="col", sharey="row", squeeze=False, figsize=(4 * len(rollouts), 7))
    for column, r in enumerate(rollouts):
        x = range(1, len(r.rounds) + 1)
        hit, again, stored = axes[:, column]
        hit.set_title(r.policy)
        hit.plot(x, [100 * o.cached_tokens / o.prompt_tokens for o in r.rounds])
        again.bar(x, [o.recomputed_tokens for o in r.rounds])
        versions = sorted({v for o in r.rounds for v in o.bytes_by_version})
        sizes = [[o.bytes_by_version.get(v, 0) / 2**20 for o in r.rounds] for v in versions]
        if versions:
            stored.stackplot(x, sizes, labels=[f"version {v}" for v in versions])
            stored.legend(loc="upper left", fontsize="small")
        for i, (before, o) in enumerate(zip(r.rounds, r.rounds[1:], strict=False), 2):
            if before.version != o.version:
                for axis in axes[:, column]:
                    axis.axvline(i - 0.5, color="gray", linestyle=":")
        stored.set_xlabel("round (dotted: new weights)")
    for axis, label in zip(axes[:, 0], ("hit rate, %", "recomputed tokens", "stored, MiB"), strict=True):
        axis.set_ylabel(label)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="127.0.0.1:7420", help="host:port of each node, separated by commas")
    parser.add_argument("--policies", default=",".join(POLICIES), help="separated by commas")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--groups", type=int, default=6, help="tasks; the agents of a group have the same one")
    parser.add_argument("--group-size", type=int, default=2, help="agents of a group")
    parser.add_argument("--active", type=int, default=3, help="groups at once")
    parser.add_argument("--turns", type=int, default=6, help="turns of an agent")
    parser.add_argument("--update", type=int, default=4, help="rounds between two versions of the weights")
    parser.add_argument("--system", type=int, default=256, help="tokens of the system prompt, the same for all agents")
    parser.add_argument("--action", type=int, default=16, help="tokens of an action")
    parser.add_argument("--tool", type=int, default=96, help="tokens of a task, and of an answer of the tool")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--check", action="store_true", help="compare the tokens of strict and pinned with an engine alone")
    parser.add_argument("--plot", metavar="FILE", help="draw the rounds into an SVG, PDF or PNG file; needs matplotlib")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args()
    for name in ("engines", "groups", "group_size", "active", "turns", "update", "system", "action", "tool"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: want at least 1")
    policies = options.policies.split(",")
    if unknown := [p for p in policies if p not in POLICIES]:
        parser.error(f"--policies: unknown policy {unknown[0]!r}; known are {', '.join(POLICIES)}")
    options.positions = options.system + BLOCK + (options.turns + 1) * (options.tool + options.action)
    try:
        Usage(options.servers, "").namespaces()  # the nodes are there
        if options.plot:
            import matplotlib  # noqa: F401
        import vllm  # noqa: F401

        with tempfile.TemporaryDirectory(prefix="rl-rollout-") as directory:
            trainer = Trainer(Path(directory), options.seed, options.positions)
            rollouts = [rollout(policy, trainer, options) for policy in policies]
    except ImportError as e:
        sys.exit(f"rl_rollout: {e}; the first lines of --help install what this program needs")
    except RuntimeError as e:
        sys.exit(f"rl_rollout: {e}")
    if options.plot:
        plot(rollouts, options.plot)
    if options.format == "json":
        json.dump([{**r.summary(), "each_round": [vars(o) for o in r.rounds]} for r in rollouts], sys.stdout)
    else:
        show(rollouts)


if __name__ == "__main__":
    main()

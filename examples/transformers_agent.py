"""An agent that keeps its KV cache in Penstock: between turns, and between processes.

    pip install penstock-*.whl torch transformers
    penstock serve --data /mnt/nvme0 &
    python examples/transformers_agent.py --servers 127.0.0.1:7420 --check

The agent holds a conversation of several turns with a Hugging Face model. The model has random weights unless --model
names a directory. In each turn the agent loads the KV of the longest stored prefix of its prompt, computes the KV of the
other tokens, generates an answer, and stores the new whole blocks. A second run of the command finds the whole
conversation. --check repeats each prompt without the store and compares the logits.

A block of the store has the KV of BLOCK tokens, for each layer first the keys and then the values:

    layer 0: K [heads, BLOCK, head size] | V [heads, BLOCK, head size] | layer 1: K | V | …
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import penstock

BLOCK = 32  # tokens

SHAPES = {  # hidden size, layers, attention heads, KV heads
    "tiny": (128, 4, 4, 2),
    "1b": (2048, 16, 32, 8),
}


class KVStore:
    """The KV of one model in Penstock. Blocks are staged in one registered tensor in host memory, pinned for a GPU."""

    def __init__(self, servers: str, model: Any, blocks: int) -> None:
        config = model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, BLOCK, size)
        gpu = model.device.type == "cuda"
        self.staging = torch.empty((blocks, *shape), dtype=model.dtype, pin_memory=gpu)
        self.device = model.device
        self.store = penstock.Store(servers)
        self.ns = self.store.namespace(
            f"transformers/{fingerprint(model)}",
            block_tokens=BLOCK,
            layers=2 * config.num_hidden_layers,  # K and V of a layer apart
            token_bytes=config.num_key_value_heads * size * model.dtype.itemsize,
            dtype=str(model.dtype).removeprefix("torch."),
            layout="layer,kv,head,token",
            ids=True,
        )
        self.memory = self.store.register(self.staging)

    def load(self, tokens: list[int]) -> tuple[DynamicCache, int]:
        """Return a cache with the KV of the longest stored prefix, and the length of the prefix in tokens.

        The prefix is shorter than the prompt, because the model needs a token to compute.
        """
        cache = DynamicCache()
        keys = self.ns.chain(tokens[:-1])[: len(self.staging)]
        got = self.ns.get(keys, list(self.staging[: len(keys)]))
        if got.prefix:
            blocks = self.staging[: got.prefix].to(self.device)
            for layer in range(blocks.shape[1]):
                k, v = (blocks[:, layer, part].transpose(0, 1).flatten(1, 2)[None] for part in (0, 1))
                cache.update(k, v, layer)
        return cache, got.prefix * BLOCK

    def save(self, tokens: list[int], cache: DynamicCache, first: int) -> int:
        """Store the whole blocks of the cache from token first on. Return how many tokens the stored blocks have."""
        keys = self.ns.chain(tokens[: cache.get_seq_length()])[: len(self.staging)]
        skip = first // BLOCK
        if len(keys) <= skip:
            return 0
        for i, layer in enumerate(cache.layers):
            for part, kv in enumerate((layer.keys, layer.values)):
                new = kv[0, :, skip * BLOCK : len(keys) * BLOCK]  # [heads, tokens, head size]
                self.staging[skip : len(keys), i, part].copy_(new.unflatten(1, (-1, BLOCK)).transpose(0, 1))
        return BLOCK * self.ns.put(keys, list(self.staging[skip : len(keys)]), first=skip).ok

    def close(self) -> None:
        self.memory.close()
        self.store.close()


def fingerprint(model: Any) -> str:
    """Return a name for the weights: KV of other weights must never be found. It hashes the start of each tensor."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in sorted(model.state_dict().items()):
        start = weight.flatten()[:1024].view(torch.uint8).cpu().numpy()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + start.tobytes())
    return digest.hexdigest()[:24]


def make_model(options: argparse.Namespace) -> Any:
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    if options.model:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    hidden, layers, heads, kv_heads = SHAPES[options.shape]
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=65536,
        initializer_range=0.15 if options.shape == "tiny" else 0.02,
    )
    return LlamaForCausalLM(config).to(options.device, dtype).eval()


@torch.inference_mode()
def generate(model: Any, tokens: list[int], cache: DynamicCache, count: int) -> tuple[list[int], torch.Tensor]:
    """Generate tokens greedily. Return them, and the logits after the prompt. The cache grows by the computed tokens."""
    answer: list[int] = []
    left = tokens[cache.get_seq_length() :]
    first = torch.empty(0)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([left], device=model.device), past_key_values=cache, logits_to_keep=1).logits[0, -1]
        if not answer:
            first = logits.float().cpu()
        answer.append(int(logits.argmax()))
        left = answer[-1:]
    return answer, first


def seconds_since(start: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def converse(model: Any, kv: KVStore, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Hold the conversation and return what each turn did."""
    user = torch.Generator().manual_seed(options.seed)
    tokens: list[int] = []
    turns = []
    for _ in range(options.turns):
        tokens += torch.randint(3, model.config.vocab_size, (options.append,), generator=user).tolist()
        start = time.perf_counter()
        cache, loaded = kv.load(tokens)
        load = seconds_since(start, model.device)
        answer, logits = generate(model, tokens, cache, 1)
        first_token = seconds_since(start, model.device)
        more, _ = generate(model, tokens + answer, cache, options.answer - 1)
        answer += more
        start = time.perf_counter()
        stored = kv.save(tokens + answer, cache, loaded)
        turn = {
            "prompt": len(tokens),
            "loaded": loaded,
            "stored": stored,
            "answer": answer,
            "load_seconds": load,
            "first_token_seconds": first_token,
            "store_seconds": seconds_since(start, model.device),
        }
        if options.check:
            start = time.perf_counter()
            _, want = generate(model, tokens, DynamicCache(), 1)
            turn["first_token_seconds_without"] = seconds_since(start, model.device)
            turn["logits_difference"] = float((logits - want).abs().max())
            turn["logits_scale"] = float(want.abs().max())
        turns.append(turn)
        tokens += answer
    return turns


def show(turns: list[dict[str, Any]]) -> None:
    print("turn  prompt  loaded  stored    load ms  first token ms  store ms")
    for i, t in enumerate(turns):
        ms = [1000 * t[k] for k in ("load_seconds", "first_token_seconds", "store_seconds")]
        line = f"{i:4}  {t['prompt']:6}  {t['loaded']:6}  {t['stored']:6}  {ms[0]:9.1f}  {ms[1]:14.1f}  {ms[2]:8.1f}"
        if "logits_difference" in t:
            line += (
                f"   without the store: first token {1000 * t['first_token_seconds_without']:.1f} ms,"
                f" logits up to {t['logits_scale']:.3g} differ by {t['logits_difference']:.2g}"
            )
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="127.0.0.1:7420", help="host:port of each node, separated by commas")
    parser.add_argument("--model", help="directory of a model; the default is a model with random weights")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="shape of the model with random weights")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights and of the user's tokens")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--append", type=int, default=200, help="tokens that the user adds in each turn")
    parser.add_argument("--answer", type=int, default=16, help="tokens that the model generates in each turn")
    parser.add_argument("--check", action="store_true", help="compare the logits with those of a run without the store")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args()
    for name in ("turns", "append", "answer"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: want at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")

    model = make_model(options)
    blocks = -(-options.turns * (options.append + options.answer) // BLOCK)
    try:
        kv = KVStore(options.servers, model, blocks)
    except penstock.Error as e:
        sys.exit(f"transformers_agent: {e}")
    try:
        turns = converse(model, kv, options)
    finally:
        kv.close()
    if options.format == "json":
        json.dump(turns, sys.stdout)
    else:
        show(turns)


if __name__ == "__main__":
    main()

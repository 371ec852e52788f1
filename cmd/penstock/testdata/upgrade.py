"""Calls of the Python package that its releases have in common, for TestUpgradeWheels: upgrade.py ADDRESS STEP."""

import sys

import penstock

LAYERS, BLOCK_TOKENS, TOKEN_BYTES, BLOCKS = 4, 16, 128, 6


def values(seed: int) -> list[bytes]:
    return [bytes((seed + 31 * block + i) % 251 for i in range(LAYERS * BLOCK_TOKENS * TOKEN_BYTES)) for block in range(BLOCKS)]


def main(address: str, step: str) -> None:
    with penstock.Store(address) as store:

        def namespace(name: str, *, flat: bool = False, ids: bool = False) -> penstock.Namespace:
            return store.namespace(
                name, block_tokens=BLOCK_TOKENS, layers=LAYERS, token_bytes=TOKEN_BYTES, dtype="bf16", layout="tp1", flat=flat, ids=ids
            )

        tokens_ns, chained, flat = namespace("upgrade/tokens", ids=True), namespace("upgrade/chained"), namespace("upgrade/flat", flat=True)
        action, _, seed_text = step.partition("-")
        seed = int(seed_text)
        tokens = range(1000 * seed, 1000 * seed + BLOCKS * BLOCK_TOKENS)
        names = penstock.Keys([b"%d of %d" % (block, seed) for block in range(BLOCKS)])
        prompt = tokens_ns.chain(tokens)
        every = (tokens_ns, prompt), (chained, names), (flat, names)
        if action == "put":
            for ns, keys in every:
                assert ns.match(keys).prefix == 0, ns.match(keys)
                result = ns.put(keys, values(seed))
                assert result.ok == BLOCKS, result
        elif action == "check":
            for ns, keys in every:
                with ns.match(keys, lease=30).lease as _:
                    pages = [bytearray(len(v)) for v in values(seed)]
                    result = ns.get(keys, pages)
                    assert result.ok == BLOCKS, result
                    assert [bytes(p) for p in pages] == values(seed), "other bytes"
                assert ns.exists(keys).ok == BLOCKS, ns.exists(keys)
            pages = [bytearray(len(v)) for v in values(seed)]
            job = tokens_ns.jobs.get(prompt, pages)
            assert job.wait(60).ok == BLOCKS, job
            assert [bytes(p) for p in pages] == values(seed), "other bytes of a job"
        elif action == "delete":
            assert flat.delete(names).ok == BLOCKS
            assert flat.match(names).prefix == 0, flat.match(names)
        elif action == "bump":
            for ns, keys in every:
                before = ns.epoch
                assert ns.bump() == before + 1
                assert ns.match(keys).prefix == 0, ns.match(keys)
        elif action == "gone":
            for ns, keys in every:
                ns.refresh()
                result = ns.get(keys, [bytearray(len(v)) for v in values(seed)])
                assert result.ok == 0, result
        else:
            raise SystemExit(f"no step {step}")


main(*sys.argv[1:])

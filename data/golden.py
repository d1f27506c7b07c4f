#!/usr/bin/python3
"""Golden logits: what the PyTorch model of train.py, in float64, says about the stored weights of a checkpoint.

    golden.py model CHECKPOINT OUT.json [--loops T] [--text FILE --bytes N] [--positions 0,1,..]
    golden.py all          every file of data/golden/ that this script makes, and the tiny random checkpoints there

A file holds {"checkpoint", "loops", "tokens", "positions", "logits"}: one row of V logits for each position listed.
"""
import argparse
import json
import os

import numpy as np
import torch

import train

GOLDEN = os.path.join(train.HERE, "golden")


def write(path, checkpoint, tokens, positions=None, loops=None):
    P, c = train.load(checkpoint, torch.float64)
    with torch.no_grad():
        y = train.forward(P, c, torch.tensor([tokens]), loops)[0]
    if loops is None:
        loops = c["stages"][train.looped(c)].get("loops", 1) if train.looped(c) is not None else 1
    positions = list(range(len(tokens))) if positions is None else positions
    rows = ",\n".join("[" + ",".join(f"{v:.9g}" for v in y[p].tolist()) + "]" for p in positions)
    with open(path, "w") as f:
        f.write(json.dumps({"checkpoint": os.path.basename(checkpoint), "loops": loops, "tokens": tokens,
                            "positions": positions}, separators=(",", ":"))[:-1] + ',"logits":[\n' + rows + "\n]}\n")


# ---------------------------------------------------------------------------------------------------------------------
# Tiny random checkpoints, one for each thing that a configuration can say
# ---------------------------------------------------------------------------------------------------------------------


def tiny(arch="custom", stages=(), **kw):
    c = {"arch": arch, "vocab_size": 40, "dim": 16, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn_dim": 20,
         "norm_eps": 1e-5, "rope_theta": 10000, "rope_pairing": "interleaved", "embed_scale": 1.0,
         "tied_embeddings": False, "tokenizer": "bytes", "stages": list(stages) or train.stages(arch, 4, 3, 5)}
    c.update(kw)
    if "moe" in c:
        del c["ffn_dim"]
    return c


def cases():
    moe = {"experts": 5, "active": 2, "dim": 7, "shared_dim": 9, "normalize": True}
    window = lambda W, layers=1, loops=1, **kw: {"name": "low", "layers": layers, "loops": loops, "attention": "window", "window": W, **kw}
    full = lambda layers=1, loops=1, **kw: {"name": "mid", "layers": layers, "loops": loops, "attention": "full", **kw}
    shared = lambda layers=1, loops=1, **kw: {"name": "top", "layers": layers, "loops": loops, "attention": "shared", **kw}
    return {
        "yoco-u": tiny("yoco-u"),
        "yoco": tiny("yoco"),
        "transformer": tiny("transformer"),
        "ut": tiny("ut", stages=train.stages("ut", 2, 2, 0)),
        "rins": tiny("rins"),
        "upper-loop": tiny("upper-loop"),
        "upper-loop-unshared": tiny("upper-loop-unshared"),
        "half-pairing": tiny("yoco-u", rope_pairing="half", rope_theta=500),
        "rope-everywhere": tiny(stages=[window(4), full(), shared(2, rope=True)]),
        "rope-nowhere": tiny(stages=[window(4, rope=False), full(rope=False), shared()]),
        "shared-rope-refresh": tiny(stages=[window(3, 2, 2), shared(2, 2, rope=True, refresh_kv=True)], rope_pairing="half"),
        "all-stages": tiny(stages=[window(6, 1, 2), full(1, 2), shared(1, 2)]),
        "shared-only": tiny(stages=[shared(2)]),
        "window-one": tiny(stages=[window(1, 2, 3), shared()], kv_heads=4),
        "window-wider": tiny(stages=[window(1000, 2), shared()], kv_heads=1),
        "moe": tiny("yoco-u", moe=moe),
        "moe-plain": tiny("yoco-u", moe={"experts": 6, "active": 3, "dim": 5, "shared_dim": 0, "normalize": False}),
        "moe-all-active": tiny("transformer", moe={"experts": 3, "active": 3, "dim": 4, "shared_dim": 4, "normalize": False}),
        "tied-scaled": tiny("yoco-u", tied_embeddings=True, embed_scale=4.0, norm_eps=1e-3),
        "block-boundary": tiny("yoco-u", heads=2, kv_heads=1, head_dim=8),             # 300 tokens: past a 256-row block
    }


def random_weights(c, seed):
    """Gains off 1 and weights large enough that attention and routing are far from uniform."""
    g = torch.Generator().manual_seed(seed)
    return {n: 1 + 0.3 * torch.randn(s, generator=g) if len(s) == 1 else torch.randn(s, generator=g) * 1.5 * s[-1] ** -0.5
            for n, s in train.shapes(c).items()}


def all_files():
    os.makedirs(GOLDEN, exist_ok=True)
    for i, (name, c) in enumerate(cases().items()):
        at = os.path.join(GOLDEN, f"tiny-{name}.safetensors")
        train.save(at, random_weights(c, 100 + i), c, "F32")
        n = 300 if name == "block-boundary" else 23
        tokens = np.random.default_rng(i).integers(0, c["vocab_size"], n).tolist()
        write(at[:-12] + ".json", at, tokens, list(range(0, n, 7)) + [n - 1] if n > 100 else None)
    for dtype in ("BF16", "F16"):                                                     # the same weights, rounded
        c = cases()["moe"]
        at = os.path.join(GOLDEN, f"tiny-moe-{dtype.lower()}.safetensors")
        train.save(at, random_weights(c, 100 + list(cases()).index("moe")), c, dtype)
        write(at[:-12] + ".json", at, np.random.default_rng(99).integers(0, 40, 23).tolist())
    shipped()


def shipped():
    """Every checkpoint in data/. Text for the language models (96 bytes, past the window), a game or a haystack else."""
    import tasks
    held = open(os.path.join(train.HERE, "austen-heldout.txt"), "rb").read()
    for f in sorted(os.listdir(train.HERE)):
        if not f.endswith(".safetensors"):
            continue
        name, at = f[:-12], os.path.join(train.HERE, f)
        if name.startswith("austen"):
            tokens, positions = list(held[2000:2096]), [0, 1, 2, 40, 62, 63, 64, 65, 80, 95]
        elif name.startswith("cups"):
            tokens, positions = tasks.cups(np.random.default_rng(5), 1, 30)[0][0].tolist(), [0, 1, 2, 9, 20, 30]
        else:
            tokens, positions = tasks.needles(np.random.default_rng(5), 1, 96, 16)[0][0].tolist(), [0, 1, 30, 69, 95]
        write(os.path.join(GOLDEN, name + ".json"), at, tokens, positions)
    for T in (1, 2, 4):                                                               # T other than the stored one
        at = os.path.join(train.HERE, "austen.safetensors")
        write(os.path.join(GOLDEN, f"austen-loops{T}.json"), at, list(held[2000:2096]), [0, 64, 95], T)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sub = ap.add_subparsers(dest="do", required=True)
    m = sub.add_parser("model")
    m.add_argument("checkpoint")
    m.add_argument("out")
    m.add_argument("--loops", type=int)
    m.add_argument("--text", default=os.path.join(train.HERE, "austen-heldout.txt"))
    m.add_argument("--bytes", type=int, default=96)
    m.add_argument("--positions", help="comma-separated; all by default")
    sub.add_parser("all")
    sub.add_parser("shipped", help="the shipped checkpoints only")
    a = ap.parse_args()
    if a.do == "all":
        all_files()
    elif a.do == "shipped":
        shipped()
    else:
        tokens = list(open(a.text, "rb").read(a.bytes))
        write(a.out, a.checkpoint, tokens, [int(p) for p in a.positions.split(",")] if a.positions else None, a.loops)


if __name__ == "__main__":
    main()

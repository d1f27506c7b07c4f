#!/usr/bin/python3
"""Train and export the small models in data/.

This file is a complete Universal YOCO in PyTorch, written from the same description as the C++ program and sharing
nothing with it, so that each can check the other: an architecture is a list of stages (window, full or shared
attention, each run `loops` times), a checkpoint is one .safetensors file with its configuration inside. Around the
model there is one trainer for every task (Jane Austen's novels as bytes, the three-cups game, needles).

    train.py list                     the recipes
    train.py run NAME [NAME ...]      train; started again, it goes on from the last saved state
    train.py ship                     copy what ships from data/runs/ to data/, in BF16, once its run has finished

A recipe's random numbers depend on its seed and the step alone, so a run that was interrupted ends where an
uninterrupted one would. States and logs go to data/runs/ (ignored by git), curves and results to data/curves/.
Symbols: N tokens, D width, L layers, T loops, W window, H heads, G key-value heads, E experts, V vocabulary.
"""
import argparse
import csv
import ctypes
import json
import math
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
RUNS, CURVES = os.path.join(HERE, "runs"), os.path.join(HERE, "curves")

# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------


def shapes(c):
    """{tensor name: shape} of a configuration, in the order in which they are stored."""
    D, dh = c["dim"], c["head_dim"]
    q, kv = c["heads"] * dh, c["kv_heads"] * dh
    out = {"embed": (c["vocab_size"], D)}
    for s in c["stages"]:
        for i in range(s["layers"]):
            n = f"{s['name']}.{i}."
            out[n + "attn_norm"], out[n + "wq"] = (D,), (q, D)
            if s["attention"] != "shared":
                out[n + "wk"], out[n + "wv"] = (kv, D), (kv, D)
            out[n + "wo"], out[n + "ffn_norm"] = (D, q), (D,)
            if "moe" in c:
                E, Fe, Fs = c["moe"]["experts"], c["moe"]["dim"], c["moe"]["shared_dim"]
                out[n + "router"] = (E, D)
                for w in ("w_gate", "w_up"):
                    out[n + "experts." + w] = (E, Fe, D)
                out[n + "experts.w_down"] = (E, D, Fe)
                if Fs:
                    out[n + "shared.w_gate"], out[n + "shared.w_up"], out[n + "shared.w_down"] = (Fs, D), (Fs, D), (D, Fs)
            else:
                Fd = c["ffn_dim"]
                out[n + "w_gate"], out[n + "w_up"], out[n + "w_down"] = (Fd, D), (Fd, D), (D, Fd)
    if any(s["attention"] == "shared" for s in c["stages"]):
        out["kv_norm"], out["kv.wk"], out["kv.wv"] = (D,), (kv, D), (kv, D)
    out["norm"] = (D,)
    if not c.get("tied_embeddings", False):
        out["head"] = (c["vocab_size"], D)
    return out


def applications(c):
    return sum(s["layers"] * s.get("loops", 1) for s in c["stages"])


def init(c, seed):
    """Gains 1; matrices normal with std 1/sqrt(fan-in), those that write to the residual stream smaller with depth."""
    g = torch.Generator().manual_seed(seed)
    P = {}
    for name, shape in shapes(c).items():
        if len(shape) == 1:
            P[name] = torch.ones(shape)
            continue
        std = shape[-1] ** -0.5
        if name.endswith((".wo", "w_down")):
            std /= math.sqrt(2 * applications(c))
        P[name] = torch.randn(shape, generator=g) * std
    return P


def rms(x, g, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * g


def rope(x, c):
    """Rotate x [B,n,heads,dh] at positions 0..n-1; angles in double."""
    n, dh = x.shape[1], c["head_dim"]
    inv = c.get("rope_theta", 10000) ** (-torch.arange(0, dh, 2, dtype=torch.float64) / dh)
    angle = torch.arange(n, dtype=torch.float64)[:, None] * inv                       # [n,dh/2]
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    if c.get("rope_pairing", "interleaved") == "half":
        a, b = x[..., : dh // 2], x[..., dh // 2:]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def softmax_read(q, k, v, seen):
    """q [B,G,R,n,dh] reads k, v [B,G,m,dh] where seen [n,m] (or a stack of such) allows."""
    B, G, R, n, dh = q.shape
    s = (q.reshape(B, G, R * n, dh) * dh ** -0.5) @ k.transpose(-1, -2)
    s = s.view(B, G, R, n, -1) + torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -math.inf)
    return (s.softmax(-1).view(B, G, R * n, -1) @ v).view(B, G, R, n, dh)


def attend(q, k, v, W=None):
    """q [B,n,H,dh], k and v [B,n,G,dh]; query i reads j <= i, and j > i - W under a window. Returns [B,n,H*dh]."""
    B, n, H, dh = q.shape
    G = k.shape[2]
    q = q.view(B, n, G, H // G, dh).permute(0, 2, 3, 1, 4)                            # head h reads KV head h // (H/G)
    k, v = k.transpose(1, 2), v.transpose(1, 2)                                       # [B,G,n,dh]
    C = max(W or n, 64)
    if W and n > 2 * C:      # long rows, short window: blocks of C queries read their own block and the one before
        pad = -n % C
        m = (n + pad) // C
        q = F.pad(q, (0, 0, 0, pad)).reshape(B, G, H // G, m, C, dh).permute(0, 3, 1, 2, 4, 5).flatten(0, 1)
        pair = []
        for z in (k, v):
            z = F.pad(z, (0, 0, C, pad)).view(B, G, m + 1, C, dh)
            pair.append(torch.cat((z[:, :, :-1], z[:, :, 1:]), 3).permute(0, 2, 1, 3, 4).flatten(0, 1))
        i, j = torch.arange(C)[:, None] + C, torch.arange(2 * C)
        seen = (j <= i) & (j > i - W)
        first = (seen & (j >= C)).expand(B, C, 2 * C)                                 # nothing stands before block 0
        seen = torch.stack([first[0]] + [seen] * (m - 1)).repeat(B, 1, 1)[:, None, None]
        y = softmax_read(q, *pair, seen).view(B, m, G, H // G, C, dh).permute(0, 1, 4, 2, 3, 5)
        return y.reshape(B, n + pad, H * dh)[:, :n]
    i, j = torch.arange(n)[:, None], torch.arange(n)
    seen = (j <= i) & (j > i - W) if W else j <= i
    return softmax_read(q, k, v, seen).permute(0, 3, 1, 2, 4).reshape(B, n, H * dh)


def swiglu(f, gate, up, down):
    return (F.silu(f @ gate.T) * (f @ up.T)) @ down.T


def moe(f, P, n, m, balance):
    """Every expert runs and the unchosen ones get weight 0: slow and plain. `balance` collects the load-balance loss."""
    logits = f @ P[n + "router"].T                                                    # [B,n,E]
    r = logits.softmax(-1)
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[..., : m["active"]]  # ties: the lower index
    mask = torch.zeros_like(r).scatter_(-1, chosen, 1.0)
    w = r * mask
    if m["normalize"]:
        w = w / w.sum(-1, keepdim=True)
    if balance is not None:
        balance.append(m["experts"] / m["active"] * (mask.mean((0, 1)) * r.mean((0, 1))).sum())
    E, Fe, D = P[n + "experts.w_gate"].shape
    h = F.silu(f @ P[n + "experts.w_gate"].view(E * Fe, D).T) * (f @ P[n + "experts.w_up"].view(E * Fe, D).T)
    h = (h.view(*h.shape[:-1], E, Fe) * w[..., None]).flatten(-2)                     # [B,n,E*Fe]
    y = h @ P[n + "experts.w_down"].transpose(1, 2).reshape(E * Fe, D)
    if m["shared_dim"]:
        y = y + swiglu(f, P[n + "shared.w_gate"], P[n + "shared.w_up"], P[n + "shared.w_down"])
    return y


def forward(P, c, tokens, loops=None, balance=None, trace=None):
    """Logits [B,n,V] of tokens [B,n]. `loops` replaces T in the stage marked x T; `trace` collects every layer's output."""
    eps, dh = c.get("norm_eps", 1e-5), c["head_dim"]
    heads = lambda z: z.view(*z.shape[:2], -1, dh)
    x = P["embed"][tokens] * c.get("embed_scale", 1.0)
    for si, s in enumerate(c["stages"]):
        T = loops if loops and si == looped(c) else s.get("loops", 1)
        kind, rotate = s["attention"], s.get("rope", s["attention"] != "shared")
        turn = (lambda z: rope(z, c)) if rotate else (lambda z: z)
        K = Vs = None
        for _ in range(T):
            if kind == "shared" and (K is None or s.get("refresh_kv", False)):        # K^, V^: once, from what enters
                m = rms(x, P["kv_norm"], eps)
                K, Vs = turn(heads(m @ P["kv.wk"].T)), heads(m @ P["kv.wv"].T)
            for i in range(s["layers"]):
                n = f"{s['name']}.{i}."
                a = rms(x, P[n + "attn_norm"], eps)
                q = turn(heads(a @ P[n + "wq"].T))
                k, v = (K, Vs) if kind == "shared" else (turn(heads(a @ P[n + "wk"].T)), heads(a @ P[n + "wv"].T))
                x = x + attend(q, k, v, s.get("window")) @ P[n + "wo"].T
                f = rms(x, P[n + "ffn_norm"], eps)
                x = x + (moe(f, P, n, c["moe"], balance) if "moe" in c else
                         swiglu(f, P[n + "w_gate"], P[n + "w_up"], P[n + "w_down"]))
                if trace is not None:
                    trace.append(x)
    return rms(x, P["norm"], eps) @ P["head" if "head" in P else "embed"].T


# ---------------------------------------------------------------------------------------------------------------------
# Architectures and checkpoints
# ---------------------------------------------------------------------------------------------------------------------

MARKED = {"yoco-u": 0, "ut": 0, "rins": 0, "upper-loop": 1, "upper-loop-unshared": 1}   # the stage whose loops are T


def looped(c):
    return MARKED.get(c["arch"])


def stages(arch, L, T, W):
    h = L // 2
    low = {"name": "self", "layers": h, "loops": 1, "attention": "window", "window": W}
    top = {"name": "cross", "layers": h, "loops": 1, "attention": "shared"}
    full = lambda name, layers, loops: {"name": name, "layers": layers, "loops": loops, "attention": "full"}
    return {"yoco-u": [{**low, "loops": T}, top], "yoco": [low, top], "transformer": [full("layers", L, 1)],
            "ut": [full("layers", L, T)], "rins": [full("early", h, T), full("late", h, 1)],
            "upper-loop": [low, {**top, "loops": T}],
            "upper-loop-unshared": [low, {**top, "loops": T, "refresh_kv": True}],
            "custom": [{"name": "self", "layers": L, "loops": T, "attention": "window", "window": W}]}[arch]


def count(c):
    """Distinct stored elements, embedding and head apart."""
    return sum(math.prod(s) for n, s in shapes(c).items() if n not in ("embed", "head"))


def flops(c, n, loops=None):
    """Multiply-adds x 2 of one forward pass over n positions, all logits: what a training step pays, forward only."""
    D, q, kv = c["dim"], c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
    m = c.get("moe")
    ffn = 2 * D * m["experts"] + 6 * D * (m["active"] * m["dim"] + m["shared_dim"]) if m else 6 * D * c["ffn_dim"]
    total = n * 2 * D * c["vocab_size"]
    for si, s in enumerate(c["stages"]):
        T = loops if loops and si == looped(c) else s.get("loops", 1)
        keys = sum(min(i + 1, s.get("window", n)) for i in range(n))
        layer = n * (4 * D * q + ffn) + 4 * q * keys
        if s["attention"] == "shared":
            total += n * 4 * D * kv * (T if s.get("refresh_kv") else 1)
        else:
            layer += n * 4 * D * kv
        total += s["layers"] * T * layer
    return total


DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def save(path, P, c, dtype="BF16"):
    """safetensors: 8 bytes of header length, a JSON header padded with spaces to a multiple of 8, the data, no gaps."""
    head, blobs, at = {"__metadata__": {"yocou": json.dumps(c, separators=(",", ":"))}}, [], 0
    for name, shape in shapes(c).items():
        t = P[name].detach().to(DTYPES[dtype]).contiguous()
        assert tuple(t.shape) == tuple(shape), name
        b = t.view(torch.int16 if t.element_size() == 2 else torch.int32).numpy().tobytes()
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(b)]}
        blobs.append(b)
        at += len(b)
    h = json.dumps(head, separators=(",", ":")).encode()
    h += b" " * (-len(h) % 8)
    with open(path + ".part", "wb") as f:
        f.write(len(h).to_bytes(8, "little") + h + b"".join(blobs))
    os.replace(path + ".part", path)


def load(path, dtype=torch.float32):
    raw = open(path, "rb").read()
    n = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8: 8 + n])
    c = json.loads(head.pop("__metadata__")["yocou"])
    P = {}
    for name, t in head.items():
        a, b = t["data_offsets"]
        kind = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[t["dtype"]]
        P[name] = torch.frombuffer(bytearray(raw[8 + n + a: 8 + n + b]), dtype=kind).view(t["shape"]).to(dtype)
    return P, c


# ---------------------------------------------------------------------------------------------------------------------
# Tasks: batch(rng, run) -> inputs and targets [B,n], target -100 where nothing is asked
# ---------------------------------------------------------------------------------------------------------------------

import tasks                                                                          # noqa: E402 (the generators)

BOOKS = ["sensesensibility", "prideprejudice", "mansfieldpark", "emma", "persuasion"]
HELD_OUT = "northangerabbey"


def book(name):
    """One novel's bytes, lines as in the R package janeaustenr, exported once to data/runs/."""
    path = os.path.join(RUNS, name + ".txt")
    if not os.path.exists(path):
        os.makedirs(RUNS, exist_ok=True)
        subprocess.run(["Rscript", "-e", f"writeLines(janeaustenr::{name}, '{path}.part', useBytes=TRUE)"], check=True)
        os.replace(path + ".part", path)
    return np.frombuffer(open(path, "rb").read(), np.uint8)


class Austen:
    def __init__(self):
        self.train = np.concatenate([book(b) for b in BOOKS])
        self.held = book(HELD_OUT)

    def batch(self, rng, r):
        n = int(rng.choice(r["lengths"]))
        at = rng.integers(0, len(self.train) - n - 1, r["bytes"] // n)
        x = np.stack([self.train[a: a + n + 1] for a in at]).astype(np.int64)
        return x[:, :-1], x[:, 1:]

    def bits(self, P, c, n, count, loops=None):
        """Bits per byte over `count` stretches of n predictions, evenly spread over the unseen novel."""
        at = np.linspace(0, len(self.held) - n - 1, count).astype(int)
        x = torch.from_numpy(np.stack([self.held[a: a + n + 1] for a in at]).astype(np.int64))
        total = 0.0
        step = max(1, 4096 // n)
        for b in x.split(step):
            y = forward(P, c, b[:, :-1], loops)
            total += F.cross_entropy(y.flatten(0, 1), b[:, 1:].flatten(), reduction="sum").item()
        return total / (count * n) / math.log(2)

    def by_position(self, P, c, n=4096, count=12):
        """The same over 12 stretches of 4,096, by position: {first position of a bucket: bits per byte}."""
        at = np.linspace(0, len(self.held) - n - 1, count).astype(int)
        nll = torch.zeros(n)
        for a in at:
            x = torch.from_numpy(self.held[a: a + n + 1].astype(np.int64))
            nll += F.cross_entropy(forward(P, c, x[None, :-1])[0], x[1:], reduction="none") / (count * math.log(2))
        cut = [0, 16, 64, 128, 256, 512, 1024, 2048, n]
        return {str(a): round(nll[a:b].mean().item(), 4) for a, b in zip(cut, cut[1:])}

    def measure(self, P, c, r):
        return self.bits(P, c, 256, 64)

    def report(self, P, c, r):
        loops = [1, 2, 3, 4, 5] if looped(c) is not None else [None]
        out = {"bpb_256": {str(T or 1): round(self.bits(P, c, 256, 256, T), 4) for T in loops}}
        out["bpb_4096_by_position"] = self.by_position(P, c)
        out["bpb_1024"] = {str(T or 1): round(self.bits(P, c, 1024, 32, T), 4) for T in loops}
        return out


class Cups:
    def batch(self, rng, r):
        return tasks.cups(rng, r["batch"], r["moves"])

    def right(self, P, c, moves, count, loops=None):
        x, y = tasks.cups(np.random.default_rng(7_000_000 + moves), count, moves)
        got = torch.cat([forward(P, c, b, loops).argmax(-1) for b in torch.from_numpy(x).split(128)])
        return (got == torch.from_numpy(y)).double().mean(0)[1:]                      # by move, `^` left out

    def measure(self, P, c, r):
        return self.right(P, c, r["moves"], 256).mean().item()

    def report(self, P, c, r):
        Ts = range(1, 11) if looped(c) is not None else [None]
        out = {}
        for T in Ts:
            acc = self.right(P, c, r["moves"], 512, T)
            out[str(T or c["stages"][0].get("loops", 1))] = {
                "all": round(acc.mean().item(), 4),
                "by4": [round(z.mean().item(), 3) for z in self.right(P, c, 40, 512, T).split(4)]}
        return {"moves": r["moves"], "by_loops": out}


class Needle:
    def batch(self, rng, r):
        return tasks.needles(rng, r["batch"], 96, far=16)

    def accuracy(self, P, c, n, count, far, loops=None):
        x, y = tasks.needles(np.random.default_rng(8_000_000 + n), count, n, far)
        good = total = 0
        for a, b in zip(torch.from_numpy(x).split(max(1, 8192 // n)), torch.from_numpy(y).split(max(1, 8192 // n))):
            got = forward(P, c, a, loops).argmax(-1)
            good += ((got == b) & (b >= 0)).sum().item()
            total += (b >= 0).sum().item()
        return good / total

    def measure(self, P, c, r):
        return self.accuracy(P, c, 96, 64, 16)

    def report(self, P, c, r):
        return {"by_length": {str(n): round(self.accuracy(P, c, n, m, far), 4) for n, m, far in
                              ((96, 64, 16), (256, 64, 96), (512, 64, 352), (1024, 48, 864), (2048, 24, 1888))}}


TASKS = {"austen": Austen, "cups": Cups, "needle": Needle}

# ---------------------------------------------------------------------------------------------------------------------
# Recipes
# ---------------------------------------------------------------------------------------------------------------------


def config(task, arch, T, L=4):
    if task == "austen":
        return {"arch": arch, "vocab_size": 256, "dim": 128, "heads": 2, "kv_heads": 1, "head_dim": 64,
                "moe": {"experts": 8, "active": 2, "dim": 48, "shared_dim": 48, "normalize": True},
                "embed_scale": math.sqrt(128), "tied_embeddings": True, "tokenizer": "bytes",
                "stages": stages(arch, L, T, 64)}
    D, dh, Fd, W = (32, 16, 64, 3) if task == "cups" else (64, 32, 96, 8)
    return {"arch": arch, "vocab_size": 256, "dim": D, "heads": 2, "kv_heads": 2, "head_dim": dh, "ffn_dim": Fd,
            "tied_embeddings": False, "tokenizer": "bytes", "stages": stages(arch, L, T, W)}


longer = {"lengths": [256, 256, 512, 1024, 2048, 4096]}    # while the rate falls: else bits per byte rise past 1,024
TASK = {  # what all runs of a task share: optimiser, budget. `decay` is the closing part of the run with a falling rate
    "austen": dict(lr=3e-3, betas=(0.9, 0.95), wd=0.1, schedule="wsd", decay=0.3, balance=0.01, bytes=4096,
                   lengths=[256, 256, 512, 1024], late=longer, steps=2600, every=100, save=100, goal=None),
    "cups": dict(lr=4e-3, betas=(0.9, 0.98), wd=0.05, schedule="cosine", batch=64, moves=32, steps=2000, late={}, every=250,
                 save=500, goal=None),
    "needle": dict(lr=2e-3, betas=(0.9, 0.98), wd=0.05, schedule="wsd", decay=0.2, batch=32, steps=3000, late={}, every=50,
                   save=250, goal=0.999),
}


def recipes():
    R = {}

    def add(name, task, arch, T=1, L=4, seed=0, **kw):
        R[name] = {"name": name, "task": task, "seed": seed, "config": config(task, arch, T, L), "draw": [T], **TASK[task], **kw}

    mixed = [1, 2, 3, 3, 3, 4]                                             # T of a step: 3 half the time
    add("austen", "austen", "yoco-u", 3, late={**longer, "draw": mixed})  # T = 3, then mixed
    for s, end in ((0, ""), (1, "-s1")):
        add("austen-t1" + end, "austen", "yoco-u", 1, seed=s, steps=900, decay=0.17)         # no loops
        add("austen-t3-short" + end, "austen", "yoco-u", 3, seed=s, steps=500, decay=0.17)   # its twin: T = 3, the same FLOPs
    add("austen-t3", "austen", "yoco-u", 3, steps=900, decay=0.17)                     # another: T = 3, the same steps
    add("austen-mixed", "austen", "yoco-u", 3, draw=mixed)                 # mixed from the first step
    for s in range(3):
        add(f"cups-random-s{s}", "cups", "yoco-u", 3, seed=s, draw=[1, 2, 3, 4, 5], steps=4000)
        for T in (1, 2, 3, 5):
            add(f"cups-yoco-u-t{T}-s{s}", "cups", "yoco-u", T, seed=s)     # T = 1 is yoco
        for arch, T in (("transformer", 1), ("ut", 2), ("rins", 3), ("upper-loop", 3), ("upper-loop-unshared", 3)):
            add(f"cups-{arch}-s{s}", "cups", arch, T, seed=s)
        for arch in ("transformer", "yoco"):                               # 8 layer applications without a loop
            add(f"cups-{arch}-8-s{s}", "cups", arch, 1, L=8, seed=s)
        for arch, T in (("yoco", 1), ("yoco-u", 2), ("transformer", 1)):
            add(f"needle-{arch}-s{s}", "needle", arch, T, seed=s)
        add(f"needle-window-s{s}", "needle", "custom", 2, seed=s, steps=600)
    return R


def shipped():
    """{file in data/: the run it comes from}"""
    S = {a: a for a in ("austen", "austen-t1", "austen-t3", "austen-t3-short-s1")}
    S["cups-random"] = "cups-random-s0"
    S.update({f"cups-t{T}": f"cups-yoco-u-t{T}-s0" for T in (1, 2, 3, 5)})
    S.update({f"cups-{a}": f"cups-{a}-s0" for a in ("transformer", "ut", "rins", "upper-loop", "upper-loop-unshared", "transformer-8", "yoco-8")})
    S.update({f"needle-{a}": f"needle-{a}-s0" for a in ("yoco-u", "yoco", "window")})
    return S


def ship():
    for name, run in shipped().items():
        at = os.path.join(RUNS, run + ".safetensors")
        if os.path.exists(os.path.join(CURVES, run + ".json")) and os.path.exists(at):
            shutil.copy(at, os.path.join(HERE, name + ".safetensors"))
            print(f"{name}.safetensors from {run}")


# ---------------------------------------------------------------------------------------------------------------------
# The trainer
# ---------------------------------------------------------------------------------------------------------------------


def rate(r, step):
    """Learning rate at a step: 100 steps of warm-up, then cosine to 5%, or constant with a linear fall at the end."""
    warm = min(1.0, (step + 1) / 100)
    if r["schedule"] == "cosine":
        return r["lr"] * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / r["steps"])))
    tail = r["decay"] * r["steps"]
    return r["lr"] * warm * min(1.0, max(0.02, (r["steps"] - step) / tail))


class Flat:
    """All weights in two vectors, matrices and gains: one optimiser call each instead of one per tensor."""

    def __init__(self, c, P):
        self.shape = shapes(c)
        self.names = [[n for n in self.shape if (len(self.shape[n]) == 1) == gain] for gain in (False, True)]
        self.flat = [torch.cat([P[n].flatten() for n in g]).requires_grad_() for g in self.names]

    def tensors(self):
        return {n: t.view(self.shape[n]) for f, g in zip(self.flat, self.names)
                for n, t in zip(g, f.split([math.prod(self.shape[n]) for n in g]))}


def rounded(P):
    return {n: t.detach().to(torch.bfloat16).float() for n, t in P.items()}


def train(r):
    os.makedirs(RUNS, exist_ok=True)
    os.makedirs(CURVES, exist_ok=True)
    c, name = r["config"], r["name"]
    state, done = os.path.join(RUNS, name + ".state"), os.path.join(CURVES, name + ".json")
    if os.path.exists(done):
        return
    task = TASKS[r["task"]]()
    model = Flat(c, init(c, r["seed"]))
    opt = torch.optim.AdamW([{"params": [model.flat[0]], "weight_decay": r["wd"]},
                             {"params": [model.flat[1]], "weight_decay": 0.0}], lr=r["lr"], betas=r["betas"])
    step, wall0, cpu0, rows, seen, work = 0, 0.0, 0.0, [], [], 0
    if os.path.exists(state):
        z = torch.load(state)
        for p, q in zip(model.flat, z["flat"]):
            p.data.copy_(q)
        opt.load_state_dict(z["opt"])
        step, wall0, cpu0, rows, seen, work = (z[k] for k in ("step", "wall", "cpu", "rows", "seen", "work"))
        opt.param_groups[0]["weight_decay"] = r["wd"]
    start, cpu = time.time() - wall0, time.process_time() - cpu0
    reached = False
    while step < r["steps"] and not reached:
        rng = np.random.default_rng([r["seed"], step])
        falling = step >= (1 - r.get("decay", 0)) * r["steps"]
        x, y = (torch.from_numpy(a) for a in task.batch(rng, {**r, **(r["late"] if falling else {})}))
        draw = r["late"].get("draw", r["draw"]) if falling else r["draw"]
        T = int(np.random.default_rng([r["seed"], step, 1]).choice(draw)) if looped(c) is not None else None
        balance = [] if "moe" in c else None
        logits = forward(model.tensors(), c, x, T, balance)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
        seen.append(loss.item())
        if balance:
            loss = loss + r["balance"] * sum(balance) / len(balance)
        for p in model.flat:
            p.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.flat, 1.0)
        for g in opt.param_groups:
            g["lr"] = rate(r, step)
        opt.step()
        work += flops(c, x.shape[1], T) * len(x) * 3                                  # backward counted as two forwards
        step += 1
        if step % r["every"] == 0 or step == r["steps"]:
            with torch.no_grad():
                value = task.measure(model.tensors(), c, r)
            rows.append([step, round(sum(seen) / len(seen), 4), round(value, 4), round(time.time() - start, 1),
                         round(time.process_time() - cpu, 1)])
            seen = []
            print(f"{name} step {step}/{r['steps']} loss {rows[-1][1]} held-out {value:.4f} "
                  f"wall {rows[-1][3]:.0f}s cpu {rows[-1][4]:.0f}s", file=sys.stderr, flush=True)
            reached = r["goal"] is not None and value >= r["goal"]
        if step % r["save"] == 0 or step == r["steps"] or reached:
            z = {"flat": [p.detach() for p in model.flat], "opt": opt.state_dict(), "step": step, "rows": rows,
                 "seen": seen, "wall": time.time() - start, "cpu": time.process_time() - cpu, "work": work}
            torch.save(z, state + ".part")
            os.replace(state + ".part", state)
            save(os.path.join(RUNS, name + ".safetensors"), model.tensors(), c)
            with open(os.path.join(CURVES, name + ".csv"), "w", newline="") as f:
                csv.writer(f, lineterminator="\n").writerows(
                    [["step", "train_loss", "held_out", "wall_s", "cpu_s"]] + rows)
    out = {"name": name, "task": r["task"], "arch": c["arch"], "seed": r["seed"], "draw": r["draw"], "late": r["late"], "steps": step,
           "step_limit": r["steps"], "wall_s": round(time.time() - start, 1), "cpu_s": round(time.process_time() - cpu, 1),
           "params": count(c), "embed_and_head": sum(math.prod(s) for n, s in shapes(c).items() if n in ("embed", "head")),
           "applications": applications(c), "train_flops": work}
    with torch.no_grad():
        out.update(task.report(rounded(model.tensors()), c, r))                       # the weights as stored
    with open(done, "w") as f:
        f.write(json.dumps(out) + "\n")


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sub = ap.add_subparsers(dest="do", required=True)
    sub.add_parser("list", help="the recipes")
    sub.add_parser("ship", help="copy finished checkpoints to data/")
    p = sub.add_parser("run", help="train recipes in order; finished ones are skipped")
    p.add_argument("names", nargs="+")
    p.add_argument("--steps", type=int, help="instead of the recipe's (a constant-rate run may be lengthened while it runs)")
    a = ap.parse_args()
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)                         # keep freed memory: page faults cost a tenth of the time otherwise
    libc.mallopt(-4, 0), libc.mallopt(-1, 2**31 - 1)                                  # M_MMAP_MAX, M_TRIM_THRESHOLD
    R = recipes()
    if a.do == "list":
        for r in R.values():
            print(f"{r['name']:32} {r['steps']:6} steps  {count(r['config']):8} parameters  T {r['draw']}")
    elif a.do == "ship":
        ship()
    elif a.do == "run":
        for n in a.names:
            r = R[n]
            train({**r, "steps": a.steps or r["steps"]})


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The forward pass of YOCO-U once more, from memory: usage: forward.py MODEL.safetensors TOKEN,TOKEN,...

An answer to the first exercise: plain Python, no library, float32 weights, dense FFN, whole prompt at once, no caches.
Prints the last row's logits. Slow, and meant to be read.
"""
import json
import math
import struct
import sys


def load(path):
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    config, tensors = json.loads(header.pop("__metadata__")["yocou"]), {}
    for name, t in header.items():
        flat = struct.unpack(f"<{(t['data_offsets'][1] - t['data_offsets'][0]) // 4}f", data[slice(*t["data_offsets"])])
        cols = t["shape"][-1]
        tensors[name] = [flat[i:i + cols] for i in range(0, len(flat), cols)]  # rows; a gain is one row
    return config, tensors


def dot(a, b):
    return sum(map(lambda x, y: x * y, a, b))


def linear(X, W):  # x W^T, W [outputs, inputs]
    return [[dot(x, w) for w in W] for x in X]


def norm(X, gain, eps):
    return [[v / math.sqrt(dot(x, x) / len(x) + eps) * g for v, g in zip(x, gain[0])] for x in X]


def rope(x, p, dh, theta):  # one row, at position p, all its heads
    for h in range(0, len(x), dh):
        for i in range(0, dh, 2):
            angle = p * theta ** (-i / dh)
            a, b = x[h + i], x[h + i + 1]
            x[h + i], x[h + i + 1] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)


def attend(c, q, K, V, seen):  # one query row, H heads, over the rows `seen` of K and V
    dh, group, row = c["head_dim"], c["heads"] // c["kv_heads"], []
    for h in range(c["heads"]):
        g = h // group * dh
        scores = [dot(q[h * dh:(h + 1) * dh], K[j][g:g + dh]) / math.sqrt(dh) for j in seen]
        e = [math.exp(s - max(scores)) for s in scores]
        row += [sum(w * V[j][g + d] for w, j in zip(e, seen)) / sum(e) for d in range(dh)]
    return row


def add(X, Y):
    return [[a + b for a, b in zip(x, y)] for x, y in zip(X, Y)]


def ffn(c, t, name, X):  # X' = FFN(LN(X)) + X
    f = norm(X, t[name + "ffn_norm"], c["norm_eps"])
    gate, up = linear(f, t[name + "w_gate"]), linear(f, t[name + "w_up"])
    hidden = [[g / (1 + math.exp(-g)) * u for g, u in zip(gs, us)] for gs, us in zip(gate, up)]
    return add(X, linear(hidden, t[name + "w_down"]))


def layer(c, t, name, stage, X, cache):
    a = norm(X, t[name + "attn_norm"], c["norm_eps"])
    Q = linear(a, t[name + "wq"])
    K, V = cache or (linear(a, t[name + "wk"]), linear(a, t[name + "wv"]))
    if not cache:
        for p, (q, k) in enumerate(zip(Q, K)):
            rope(q, p, c["head_dim"], c["rope_theta"])
            rope(k, p, c["head_dim"], c["rope_theta"])
    W = stage.get("window", len(X))
    O = [attend(c, q, K, V, range(max(0, i - W + 1), i + 1)) for i, q in enumerate(Q)]
    return ffn(c, t, name, add(X, linear(O, t[name + "wo"])))


def forward(c, t, tokens):
    X = [[v * c["embed_scale"] for v in t["embed"][token]] for token in tokens]
    for stage in c["stages"]:
        cache = None
        if stage["attention"] == "shared":  # cache once
            m = norm(X, t["kv_norm"], c["norm_eps"])
            cache = linear(m, t["kv.wk"]), linear(m, t["kv.wv"])
        for _ in range(stage["loops"]):  # T
            for i in range(stage["layers"]):  # L/2
                X = layer(c, t, f"{stage['name']}.{i}.", stage, X, cache)
    return linear(norm(X[-1:], t["norm"], c["norm_eps"]), t["head"])[0]


if __name__ == "__main__":
    logits = forward(*load(sys.argv[1]), [int(token) for token in sys.argv[2].split(",")])
    print(" ".join(f"{v:.6f}" for v in logits))

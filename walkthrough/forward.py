#!/usr/bin/env python3
"""The forward pass of YOCO-U in plain Python: usage: forward.py MODEL.safetensors TOKEN,TOKEN,...

Chapters 3 to 8 take it apart, function by function; the first exercise is to write it from memory. No library, weights
in F32 or BF16, dense FFN, whole prompt at once, no caches. A matrix is a list of rows. Prints the last row's logits.
"""
import json
import math
import struct
import sys


def load(path):
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    config = {"embed_scale": 1.0, "norm_eps": 1e-5, "rope_theta": 1e4} | json.loads(header.pop("__metadata__")["yocou"])
    tensors = {}
    for name, t in header.items():
        raw = data[slice(*t["data_offsets"])]
        if t["dtype"] == "BF16":  # the upper half of a float32
            raw = b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2))
        flat = struct.unpack(f"<{len(raw) // 4}f", raw)
        cols = t["shape"][-1]
        rows = [flat[i:i + cols] for i in range(0, len(flat), cols)]
        tensors[name] = rows if len(t["shape"]) == 2 else rows[0]  # a gain is one row
    return config, tensors


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def add(X, Y):
    return [[a + b for a, b in zip(x, y)] for x, y in zip(X, Y)]


def linear(X, W):  # X [n, inputs], W [outputs, inputs], as a file stores it: X W^T [n, outputs]
    return [[dot(x, w) for w in W] for x in X]


def norm(X, gain, eps):  # LN
    return [[v / math.sqrt(dot(x, x) / len(x) + eps) * g for v, g in zip(x, gain)] for x in X]


def silu(z):
    return z / (1 + math.exp(-z))


def swiglu(A, gate, up, down):  # [n, D] -> [n, F] twice -> [n, D]
    hidden = [[silu(g) * u for g, u in zip(gs, us)] for gs, us in zip(linear(A, gate), linear(A, up))]
    return linear(hidden, down)


def rope(x, p, dh, theta):  # one row, all its heads, turned to position p
    turned = []
    for pair in range(0, len(x), 2):
        angle = p * theta ** (-(pair % dh) / dh)
        a, b = x[pair], x[pair + 1]
        turned += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
    return turned


def softmax(scores):
    e = [math.exp(s - max(scores)) for s in scores]
    return [x / sum(e) for x in e]


def attend(c, q, K, V, seen):  # one row of queries, H heads, over the rows `seen` of K and V
    dh, R, row = c["head_dim"], c["heads"] // c["kv_heads"], []
    for h in range(c["heads"]):
        mine, g = slice(h * dh, h * dh + dh), slice(h // R * dh, h // R * dh + dh)  # R query heads share a KV head
        weights = softmax([dot(q[mine], K[j][g]) / math.sqrt(dh) for j in seen])
        row += [sum(w * V[j][g][d] for w, j in zip(weights, seen)) for d in range(dh)]
    return row


def layer(c, t, name, stage, X, cache):  # one application; `cache` is (K^, V^), or None: keys of its own
    w = lambda tensor: t[f"{name}.{tensor}"]
    A = norm(X, w("attn_norm"), c["norm_eps"])
    Q = linear(A, w("wq"))
    if cache:
        K, V = cache
    else:
        turn = lambda rows: [rope(row, p, c["head_dim"], c["rope_theta"]) for p, row in enumerate(rows)]
        Q, K, V = turn(Q), turn(linear(A, w("wk"))), linear(A, w("wv"))
    W, first = stage.get("window", len(K)), len(K) - len(X)  # X may be the last rows only
    O = [attend(c, q, K, V, range(max(0, p - W + 1), p + 1)) for p, q in enumerate(Q, first)]
    Y = add(X, linear(O, w("wo")))
    return add(Y, swiglu(norm(Y, w("ffn_norm"), c["norm_eps"]), w("w_gate"), w("w_up"), w("w_down")))


def embed(c, t, tokens):
    return [[v * c["embed_scale"] for v in t["embed"][token]] for token in tokens]


def self_decoder(c, t, X):  # USD(X)
    stage = c["stages"][0]
    for loop in range(stage["loops"]):  # T
        for i in range(stage["layers"]):  # L/2
            X = layer(c, t, f"self.{i}", stage, X, None)
    return X


def global_kv(c, t, U):  # K^, V^
    M = norm(U, t["kv_norm"], c["norm_eps"])
    return linear(M, t["kv.wk"]), linear(M, t["kv.wv"])


def cross_decoder(c, t, X, cache):
    stage = c["stages"][1]
    for i in range(stage["layers"]):  # L/2
        X = layer(c, t, f"cross.{i}", stage, X, cache)
    return X


def forward(c, t, tokens):
    X = embed(c, t, tokens)
    U = self_decoder(c, t, X)
    K_hat, V_hat = global_kv(c, t, U)
    X = cross_decoder(c, t, U, (K_hat, V_hat))
    return linear(norm(X, t["norm"], c["norm_eps"]), t["head"])  # logits [n, V]


def show(name, rows):  # for the chapters
    for i, row in enumerate(rows):
        print(f"{name}[{i}]  " + ("empty" if row is None else " ".join(f"{round(v, 3) + 0.0:7.3f}" for v in row)))


if __name__ == "__main__":
    logits = forward(*load(sys.argv[1]), [int(token) for token in sys.argv[2].split(",")])
    print(" ".join(f"{v:.6f}" for v in logits[-1]))

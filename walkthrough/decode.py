#!/usr/bin/env python3
"""The decode step of YOCO-U from memory: usage: decode.py MODEL.safetensors TOKEN,TOKEN,... [--prompt P] [--events]

forward.py with caches, one token at a time: T x L/2 rings of W rows, and one global K^, V^ with a row a token. The first
P tokens are a prompt (unless P is given, all are): its rows but the last leave once K^ and V^ are written. Prints the
last row's logits; with --events, in their place, what every application of a layer writes and reads.
"""
import argparse

from forward import add, attend, ffn, linear, load, norm, rope


def step(c, t, caches, token, want, event):
    """One token through the model; its logits, or None when nobody wants them."""
    eps, dh, theta, (usd, cross) = c["norm_eps"], c["head_dim"], c["rope_theta"], c["stages"]
    W, (K_hat, V_hat) = usd["window"], caches["global"]
    p = len(K_hat)  # its position: one row of K^ a token
    X = [[v * c["embed_scale"] for v in t["embed"][token]]]
    for loop in range(usd["loops"]):
        for i in range(usd["layers"]):
            name = f"{usd['name']}.{i}."
            K, V = caches.setdefault((loop, i), ([None] * W, [None] * W))  # a ring of its own, W rows
            a = norm(X, t[name + "attn_norm"], eps)
            q, k, v = (linear(a, t[name + w])[0] for w in ("wq", "wk", "wv"))
            rope(q, p, dh, theta), rope(k, p, dh, theta)  # the same angle in every loop
            K[p % W], V[p % W] = k, v  # on top of position p - W
            seen = range(max(0, p - W + 1), p + 1)
            event(p, "self", loop, i, f"row {p % W}", f"{p - W}" if p >= W else "", f"{seen[0]}-{p}")
            o = attend(c, q, K, V, [j % W for j in seen])
            X = ffn(c, t, name, add(X, linear([o], t[name + "wo"])))
    m = norm(X, t["kv_norm"], eps)
    K_hat += linear(m, t["kv.wk"])  # written once, after the last loop
    V_hat += linear(m, t["kv.wv"])
    event(p, "K^ V^", "", "", f"row {p}", "", "")
    if not want:
        return None  # the early exit
    for i in range(cross["layers"]):
        name = f"{cross['name']}.{i}."
        q = linear(norm(X, t[name + "attn_norm"], eps), t[name + "wq"])[0]  # no rotation, no keys
        event(p, "cross", 0, i, "", "", f"0-{p}")
        X = ffn(c, t, name, add(X, linear([attend(c, q, K_hat, V_hat, range(p + 1))], t[name + "wo"])))
    return linear(norm(X, t["norm"], eps), t["head"])[0]


if __name__ == "__main__":
    args = argparse.ArgumentParser(description="the decode step of YOCO-U, from memory")
    args.add_argument("model"), args.add_argument("tokens"), args.add_argument("--prompt", type=int)
    args.add_argument("--events", action="store_true")
    o = args.parse_args()
    (c, t), tokens, caches = load(o.model), [int(token) for token in o.tokens.split(",")], {"global": ([], [])}
    say = (lambda *fields: print(*fields, sep=",")) if o.events else (lambda *fields: None)
    say("position", "where", "loop", "layer", "writes", "over_position", "reads_positions")
    for i, token in enumerate(tokens):
        logits = step(c, t, caches, token, i + 1 >= (o.prompt or len(tokens)), say)
    if not o.events:
        print(" ".join(f"{v:.6f}" for v in logits))

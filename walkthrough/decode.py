#!/usr/bin/env python3
"""The decode step of YOCO-U from memory: usage: decode.py MODEL.safetensors TOKEN,TOKEN,... [--prompt P] [--events]

forward.py with caches, one token at a time: T x L/2 rings of W rows, and one global K^, V^ with a row a token. The first
P tokens are a prompt (unless P is given, all are): its rows but the last leave once K^ and V^ are written. Prints the
last row's logits; with --events, in their place, what every application of a layer writes and reads.
"""
import argparse

from forward import add, attend, embed, global_kv, linear, load, norm, rope, swiglu


def step(c, t, caches, token, want, event=lambda *fields: None):
    """One token through the model; its logits, or None when nobody wants them."""
    eps, dh, theta, (usd, cross) = c["norm_eps"], c["head_dim"], c["rope_theta"], c["stages"]
    W, (K_hat, V_hat) = usd["window"], caches["global"]
    p = len(K_hat)  # its position: one row of K^ a token
    X = embed(c, t, [token])
    for loop in range(usd["loops"]):
        for i in range(usd["layers"]):
            w = lambda tensor: t[f"self.{i}.{tensor}"]
            K, V = caches.setdefault((loop, i), ([None] * W, [None] * W))  # a ring of its own, W rows
            A = norm(X, w("attn_norm"), eps)
            q, k, v = (linear(A, w(m))[0] for m in ("wq", "wk", "wv"))
            q, k = rope(q, p, dh, theta), rope(k, p, dh, theta)  # the same angle in every loop
            K[p % W], V[p % W] = k, v  # over position p - W
            seen = range(max(0, p - W + 1), p + 1)
            event(p, "self", loop, i, f"row {p % W}", f"{p - W}" if p >= W else "", f"{seen[0]}-{p}")
            Y = add(X, linear([attend(c, q, K, V, [j % W for j in seen])], w("wo")))
            X = add(Y, swiglu(norm(Y, w("ffn_norm"), eps), w("w_gate"), w("w_up"), w("w_down")))
    k, v = global_kv(c, t, X)
    K_hat += k  # one row, written once, after the last loop
    V_hat += v
    event(p, "K^ V^", "", "", f"row {p}", "", "")
    if not want:
        return None  # the early exit
    for i in range(cross["layers"]):
        w = lambda tensor: t[f"cross.{i}.{tensor}"]
        q = linear(norm(X, w("attn_norm"), eps), w("wq"))[0]  # no rotation, no keys
        event(p, "cross", 0, i, "", "", f"0-{p}")
        Y = add(X, linear([attend(c, q, K_hat, V_hat, range(p + 1))], w("wo")))
        X = add(Y, swiglu(norm(Y, w("ffn_norm"), eps), w("w_gate"), w("w_up"), w("w_down")))
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

#!/usr/bin/env python3
"""Prints how far a swap of two neighbours moves the last row's logits, and by which way: usage: order.py

For each pair of neighbours: how far before the last token the second of them stands, and the largest change of a logit
when everything is computed anew, when only K^ and V^ are, and when only the state that enters the cross-decoder is.
"""
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from forward import cross_decoder, embed, global_kv, linear, load, norm, self_decoder

with tempfile.TemporaryDirectory() as folder:
    os.system(f"python3 {sys.path[0]}/five.py {folder}/model 2 3 3")  # reach 3 x 2 x (3 - 1) = 12
    c, t = load(f"{folder}/model")


def below(tokens):
    U = self_decoder(c, t, embed(c, t, tokens))
    return U, global_kv(c, t, U)


def logits(U, kv):
    return linear(norm(cross_decoder(c, t, U, kv)[-1:], t["norm"], c["norm_eps"]), t["head"])[0]


text = list(b"the quick brown fox jumps")
U, kv = below(text)
before = logits(U, kv)
for i in range(len(text) - 2):
    U2, kv2 = below(text[:i] + [text[i + 1], text[i]] + text[i + 2:])
    moved = [max(abs(a - b) for a, b in zip(before, logits(*way))) for way in ((U2, kv2), (U, kv2), (U2, kv))]
    print(len(text) - 2 - i, *(f"{m:.8f}" for m in moved), sep=",")

#!/usr/bin/python3
"""The two synthetic tasks: batches for training, and the JSON lines that `yocou eval` reads.

Three cups. Byte `c` swaps the first two cups, `d` moves the last one to the front: two moves that generate S3, so
that order matters and nothing can be counted. Input `^` and the moves; the answer at every position is the present
arrangement, one of `A`-`F` (the six orders of 123, sorted; `A` = 123 at the start).

Needles. `^`, then lowercase filler with six needles `#Kd;` hidden in it (capital K, distinct; digit d), then
questions `?K`. The answer d is due at K. Answers are never shown, and questions are drawn with replacement: else a
model can answer by elimination instead of looking up.
"""
import itertools
import json
import os
import sys

import numpy as np

ORDERS = list(itertools.permutations("123"))                                          # A .. F
STEP = np.array([[ORDERS.index((b, a, c)), ORDERS.index((c, a, b))] for a, b, c in ORDERS])


def cups(rng, B, moves):
    """Inputs and targets [B, moves + 1]."""
    m = rng.integers(0, 2, (B, moves))
    state = np.zeros((B, moves + 1), np.int64)
    for i in range(moves):
        state[:, i + 1] = STEP[state[:, i], m[:, i]]
    x = np.concatenate((np.full((B, 1), ord("^")), ord("c") + m), 1).astype(np.int64)
    return x, state + ord("A")


def haystack(rng, n, end, needles=6):
    """n bytes: `^`, filler, and needles that end at or before `end`. Returns bytes, keys, digits, places."""
    x = np.where(rng.random(n) < 0.18, ord(" "), rng.integers(ord("a"), ord("z") + 1, n))
    x[0] = ord("^")
    free = end - 1 - 4 * needles                                                      # filler bytes among the needles
    at = 1 + np.sort(rng.integers(0, free + 1, needles)) + 4 * np.arange(needles)
    keys = ord("A") + rng.permutation(26)[:needles]
    digits = ord("0") + rng.integers(0, 10, needles)
    for p, k, d in zip(at, keys, digits):
        x[p: p + 4] = ord("#"), k, d, ord(";")
    return x, keys, digits, at


def needles(rng, B, n, far, questions=14):
    """Inputs and targets [B, n]; every needle ends at least `far` bytes before the first question."""
    X, Y = np.zeros((B, n), np.int64), np.full((B, n), -100, np.int64)
    q0 = n - 2 * questions
    for b in range(B):
        X[b], keys, digits, _ = haystack(rng, n, q0 - far)
        pick = rng.integers(0, len(keys), questions)
        X[b, q0::2], X[b, q0 + 1:: 2], Y[b, q0 + 1:: 2] = ord("?"), keys[pick], digits[pick]
    return X, Y


def text(x):
    return bytes(x.tolist()).decode("ascii")


def write_cups(path, per_move=80, moves=40, seed=11):
    rng = np.random.default_rng(seed)
    with open(path, "w") as f:
        for k in range(1, moves + 1):
            seen = set()
            for x, y in zip(*cups(rng, per_move * 20, k)):                            # distinct games, all of them if few
                if text(x) in seen or len(seen) == per_move:
                    continue
                seen.add(text(x))
                f.write(json.dumps({"prompt": text(x), "answer": chr(y[-1]), "moves": k}, separators=(",", ":")) + "\n")


def write_needles(path, n, count, seed=12):
    """One question a line. `distance` is that from needle to question rounded down to a power of two, to group by."""
    rng = np.random.default_rng([seed, n])
    with open(path, "w") as f:
        for i in range(count):
            x, keys, digits, at = haystack(rng, n, n - 2 - 16)
            j = i % len(keys)                                                         # early and late needles alike
            x[-2:] = ord("?"), keys[j]
            line = {"prompt": text(x), "answer": chr(digits[j]), "length": n, "distance": 1 << (int(n - 2 - at[j]).bit_length() - 1)}
            f.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    write_cups(os.path.join(here, "cups.jsonl"))
    for n, count in ((96, 300), (256, 300), (512, 150), (1024, 150), (2048, 90), (4096, 60), (8192, 42), (16384, 30)):
        write_needles(os.path.join(here, f"needle-{n}.jsonl"), n, count)

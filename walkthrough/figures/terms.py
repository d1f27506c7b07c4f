#!/usr/bin/env python3
"""Bytes that a decode step of the 1.3B YOCO-U must read, by term: usage: terms.py BATCH   prints N, five terms and the total.

The terms by the formula of chapter 11; their sum must be what `yocou cost` says.
"""
import subprocess
import sys

D, H, G, dh, F, V, L, T, W, s = 2560, 20, 4, 128, 6912, 100352, 20, 3, 512, 2
batch = int(sys.argv[1])
mixed = 2 * D + 2 * D * H * dh + 3 * D * F  # a layer without keys and values of its own
for N in (1024, 4096, 16384, 65536, 262144):
    terms = [T * L // 2 * (mixed + 2 * D * G * dh) * s,  # the self-decoder's weights, once a loop
             (L // 2 * mixed + D * (1 + 2 * G * dh)) * s,  # the cross-decoder's, and those of K^ and V^
             D * (V + 1 + batch) * s,  # the head, its norm, a row of the embedding for each sequence
             batch * T * L // 2 * min(N + 1, W) * 2 * G * dh * s,  # rings
             batch * L // 2 * (N + 1) * 2 * G * dh * s]  # K^ and V^, in each of L/2 layers
    out = subprocess.run(f"yocou cost --shape 1.3b --arch yoco-u -N {N} --batch {batch} --csv".split(), capture_output=True,
                         text=True, check=True).stdout.splitlines()
    if int(dict(zip(out[0].split(","), out[1].split(",")))["decode_bytes"]) != sum(terms):
        sys.exit("terms.py: the sum is not what yocou says")
    print(N, *terms, sum(terms), sep=",")

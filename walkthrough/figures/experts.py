#!/usr/bin/env python3
"""Which experts each byte of a text uses in each loop: usage: experts.py [BYTES]   prints loop,layer,position,byte,expert

`yocou trace` gives each expert's share of all rows of a prompt. No row depends on a later one, so the shares of two prompts
that differ by one byte give the experts of that byte.
"""
import json
import subprocess
import sys

ACTIVE, text = 2, open("data/austen-heldout.txt", "rb").read(int(sys.argv[1]) if len(sys.argv) > 1 else 24).decode()


def uses(prompt):  # (loop, layer) -> how many rows use each expert
    out = subprocess.run(["yocou", "trace", "data/austen.safetensors", "--threads", "1", "--json", "-p", prompt],
                         capture_output=True, text=True, check=True).stdout
    return {(row["loop"], row["layer"]): [round(share * ACTIVE * len(prompt)) for share in row["router_load"]]
            for row in json.loads(out)["rows"] if row["stage"] == "self"}


before = {}
for n in range(1, len(text) + 1):
    now = uses(text[:n])
    for place, counts in now.items():
        for expert, count in enumerate(counts):
            if count > before.get(place, [0] * len(counts))[expert]:
                print(*place, n - 1, repr(text[n - 1])[1:-1], expert, sep="\t")
    before = now

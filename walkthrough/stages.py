#!/usr/bin/env python3
"""Rewrites the architecture inside a checkpoint: usage: stages.py IN.safetensors OUT.safetensors 'STAGES, a JSON list'

An architecture is a list of stages, so changing the list changes the model. Tensors that the new list does not need
are left out; tensors that it needs must be there. Standard library only, no check beyond that: yocou doubts the result.
"""
import json
import struct
import sys

source, target, stages = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with open(source, "rb") as f:
    header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    data = f.read()
meta = header.pop("__metadata__")
config = json.loads(meta["yocou"])
config["arch"], config["stages"] = "custom", stages
meta["yocou"] = json.dumps(config)

shared = any(s["attention"] == "shared" for s in stages)
keep, body = {"__metadata__": meta}, b""
for name, t in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
    stage, dot, rest = name.partition(".")
    mine = next((s for s in stages if s["name"] == stage), None)
    if stage in ("kv", "kv_norm"):
        wanted = shared
    elif dot:
        wanted = mine is not None and int(rest.split(".")[0]) < mine["layers"]
    else:
        wanted = True  # embed, norm, head
    if wanted:
        begin, end = t["data_offsets"]
        t["data_offsets"] = [len(body), len(body) + end - begin]
        keep[name], body = t, body + data[begin:end]
text = json.dumps(keep).encode()
text += b" " * (-len(text) % 8)
with open(target, "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text + body)

#!/usr/bin/env python3
"""Writes the model of the traced example: usage: five.py OUT.safetensors [LAYERS W T]   (standard library only)

Small enough to follow by hand: D 4, H 2, G 1, dh 2, F 6, and 1 layer in each decoder, W 2, T 2 unless given. Weights have
one decimal, gains are 1.
"""
import json
import random
import struct
import sys

D, H, G, dh, F, V = 4, 2, 1, 2, 6, 256
layers, W, T = (int(a) for a in sys.argv[2:] or (1, 2, 2))
stages = [{"name": "self", "layers": layers, "loops": T, "attention": "window", "window": W},
          {"name": "cross", "layers": layers, "attention": "shared"}]
config = {"arch": "yoco-u", "vocab_size": V, "dim": D, "heads": H, "kv_heads": G, "head_dim": dh, "ffn_dim": F,
          "norm_eps": 1e-5, "rope_theta": 10000.0, "rope_pairing": "interleaved", "embed_scale": 1.0,
          "tied_embeddings": False, "tokenizer": "bytes", "stages": stages}
shapes = {"embed": (V, D), "kv_norm": (D,), "kv.wk": (G * dh, D), "kv.wv": (G * dh, D), "norm": (D,), "head": (V, D)}
for name in (f"{stage['name']}.{i}" for stage in stages for i in range(layers)):
    shapes |= {f"{name}.attn_norm": (D,), f"{name}.wq": (H * dh, D), f"{name}.wo": (D, H * dh), f"{name}.ffn_norm": (D,),
               f"{name}.w_gate": (F, D), f"{name}.w_up": (F, D), f"{name}.w_down": (D, F)}
shapes |= {f"self.{i}.{w}": (G * dh, D) for i in range(layers) for w in ("wk", "wv")}

draw, header, data = random.Random(5), {"__metadata__": {"yocou": json.dumps(config)}}, b""
for name, shape in shapes.items():
    count = shape[0] * (shape[1] if len(shape) == 2 else 1)
    numbers = [1.0] * count if len(shape) == 1 else [draw.randint(-9, 9) / 10 for _ in range(count)]
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * count]}
    data += struct.pack(f"<{count}f", *numbers)
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(sys.argv[1], "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text + data)

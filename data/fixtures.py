#!/usr/bin/env python3
"""Fixtures written by Python's safetensors library, and a check that it reads what train.py writes.

Needs `pip install safetensors numpy ml_dtypes`, so it runs apart from the other scripts (and imports neither PyTorch
nor train.py). It re-saves golden/tiny-moe*.safetensors through the library, whose order of tensors is its own; the
golden logits of the file it was made from hold for the copy.
"""
import glob
import os

import ml_dtypes  # noqa: F401 (gives numpy the type bfloat16)
from safetensors import safe_open
from safetensors.numpy import save_file

here = os.path.dirname(os.path.abspath(__file__))
golden = os.path.join(here, "golden")
for name in ("tiny-moe", "tiny-moe-bf16", "tiny-moe-f16"):
    with safe_open(os.path.join(golden, name + ".safetensors"), "np") as f:
        save_file({k: f.get_tensor(k) for k in f.keys()}, os.path.join(golden, f"library-{name[5:]}.safetensors"), f.metadata())
files = sorted(glob.glob(os.path.join(here, "*.safetensors")) + glob.glob(os.path.join(golden, "*.safetensors")))
for path in files:
    with safe_open(path, "np") as f:
        tensors = {k: f.get_tensor(k) for k in f.keys()}
        print(f"{os.path.basename(path):44} {len(tensors):3} tensors {sum(t.size for t in tensors.values()):8} elements, "
              f"{'config' if 'yocou' in f.metadata() else 'NO CONFIG'}")

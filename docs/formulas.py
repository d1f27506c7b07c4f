#!/usr/bin/env python3
"""usage: formulas.py FILE.md ...   every formula of the files, ```math and $`inline`$, parses as TeX (katex on PATH)."""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys


def formulas(path):
    kind = None
    block = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            if kind == "math":
                yield number, "\n".join(block)
            kind, block = (line[3:] or "text") if kind is None else None, []
        elif kind == "math":
            block.append(line)
        elif kind is None:
            for inline in re.findall(r"\$`([^`]*)`\$", line):
                yield number, inline


def check(item):
    where, formula = item
    done = subprocess.run(["katex", "-d"], input=formula, capture_output=True, text=True)
    return f"{where}: {formula}\n{done.stderr.splitlines()[0] if done.stderr else ''}" if done.returncode else ""


os.environ.setdefault("NODE_PATH", "/usr/share/nodejs")  # for a node that is not Debian's own
found = {}  # each formula once
for name in sys.argv[1:]:
    for number, formula in formulas(pathlib.Path(name)):
        found.setdefault(formula, f"{name}:{number}")
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    wrong = [w for w in pool.map(check, [(where, formula) for formula, where in found.items()]) if w]
print("\n".join(wrong + [f"{len(found)} formulas, {len(wrong)} wrong"]))
sys.exit(bool(wrong) or not found)

#!/usr/bin/env python3
"""Registers, shared memory and spills of every kernel, as ptxas reports them, against the table in docs/gpu.md.

usage: cuda_registers.py [--write]     compiles kernels.cu for sm_90a (half a minute, no GPU needed)

Fails when a kernel spills, when ptxas had to put fences or waits around wgmma (notes C7508 .. C7519), or when the table
in docs/gpu.md differs from what was measured. --write puts the new table there. Exit 77: no nvcc.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

root = pathlib.Path(__file__).resolve().parent.parent
page = root / "docs" / "gpu.md"
begin, end = "<!-- registers: written by tests/cuda_registers.py -->\n", "<!-- registers: end -->"


def compile_report():
    """What ptxas says about kernels.cu."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not nvcc:
        print("skipped: no nvcc")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-std=c++20", "-O3", "-DYOCOU_CUDA", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v",
                   "-c", str(root / "kernels.cu"), "-o", folder + "/kernels.o"]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr[-2000:])
    return run.stderr + run.stdout


def kernels(report):
    """(name, registers, spilled bytes) of every entry function, sorted."""
    pattern = re.compile(r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
                         r".*?Used (\d+) registers", re.S)
    rows = set()
    for mangled, stores, loads, registers in pattern.findall(report):
        rows.add((short_name(mangled), int(registers), int(stores) + int(loads)))
    return sorted(rows)


def short_name(mangled):
    """attend_split<128>, from its mangled form: length and name follow the anonymous namespace's eight hex digits."""
    match = re.search(r"kernels_cu_[0-9a-f]{8}(\d+)", mangled)
    at = match.end()
    name = mangled[at:at + int(match.group(1))]
    rest = mangled[at + len(name):]
    if not rest.startswith("I"):
        return name
    kinds = {"0": "bf16", "1": "f32", "2": "add"}
    arguments = []
    for enum, number, kind in re.findall(r"LNS0_2ToE(\d)E|Li(\d+)E|(13__nv_bfloat16|f)(?=E)", rest[:rest.find("EEv") + 2]):
        arguments.append(kinds[enum] if enum else number if number else "f32" if kind == "f" else "bf16")
    return f"{name}<{', '.join(arguments)}>"


def main():
    report = compile_report()
    notes = re.findall(r".*\(C75\d\d\).*", report)
    rows = kernels(report)
    spills = [row for row in rows if row[2]]
    if notes or spills or not rows:
        sys.exit("\n".join(notes + [f"{name} spills {bytes} bytes" for name, _, bytes in spills]) or "no kernels found")
    table = "| kernel | registers |\n|---|---|\n" + "".join(f"| `{name}` | {count} |\n" for name, count, _ in rows)
    text = page.read_text()
    head, tail = text.split(begin)[0], text.split(end)[1]
    new = head + begin + table + end + tail
    if "--write" in sys.argv:
        page.write_text(new)
    elif new != text:
        sys.exit("docs/gpu.md: the table of registers is not what ptxas reports; run tests/cuda_registers.py --write")
    print(f"{len(rows)} kernels, no spills")


main()

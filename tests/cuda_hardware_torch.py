#!/usr/bin/env python3
"""PyTorch beside the hardware check: torch.matmul and scaled_dot_product_attention at the shapes of the check's rows.

usage: cuda_hardware_torch.py LOG     LOG: what cuda_hardware_check wrote

Every shape that LOG has times for is timed here, weights in turn through more than L2 as there. Without PyTorch or a
device a line says so.
"""
import re
import sys

number = r"\|\s*([\d.]+) \|"
product = re.compile(r"\| product (\d+) x (\d+) x (\d+), (\S+)\s*(?:" + number + ")?")
attention = re.compile(r"\| attention, (shared|full)[^|]*?(?:, (\d+) (?:rows|a pass))?\s*(?:" + number + ")?")
prepared = re.compile(r"\| pass prepared: batch (\d+), N (\d+)")


def rows(log):
    """(what, shape) -> our least microseconds, or None where the check ran without a device."""
    ours, batch, keys = {}, 0, 0
    for line in log:
        if m := prepared.search(line):
            batch, keys = int(m[1]), int(m[2])
        if m := product.search(line):
            key, time = ("matmul", tuple(int(m[i]) for i in (1, 2, 3))), m[5]
        elif m := attention.search(line):
            full = m[1] == "full"
            if not full and not keys:
                continue
            key, time = ("attention", (1, int(m[2]), int(m[2])) if full else (batch, 1, keys)), m[3]
        else:
            continue
        times = [float(t) for t in (ours.get(key), time) if t]
        ours[key] = min(times) if times else None
    return ours


def measure(torch, work, turns):
    """Median microseconds of work(i) over five rounds of `turns`."""
    times = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(turns):
            work(i)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / turns)
    return sorted(times[1:])[2]


def theirs(torch, what, shape):
    """Microseconds of PyTorch's own."""
    make = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)
    if what == "matmul":
        n, out, inner = shape
        turns = 1 if n > 32 else 2**28 // (2 * out * inner) + 1
        x, w = make(n, inner), make(turns, out, inner)
        return measure(torch, lambda i: torch.matmul(x, w[i].T), turns)
    batch, count, keys = shape
    q, k, v = make(batch, 20, count, 128), make(batch, 4, keys, 128), make(batch, 4, keys, 128)
    attend = torch.nn.functional.scaled_dot_product_attention
    return measure(torch, lambda i: attend(q, k, v, is_causal=count > 1, enable_gqa=True), 1)


def main():
    ours = rows(open(sys.argv[1]))
    if not ours:
        sys.exit(f"{sys.argv[1]}: no rows of products or attention")
    torch, reason = None, "no PyTorch"
    try:
        import torch
        reason = "" if torch.cuda.is_available() else "PyTorch sees no device"
    except ImportError:
        pass
    print(f"  PyTorch {torch.__version__}" if torch else "  no PyTorch: nothing to compare with")
    print("  | what | ours, best kernel, us | PyTorch, us | PyTorch / ours |\n  |---|---|---|---|")
    for (what, shape), time in ours.items():
        name = f"{what} " + " x ".join(map(str, shape))
        other = None
        if not reason:
            try:
                other = theirs(torch, what, shape)
            except (RuntimeError, TypeError) as e:  # out of memory, or a PyTorch too old for grouped heads
                reason_here = str(e).splitlines()[0]
        cell = f"{other:.1f}" if other else reason or reason_here
        ratio = f"{other / time:.2f}" if other and time else ""
        print(f"  | {name} | {time if time else 'no device'} | {cell} | {ratio} |", flush=True)


main()

#!/usr/bin/env python3
"""The tables of README.md, in Markdown, from curves/*.json and `yocou cost` of the shipped checkpoints.

usage: tables.py austen | curves | positions | relatives | applications | moves | loops | needles     (yocou on PATH; standard library only)
"""
import csv
import glob
import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def runs(task):
    """Finished runs of a task, {recipe without its seed: [a result for each seed]}."""
    groups = {}
    for path in sorted(glob.glob(str(HERE / "curves" / "*.json"))):
        r = json.loads(pathlib.Path(path).read_text())
        if r["task"] == task:
            groups.setdefault(r["name"].rsplit("-s", 1)[0] if task != "austen" else r["name"], []).append(r)
    return groups


def table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def mean(values):
    return sum(values) / len(values)


def spread(values):
    """Mean, and the range over seeds."""
    return f"{mean(values):.3f}" + (f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else "")


def work(g):
    """Parameters, steps, 10^12 FLOP of training, CPU minutes; means over seeds."""
    steps = sorted({r["steps"] for r in g})
    return [f"{g[0]['params'] + g[0]['embed_and_head']:,}", " to ".join(f"{n:,}" for n in (steps[0], steps[-1])[:len(steps)]),
            f"{mean([r['train_flops'] for r in g]) / 1e12:.1f}", f"{mean([r['cpu_s'] for r in g]) / 60:.1f}"]


WORK = ["parameters", "steps", "TFLOP", "cpu min"]


def trained_at(r):
    """The T whose accuracy stands for a run: its own, 3 for one that saw several."""
    return str(r["draw"][0] if len(r["draw"]) == 1 else 3)


def own(g, key="all"):
    return [r["by_loops"][trained_at(r)][key] for r in g]


def cost(name):
    """Cache bytes and prefill FLOP of 4,096 tokens, prefill FLOP of 32, by formula, for the shipped checkpoint of a run."""
    checkpoint = HERE / (name.replace("cups-yoco-u-t", "cups-t") + ".safetensors")
    done = subprocess.run(["yocou", "cost", checkpoint, "-N", "4096,32", "--json"], stdout=subprocess.PIPE, check=True)
    long, short = json.loads(done.stdout)["rows"]
    return [f"{long['cache_bytes'] / 1024:,.0f}", *(f"{row['prefill_flops'] / 1e6:,.1f}" for row in (long, short))]


def ranked(groups):
    """The best first."""
    return sorted(groups.items(), key=lambda item: -mean(own(item[1])))


def relatives(cups, keep):
    table(["run", "layer applications", "T", *WORK, "cache KiB, N = 4,096", "prefill MFLOP, N = 4,096", "prefill MFLOP, N = 32", "seeds",
           "accuracy, 32 moves"],
          [[f"`{name}`", g[0]["applications"], trained_at(g[0]), *work(g), *cost(name), len(g), spread(own(g))]
           for name, g in ranked(cups) if keep(name, g[0])])


def main():
    what = sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__)
    cups = runs("cups")
    if what == "austen":
        table(["run", "trained at T", *WORK, *(f"T = {T}" for T in range(1, 6))],
              [[f"`{name}`", ", ".join(map(str, g[0]["draw"])), *work(g), *(g[0]["bpb_256"].get(str(T), "") for T in range(1, 6))]
               for name, g in runs("austen").items()])
    elif what == "curves":
        steps = range(200, 2601, 200)
        rows = {name: csv.reader((HERE / "curves" / f"{name}.csv").open()) for name in [*runs("austen"), "austen-mixed"]}
        rows = {name: {row[0]: row[2] for row in r} for name, r in rows.items()}
        table(["bits per byte at step", *(f"{n:,}" for n in steps)], [[f"`{name}`", *(r.get(str(n), "") for n in steps)] for name, r in rows.items()])
    elif what == "positions":
        groups = {name: g[0]["bpb_4096_by_position"] for name, g in runs("austen").items()}
        first = [int(n) for n in next(iter(groups.values()))]
        table(["positions", *(f"{a:,}-{b - 1:,}" for a, b in zip(first, first[1:] + [4096]))],
              [[f"`{name}`", *(f"{v:.3f}" for v in g.values())] for name, g in groups.items()])
    elif what == "relatives":
        relatives(cups, lambda name, r: not name.endswith("-8") and name not in ("cups-random", "cups-yoco-u-t2", "cups-yoco-u-t5"))
    elif what == "applications":
        relatives(cups, lambda name, r: r["applications"] == 8 and name != "cups-random")
    elif what == "moves":
        table(["run", "seeds", *(f"{k}-{k + 3}" for k in range(1, 41, 4))],
              [[f"`{name}`", len(g), *(f"{mean([moves[k] for moves in own(g, 'by4')]):.2f}" for k in range(10))]
               for name, g in ranked(cups)])
    elif what == "loops":
        table(["run", "seeds", *(f"T = {T}" for T in range(1, 11))],
              [[f"`{name}`", len(g), *(f"{mean([r['by_loops'][str(T)]['all'] for r in g]):.3f}" for T in range(1, 11))]
               for name, g in cups.items() if len(g[0]["by_loops"]) > 1])
    elif what == "needles":
        lengths = ("96", "256", "512", "1024", "2048")
        table(["run", *WORK, "learned", *(f"N = {int(n):,}" for n in lengths)],
              [[f"`{name}`", *work(g), f"{sum(r['by_length']['96'] > 0.99 for r in g)} of {len(g)}",
                *(f"{mean([r['by_length'][n] for r in g]):.3f}" for n in lengths)] for name, g in runs("needle").items()])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""usage: options.py FILE.md ...   every command and option of yocou that a text names exists (yocou on PATH).

In a console or sh block, `yocou COMMAND --option` must be an option of that command; in a code span, `--option` must be
one of some command. Other programs' options in blocks are not looked at.
"""
import pathlib
import re
import subprocess
import sys


def help_of(*command):
    return subprocess.run(["yocou", *command, "--help"], capture_output=True, text=True, check=True).stdout


def options(text):
    return set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", text))


top = help_of()
commands = re.findall(r"^  ([a-z]+) {2,}", top[top.index("Subcommands:"):], re.M)
of = {c: options("\n".join(l for l in help_of(c).splitlines() if l.startswith("  "))) for c in commands}
anywhere = set().union(options(top), *of.values())
bad = looked = 0
for name in sys.argv[1:]:
    block = None
    for number, line in enumerate(pathlib.Path(name).read_text().splitlines(), 1):
        wrong = []
        if line.startswith("```"):
            block = (line[3:] or "text") if block is None else None
        elif block is None:
            for span in re.findall(r"`([^`]+)`", line):
                words = span.split()
                if words[0] == "yocou" and len(words) > 1 and re.fullmatch("[a-z]+", words[1]) and words[1] not in of:
                    wrong.append(words[1])
                if words[0] == "yocou" or words[0].startswith("--"):
                    known = of.get(words[1], anywhere) if words[0] == "yocou" and len(words) > 1 else anywhere
                    named = options(span)
                    looked += len(named)
                    wrong += sorted(named - known)
        elif (block.startswith("console") and line.startswith(("$ ", "> "))) or block == "sh":
            for call in re.finditer(r"\byocou ([a-z]+)\b((?:\"(?:\\.|[^\"\\])*\"|'[^']*'|[^|;&<>()])*)", line):
                if call[1] not in of:
                    wrong.append(f"yocou {call[1]}")
                    continue
                named = options(re.sub(r"\"(?:\\.|[^\"\\])*\"|'[^']*'", "''", call[2]))
                looked += len(named)
                wrong += sorted(named - of[call[1]])
        for word in wrong:
            bad += 1
            print(f"{name}:{number}: yocou has no {word} there")
print(f"{looked} options looked up, {bad} unknown")
sys.exit(bad > 0 or looked == 0)

#!/usr/bin/env python3
"""Re-makes the code regions and the program's outputs in a Markdown file and compares them with what it shows.

usage: weave.py [--update] FILE.md ...      (yocou on PATH; standard library only)

Fences that are checked:
  ```cpp snippet=NAME      the lines between two comments `// [NAME]` in yocou.cpp (snippet=FILE:NAME for another file)
  ```console               each `$ ` line is run in bash, in a scratch folder with links to data/, walkthrough/,
                           docs/ and the sources; its output follows
                           A line `> ` behind one that ends in | or do goes on with it.
  ```console volatile      the same, compared up to numbers; what was committed stays as long as only numbers differ
  ```python                run in the same folder, all blocks of a file one after the other in one Python; what it
                           prints follows in a fence ```text printed
  ```python def=NAME ...   these functions of walkthrough/forward.py
and a line
  Made by `COMMAND`:       the table behind it is what the command prints, run in the same folder
With --update the file is rewritten; without it a difference is printed and the exit status is 1.
"""
import difflib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
NUMBER = re.compile(r" *[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")


def region(name):
    """The code between the two markers of a region; regions do not nest."""
    file, _, name = name.rpartition(":")
    lines = (ROOT / (file or "yocou.cpp")).read_text().splitlines()
    at = [i for i, line in enumerate(lines) if line.strip() == f"// [{name}]"]
    if len(at) != 2:
        sys.exit(f"weave: region [{name}] has {len(at)} markers in {file or 'yocou.cpp'}, expected 2")
    inside = lines[at[0] + 1:at[1]]
    if any(re.fullmatch(r"\s*// \[[\w-]+\]", line) for line in inside):
        sys.exit(f"weave: region [{name}] contains a marker")
    indent = min(len(line) - len(line.lstrip()) for line in inside if line.strip())
    return [line[indent:] for line in inside]


def functions(names):
    """Functions of forward.py, a blank line between two."""
    source, out = (ROOT / "walkthrough" / "forward.py").read_text(), []
    for name in names:
        found = re.search(rf"^def {name}\(.*?(?=\n\n\n)", source, re.M | re.S)
        if not found:
            sys.exit(f"weave: forward.py has no function {name}")
        out += ([""] if out else []) + found[0].split("\n")
    return out


def start_python(folder):
    """A Python that runs one block after the other: code goes in and output comes out, each as one line of JSON."""
    serve = """import contextlib, io, json, sys, traceback
sys.path.insert(0, "walkthrough")
space = {}
for line in sys.stdin:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try: exec(json.loads(line), space)
        except Exception: print(traceback.format_exc().splitlines()[-1])
    print(json.dumps(out.getvalue()), flush=True)
"""
    return subprocess.Popen([sys.executable, "-B", "-c", serve], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True)


def commands_of(body):
    """The commands of a block: `$ ` lines, each with the `> ` lines that go on with it."""
    commands, open_ended = [], False
    for line in body:
        if line.startswith("$ "):
            commands.append(line[2:])
        elif line.startswith("> ") and open_ended:
            commands[-1] += "\n" + line[2:]
        else:
            open_ended = False
            continue
        open_ended = line.endswith((" |", " do"))
    return commands


def run(commands, folder):
    """Each command alone in bash, its output behind it; a failing one adds its exit status."""
    out = []
    for command in commands:
        done = subprocess.run(["bash", "-c", command], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=600)
        text = done.stdout.decode("utf-8", "replace").rstrip("\n")
        out += ("$ " + command.replace("\n", "\n> ")).split("\n") + (text.split("\n") if text else [])
        if done.returncode:
            out.append(f"[exit {done.returncode}]")
    return [line.rstrip() for line in out]


def weave(path, folder):
    """The file as it should be."""
    lines, out, checked, i, python = path.read_text().splitlines(), [], 0, 0, None
    while i < len(lines):
        line = lines[i]
        out.append(line)
        i += 1
        if made := re.fullmatch(r"Made by `(.+)`:", line):
            while i < len(lines) and (not lines[i] or lines[i].startswith("|")):
                i += 1
            out += ["", *run([made[1]], folder)[1:], ""]
            checked += 1
        if not line.lstrip().startswith("```"):
            continue
        kind = line[3:]
        end = next((j for j in range(i, len(lines)) if lines[j].strip() == "```"), None)
        if end is None or line.startswith(" "):
            sys.exit(f"{path}:{i}: a fence that is indented or never closed")
        body = lines[i:end]
        if kind.startswith("cpp snippet="):
            body, checked = region(kind[len("cpp snippet="):]), checked + 1
        elif kind in ("console", "console volatile"):
            new = run(commands_of(body), folder)
            masked = [[re.sub(" +", " ", NUMBER.sub("#", b)) for b in text] for text in (body, new)]
            if kind == "console" or masked[0] != masked[1]:
                body = new
            checked += 1
        elif kind.startswith("python def="):
            body, checked = functions(kind[len("python def="):].split()), checked + 1
        elif kind == "python":
            python = python or start_python(folder)
            print(json.dumps("\n".join(body)), file=python.stdin, flush=True)
            printed = [line.rstrip() for line in json.loads(python.stdout.readline()).rstrip("\n").split("\n")]
            out += body + ["```"]
            i, checked = end + 1, checked + 1
            if lines[i:i + 2] == ["", "```text printed"]:  # what it printed last time
                i = lines.index("```", i) + 1
            if printed != [""]:
                out += ["", "```text printed", *printed, "```"]
            continue
        elif kind not in ("math", "sh", "text", "json"):
            sys.exit(f"{path}:{i}: a fence of unknown kind '{kind}'")
        out += body + ["```"]
        i = end + 1
    if python:
        python.stdin.close(), python.wait()
    if not checked:
        sys.exit(f"{path}: nothing in it is checked")
    return "\n".join(out) + "\n"


def main():
    update, files = "--update" in sys.argv, [a for a in sys.argv[1:] if a != "--update"]
    os.environ["LC_ALL"] = "C.UTF-8"
    different = False
    for name in files:
        path = pathlib.Path(name).resolve()
        with tempfile.TemporaryDirectory() as folder:
            for name_of in ("data", "walkthrough", "docs", "yocou.h", "yocou.cpp", "checkpoint.cpp", "main.cpp", "kernels.cu"):
                (pathlib.Path(folder) / name_of).symlink_to(ROOT / name_of)
            new, old = weave(path, folder), path.read_text()
        if new != old and update:
            path.write_text(new)
        elif new != old:
            different = True
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "as it is now"))
    sys.exit(different)


if __name__ == "__main__":
    main()

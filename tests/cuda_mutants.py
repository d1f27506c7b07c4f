#!/usr/bin/env python3
"""Plants faults in kernels.cu, one at a time, and runs the emulated tests: every one must be noticed.

usage: cuda_mutants.py BUILD [--quick] [N..]     BUILD: a folder of a build with tests; takes some minutes

All faults go into one copy of kernels.cu, each behind `mutant == N`, so that it is compiled once; YOCOU_MUTANT chooses.
Each fault names the test that should notice it; one that this test misses is run through all tests. With no fault
chosen the same binary must pass. --quick leaves out both of these long runs. Numbers choose faults. Exit 1 when a fault
is missed. docs/gpu.md has the result.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

root = pathlib.Path(__file__).resolve().parent.parent
arch, fast, window, split, pages = ("cuda engine: every arch*", "cuda engine: fast*", "cuda engine: windows at*",
                                    "cuda engine: windows longer*", "cuda engine: page edges")
experts, product, sampling, sorting = "cuda engine: mixtures*", "cuda products*", "cuda sampling*", "cuda experts*"
M = "(mutant == {})"

# (fault, the test that should notice, old text, new text with M for "this fault is chosen")
faults = [
    # --- what a query sees
    ("attend: window one too wide", arch, "max(0, r.position - keys.window + 1) : 0;\n  float m",
     "max(0, r.position - keys.window + 1 - M) : 0;\n  float m"),
    ("attend: the last key is left out", arch, "if (key <= r.position) {", "if (key + M <= r.position || key == 0) {"),
    ("attend: heads interleaved over KV heads", arch, "group = heads / keys.kv_heads, g = h / group;",
     "group = heads / keys.kv_heads, g = M ? h % keys.kv_heads : h / group;"),
    ("attend_tiles: window one too wide", window, "keys.window ? max(0, position - keys.window + 1) : 0; };",
     "keys.window ? max(0, position - keys.window + 1 - M) : 0; };"),
    ("attend_tiles: first tile of keys one late", window, "const int k0 = oldest(q0), tiles", "const int k0 = oldest(q0 + M), tiles"),
    ("attend_tiles: sees the next position", fast, "if (key > position || key < oldest",
     "if (key > position + M || key < oldest"),
    ("attend_tiles: heads interleaved over KV heads", fast, "group = heads / keys.kv_heads, head = h / group;",
     "group = heads / keys.kv_heads, head = M ? h % keys.kv_heads : h / group;"),
    ("attend_split: no mask behind the last key", fast, "if (key >= end) s[e / 2]", "if (key >= end && !M) s[e / 2]"),
    ("attend_split: outputs of a group interleaved", fast, "const Index qh = head * group + h;",
     "const Index qh = M ? h * keys.kv_heads + head : head * group + h;"),
    ("attend_tiles: rows behind the segment are written", fast, "if (i >= s.rows) continue;",
     "if (i >= s.rows && !M) continue;"),
    # --- softmax and merging
    ("merge: parts not weighted by their maxima", split, "const float factor = fast_exp2(row[DH] - all.highest);",
     "const float factor = M ? 1.0f : fast_exp2(row[DH] - all.highest);"),
    ("attend_merge: all splits of the grid, used or not", split, "const int used = (seen + split_rows - 1) / split_rows;",
     "const int used = M ? splits : (seen + split_rows - 1) / split_rows;"),
    ("attend_split: writes another split's place", split, "* splits + split) * (DH + 2);",
     "* splits + (M ? 0 : split)) * (DH + 2);"),
    ("softmax: over half a row's lanes", fast, "for (int i = 1; i < 4; i *= 2) v = Op", "for (int i = 1; i < (M ? 2 : 4); i *= 2) v = Op"),
    ("softmax: the sum is not shrunk with the output", window, "sum[half] = sum[half] * shrink + added",
     "sum[half] = sum[half] * (M ? 1 : shrink) + added"),
    ("softmax: the output is not shrunk", window, "o[place(e, half)] *= shrink;", "o[place(e, half)] *= M ? 1 : shrink;"),
    ("attend_tiles: tiles at the window's end are not masked", window, "key0 + 63 <= p0 && key0 >= oldest(p0 + 15);", "key0 + 63 <= p0 && (M || key0 >= oldest(p0 + 15));"),
    ("attend_tiles: tiles at the queries' own positions are not masked", fast, "= key0 + 63 <= p0 &&", "= (M || key0 + 63 <= p0) &&"),
    # --- caches
    ("ring: wrong modulus", window, "* window + p % window;", "* window + p % (window - (M && window > 1));"),
    ("pages: wrong modulus", pages, "* block_rows + p % block_rows;", "* block_rows + p % (block_rows - M);"),
    ("ring: the oldest row of a pass is not kept", window, "r.position + cache.window >= r.end", "r.position + cache.window >= r.end + M"),
    ("history: shifted by one", window, "const int p = s.position - 1 - int(blockIdx.x);",
     "const int p = s.position - 1 - M - int(blockIdx.x);"),
    ("history: one row short", window, "launch(grid(history_block, W - 1, r.segments", "launch(grid(history_block, W - 1 - (M && W > 2), r.segments"),
    ("recent: segments two rows too close", fast, "+ Index(segment + 1) * window +", "+ Index(segment + 1) * window - 2 * M * segment +"),
    ("page table: new pages over the first ones", pages, "table_stride_ + had, s.pages", "table_stride_ + (M ? 0 : had), s.pages"),
    ("a closed sequence keeps its pages", "cuda engine: sequences close*", "    free_pages_.insert(", "    if (!M) free_pages_.insert("),
    # --- rotation, norm, embedding
    ("RoPE: turns the other way", arch, "x * turn.x - y * turn.y;", "x * turn.x + (M ? y : -y) * turn.y;"),
    ("RoPE: position within the pass", arch, "const double angle = rows[i / half].position *", "const double angle = double(M ? i / half : rows[i / half].position) *"),
    ("RoPE: the half pairing ignored", arch, "const int first = a.half && a.rotate ? pair : 2 * pair;\n  const int second = a.half && a.rotate ?",
     "const int first = a.half && a.rotate && !M ? pair : 2 * pair;\n  const int second = a.half && a.rotate && !M ?"),
    ("RMSNorm: no epsilon", "cuda and cpu engines agree: random*", "/ float(D) + eps);", "/ float(D) + (M ? 0 : eps));"),
    ("embedding not scaled", arch, "to_float(embed[rows[i].token * ld + c]) * scale;", "to_float(embed[rows[i].token * ld + c]) * (M ? 1 : scale);"),
    # --- shared memory, barriers, asynchronous copies
    ("block sum: no barrier", arch, "  if (lane == 0) scratch[warp] = v;\n  __syncthreads();", "  if (lane == 0) scratch[warp] = v;\n  if (!M) __syncthreads();"),
    ("product_tile: cp.async waits for one group less", product, "    cp_async_wait<1>();\n    __syncthreads();  // stage s",
     "    M ? cp_async_wait<2>() : cp_async_wait<1>();\n    __syncthreads();  // stage s"),
    ("product_tile: no barrier in the loop", product, "__syncthreads();  // stage s: written by all, read by all; stage s - 1",
     "if (!M) __syncthreads();  // stage s: written by all, read by all; stage s - 1"),
    ("product_wgmma: cp.async waits for one group less", product, "    cp_async_wait<1>();\n    fence_proxy",
     "    M ? cp_async_wait<2>() : cp_async_wait<1>();\n    fence_proxy"),
    ("product_wgmma: no proxy fence", product, "    fence_proxy_async();\n    __syncthreads();", "    if (!M) fence_proxy_async();\n    __syncthreads();"),
    ("product_wgmma: no barrier in the loop", product, "    __syncthreads();  // stage s: written by all, read by all; both",
     "    if (!M) __syncthreads();  // stage s: written by all, read by all; both"),
    ("product_wgmma: a step's reads are not waited for", product, "wgmma_wait<1>();  // step", "M ? wgmma_wait<2>() : wgmma_wait<1>();  // step"),
    ("product_wgmma: the last step is not waited for", product, "  wgmma_wait<0>();\n  cp_async", "  if (!M) wgmma_wait<0>();\n  cp_async"),
    ("attend_split: stages refilled unread", split, "if (j >= Stages) mbar_wait(empty", "if (j >= Stages && !(M && Stages == 3)) mbar_wait(empty"),
    ("attend_split: a stage counts as read one warp early", split, "ring(/*readers=*/4);", "ring(/*readers=*/4 - M);"),
    ("attend_tiles: waits for the wrong phase of a free stage", fast, "unsigned(j / Stages - 1) & 1);", "unsigned(j / Stages - (M && Stages == 2 ? 0 : 1)) & 1);"),
    ("the ring of keys: wrong parity", window, "mbar_wait(full + j % Stages, unsigned(j / Stages) & 1);", "mbar_wait(full + j % Stages, unsigned(j / Stages + M) & 1);"),
    ("attend_tiles: S is not waited for", fast, "k > 0);\n    wgmma_commit();\n    wgmma_wait<0>();", "k > 0);\n    wgmma_commit();\n    if (!M) wgmma_wait<0>();"),
    ("product_skinny: a step's weights are not waited for", product, "cp_async_wait<ahead>();", "M ? cp_async_wait<ahead + 1>() : cp_async_wait<ahead>();"),
    ("product_skinny: a stage is refilled before it is read", product, "fetch(step + ahead);  // behind", "fetch(step + ahead + M);  // behind"),
    ("product_skinny: x of the step before", product, "load_x(next, step + 1);", "load_x(next, step + 1 - M);"),
    ("product_skinny: later rows meet what is left of the weights", product, "if (groups.start || row0 > begin) fetch_first();", "if (groups.start || (row0 > begin && !M)) fetch_first();"),
    ("swiglu: up taken from where a padded gate would end", arch, "*up = gate + F;", "*up = gate + (M ? padded(F) : F);"),
    ("rotate_append: heads behind the first 128 pairs are left out", "cuda engine: fast*", "if (head >= heads) return;", "if (head >= heads || (M && blockIdx.y)) return;"),
    ("a capture that fails stays open", "cuda engine: a launch that fails*", "    cudaStreamEndCapture(stream, &graph);\n    cudaGraphDestroy(graph);\n    throw;", "    if (!M) cudaStreamEndCapture(stream, &graph), cudaGraphDestroy(graph);\n    throw;"),
    ("product_skinny: no barrier before the next rows", product, "__syncthreads();  // read by all before the next rows'", "if (!M) __syncthreads();  // read by all before the next rows'"),
    ("sort_by_expert: no barrier between rounds", sorting, "__syncthreads();  // read by all before the next round's", "if (!M) __syncthreads();  // read by all before the next round's"),
    # --- layouts
    ("swizzled tile read with another pattern", fast, "(piece ^ row % 8) * 8;", "(piece ^ (M ? row / 8 : row) % 8) * 8;"),
    ("product_wgmma: pieces laid elsewhere", product, "operand + r * 64 + (thread % 8 ^ r % 8) * 8;", "operand + r * 64 + (thread % 8 ^ (r + M) % 8) * 8;"),
    ("attend_tiles: V's descriptor a row off", fast, "descriptor(V + i * KvRing::slab + k * 16 * 64)", "descriptor(V + i * KvRing::slab + k * (16 - M) * 64)"),
    ("descriptor: wrong stride", fast, "uint64_t(1024 >> 4) << 32", "uint64_t((M ? 512 : 1024) >> 4) << 32"),
    # --- experts
    ("product_skinny: one expert's weights for all", experts, "w += (group * out + out0) * ld;", "w += ((M ? 0 : group) * out + out0) * ld;"),
    ("product_tile: one expert's weights for all", product, "w += rows.group * out * ld;\n  bf16* memory = shared_memory<bf16>();\n  const int thread = int(threadIdx.x), warp = thread / 32,",
     "w += (M ? 0 : rows.group) * out * ld;\n  bf16* memory = shared_memory<bf16>();\n  const int thread = int(threadIdx.x), warp = thread / 32,"),
    ("products: rows gathered by assignment", product, "xi[j] = groups.source(row0 + thread / 8 + 32 * j, end);",
     "xi[j] = M && row0 + thread / 8 + 32 * j < end ? (row0 + thread / 8 + 32 * j) % n : groups.source(row0 + thread / 8 + 32 * j, end);"),
    ("groups: a tile reaches into the next group", product, "end = start + rows, first =", "end = start + rows + (M && group + 1 < g.count), first ="),
    ("sort_by_expert: not stable, warps overtake", sorting, "if (w < warp) at += counts[w];", "if (M ? w > warp : w < warp) at += counts[w];"),
    ("combine: sorted order taken for the rows'", experts, "y[place[i * active + j] * ldy + c]", "y[(M ? i * active + j : place[i * active + j]) * ldy + c]"),
    ("combine: the first expert's weight for all", experts, "sum += weight[i * active + j] * to_float", "sum += weight[i * active + (M ? 0 : j)] * to_float"),
    ("route: ties to the higher index", experts, "(v == best && e < index)", "(v == best && (M ? e > index : e < index))"),
    ("route: never normalized", arch, "if (normalize && lane == 0)", "if (normalize && lane == 0 && !M)"),
    # --- the engine
    ("graphs: one for all lengths", split, "std::pair{all_.n, split_count_}", "std::pair{all_.n, M ? Index(1) : split_count_}"),
    ("graphs: one for all batch sizes", fast, "    auto found = graphs_.find(key);", "    auto found = graphs_.find(M && !graphs_.empty() ? graphs_.begin()->first : key);"),
    ("graphs: replayed where fewer rows are wanted", fast, "all_.single && wanted_.n == all_.n &&", "all_.single && (M || wanted_.n == all_.n) &&"),
    ("graphs kept when their buffer moves", split, "forget_graphs(), partial_ = {}", "M ? void() : forget_graphs(), partial_ = {}"),
    ("counters: every appended row a row of K^, V^", "cuda and cpu engines agree: random*", "keep && a.q_heads == 0)", "keep && (M || a.q_heads == 0))"),
    ("counters: what the host's calls did is forgotten on replay", "cuda and cpu engines agree: random*", "host_.cross_positions += did", "host_.cross_positions += (M ? 0 : 1) * did"),
    ("counters: attend_split counts padded heads", fast, "4 * Index(end - begin) * group * DH", "4 * Index(end - begin) * (M ? 16 : group) * DH"),
    ("counters: attend_tiles counts masked keys", fast, "seen += p - oldest(p) + 1;", "seen += M ? tiles * 64 : p - oldest(p) + 1;"),
    ("counters: a product counts its tile's padding", product, "min(end - row0, Index(height)), min(out - out0, Index(width)), in, row0 == begin", "M ? Index(height) : min(end - row0, Index(height)), min(out - out0, Index(width)), in, row0 == begin"),
    ("counters: weights counted for every tile of rows", product, "first = tile == before;", "first = M || tile == before;"),
    ("cache bytes: pages counted once", pages, "(c.paged ? Index(s.pages.size()) : 1)", "(c.paged && !M ? Index(s.pages.size()) : 1)"),
    ("wanted rows: one before", fast, "*index++ = first - back;", "*index++ = std::max(0, first - back - M);"),
    ("logits of more than 256 rows: the first ones again", "cuda engine: more rows*", "norm(state_ + first * c_.dim, nullptr", "norm(state_ + (M ? 0 : first) * c_.dim, nullptr"),
    ("the same without a shared stage", "cuda engine: more rows*", "norm(state_, wanted_index_ + first,", "norm(state_, wanted_index_ + (M ? 0 : first),"),
    ("NaN logits pass", "cuda engine: what it refuses*", "bad |= !(fabsf(logits[i]) < INFINITY);", "bad |= M ? fabsf(logits[i]) == INFINITY : !(fabsf(logits[i]) < INFINITY);"),
    ("the flag of bad logits stays set", "cuda engine: what it refuses*", "  CUDA_CHECK(cudaMemsetAsync(&report_", "  if (!M) CUDA_CHECK(cudaMemsetAsync(&report_"),
    # --- sampling
    ("sample: top-k takes all ties", sampling, "mass = least.weight_above + (uint64_t(top_k) - least.count_above) * weight_of(least.key);", "mass = least.weight_above + (M ? least.count : uint64_t(top_k) - least.count_above) * weight_of(least.key);"),
    ("sample: top-p takes more", sampling, "ceil(double(top_p) * double(mass))", "ceil(double(top_p) * (M ? 0.5 : 1) * double(mass))"),
    ("sample: one more at top-p's border", sampling, "(bound - cut.weight_above + each - 1) / each * each", "((bound - cut.weight_above + each - 1) / each + 2 * M) * each"),
    ("sample: other keys in the histogram of a prefix", sampling, "!= uint64_t(prefix) >> (shift + width)) continue;", "!= uint64_t(prefix) >> (shift + width) && !M) continue;"),
    ("sample: carries are lost", sampling, "uint32_t(w >> 32) + (before + part < before);", "uint32_t(w >> 32) + (before + part < before && !M);"),
    ("sample: warps do not add those before them", sampling, "for (int i = 0; i < warp; ++i) count +=", "for (int i = 0; i < (M ? 0 : warp); ++i) count +="),
    ("sample: ties always to the first", sampling, "uint32_t((goal - drawn.weight_above) / each) : 0", "uint32_t((M ? 0 : goal - drawn.weight_above) / each) : 0"),
    ("sample: no barrier before the histogram is full", sampling, "    __syncthreads();  // full: added", "    if (!M) __syncthreads();  // full: added"),
    ("sample: no barrier before the crossing is read", sampling, "    __syncthreads();  // the crossing: written", "    if (!M) __syncthreads();  // the crossing: written"),
    ("sample: temperature multiplies", sampling, "fminf(log2_e / temperature, 1e30f)", "fminf(M ? log2_e * temperature : log2_e / temperature, 1e30f)"),
    # --- found in the text, not by running: the emulator runs one kernel after another
    ("a kernel does not wait for the one before it", "kernels.cu: a kernel waits*", "  grid_wait(), grid_launch();\n  const float* row = x +",
     "  grid_launch();\n  const float* row = x +"),
]


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    quick = "--quick" in sys.argv
    only = [int(n) for n in sys.argv[2:] if n.isdigit()] or range(1, len(faults) + 1)
    source = (root / "kernels.cu").read_text()
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="yocou-mutants-"))
    (scratch / "tests").mkdir()
    for path in (root / "tests").glob("*.h"):
        (scratch / "tests" / path.name).write_text(path.read_text())
    (scratch / "tests" / "cuda_kernels.cpp").write_text((root / "tests" / "cuda_kernels.cpp").read_text())
    (scratch / "yocou.h").write_text((root / "yocou.h").read_text())
    mutated = source.replace("namespace yocou {\nnamespace {\n",
                             "#include <cstdlib>\nnamespace yocou {\nnamespace {\n"
                             "const int mutant = std::getenv(\"YOCOU_MUTANT\") ? std::atoi(std::getenv(\"YOCOU_MUTANT\")) : 0;\n", 1)
    texts = {}
    for n, (name, _, old, new) in enumerate(faults, 1):
        if mutated.count(old) != 1:
            sys.exit(f"{name}: its text is found {mutated.count(old)} times in kernels.cu")
        if re.search(r"\bM\b", new):
            mutated = mutated.replace(old, re.sub(r"\bM\b", M.format(n), new))
        else:
            texts[n] = source.replace(old, new)
    (scratch / "kernels.cu").write_text(mutated)
    commands = subprocess.run(["ninja", "-C", build, "-t", "commands", "cuda_tests"], capture_output=True, text=True, check=True).stdout
    compiles = [line for line in commands.splitlines() if line.endswith("cuda_kernels.cpp")]
    links = [line for line in commands.splitlines() if " -o tests/cuda_tests" in line]
    object_file = re.search(r" -o (\S+)", compiles[0]).group(1)
    mutant_file, binary = scratch / "mutants.o", scratch / "cuda_tests"
    compile_command = compiles[0].replace(str(root / "tests"), str(scratch / "tests")).replace(
        f"-I{root}", f"-I{scratch}").replace(f"-o {object_file}", f"-o {mutant_file}")
    compile_command = re.sub(r"-MD -MT \S+ -MF \S+", "", compile_command).replace("-Werror", "-w")
    compile_command = re.sub(r"-DYOCOU_SOURCE_DIR=\S+", f"-DYOCOU_SOURCE_DIR='\"{scratch}\"'", compile_command)
    subprocess.run(compile_command, shell=True, check=True, cwd=build)
    link = links[-1].replace(object_file, str(mutant_file)).replace("-o tests/cuda_tests", f"-o {binary}")
    subprocess.run(link, shell=True, check=True, cwd=build)

    def fails(n, test):
        """Whether the tests notice fault n: a failed check, a crash, or no end."""
        (scratch / "kernels.cu").write_text(texts.get(n, source))
        environment = dict(os.environ, YOCOU_MUTANT=str(n), OMP_WAIT_POLICY="passive")
        try:
            return subprocess.run([binary, "-a"] + test, env=environment, capture_output=True, timeout=600).returncode != 0
        except subprocess.TimeoutExpired:
            print(f"{n:3} has no end:", end=" ")
            return True

    missed = []
    if not quick and fails(0, []):
        sys.exit("without a fault the tests fail already")
    for n in only:
        name, test = faults[n - 1][:2]
        how = "noticed" if fails(n, [test]) else "MISSED" if quick or not fails(n, []) else "noticed by another test"
        print(f"{n:3} {name}: {how}", flush=True)
        missed += [name] * (how == "MISSED")
    print(f"{len(only)} faults, {len(missed)} missed")
    sys.exit(bool(missed))


main()

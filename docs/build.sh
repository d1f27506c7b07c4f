#!/bin/sh
# Builds the site into a folder that works offline: docs/build.sh [FOLDER]   (default build/site)
# Debian 12: apt-get install doxygen doxygen-awesome-css libjs-mathjax python3. docs/formulas.py checks the formulas.
# Fails on any warning, broken link or missing image.
set -eu
cd "$(dirname "$0")/.."
out=${1:-build/site}
mkdir -p "$out"
out=$(cd "$out" && pwd)
rm -rf "$out/html"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

doxygen -w html "$work/stock.html" "$work/footer.html" "$work/style.css"
awk 'FNR == NR { head = head $0 "\n"; next } /mathjax/ { printf "%s", head } 1' docs/head.html "$work/stock.html" > "$work/header.html"
{ cat docs/Doxyfile; echo "OUTPUT_DIRECTORY = $out"; echo "HTML_HEADER = $work/header.html"; } | doxygen -
# Of the public page, every member must be documented.
{ cat docs/Doxyfile; echo "INPUT = yocou.h"; echo "WARN_IF_UNDOCUMENTED = YES"; echo "GENERATE_HTML = NO"; echo "GENERATE_XML = YES"; echo "OUTPUT_DIRECTORY = $work"; } | doxygen -

mkdir -p "$out/html/mathjax"
tar -ch --exclude='fonts/[A-SU-Z]*' -C /usr/share/javascript/mathjax MathJax.js extensions jax/element jax/input/TeX jax/output/SVG |
  tar -x -C "$out/html/mathjax"

python3 docs/links.py "$out/html"
echo "$out/html/index.html"

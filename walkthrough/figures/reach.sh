#!/bin/bash
# usage: reach.sh LAYERS LOOPS ROWS   measures which tokens a row's logits depend on, in a window-only model, W = 4:
# flips one token at a time and compares the logits of every row. Prints ROWS lines of ROWS values 0 or 1.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
yocou init --shape tiny --arch yoco-u --window 4 --layers 4 -o "$work/whole.safetensors"
python3 "$here/stages.py" "$work/whole.safetensors" "$work/self.safetensors" \
  "[{\"name\":\"self\",\"layers\":$1,\"loops\":$2,\"attention\":\"window\",\"window\":4}]"
rows() { yocou logits "$work/self.safetensors" --threads 1 --tokens "$1"; }
tokens=($(seq 1 "$3"))
rows "${tokens[*]}" > "$work/base"
for ((j = 0; j < $3; ++j)); do
  flipped=("${tokens[@]}"); flipped[j]=200
  rows "${flipped[*]}" > "$work/flipped"
  paste -d '\n' "$work/base" "$work/flipped" | awk -v j="$j" 'NR % 2 { a = $0; next } { print (NR / 2 - 1) "," j "," (a != $0) }'
done

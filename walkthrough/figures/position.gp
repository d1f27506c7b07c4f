load "walkthrough/figures/style.gnuplot"
set logscale x 2
set xlabel "position of the byte predicted"; set ylabel "bits per byte"
set title "a novel the model has not seen, 7 excerpts of 4096 bytes (tiny model)"
set key outside right center Left reverse
set xrange [8:4500]; set yrange [1.4:*]
s(m, T) = sprintf("< for i in $(seq 0 6); do tail -c +$((i * 4096 + 1)) data/austen-heldout.txt | head -c 4096 > part.txt; yocou score data/%s part.txt --loops %d --by-position --threads 1 --csv 2>/dev/null | awk -F, 'NF == 4 && $1 ~ /^[0-9]/ && $2 ~ /^[0-9]+$/ && seen { print } /^loops,from/ { seen = 1 }'; done | awk -F, '{ n[$2] += $3 - $2 + 1; b[$2] += $4 * ($3 - $2 + 1); to[$2] = $3 } END { for (f in n) if (f + 0 >= 8) print sqrt(f * (to[f] + 1)) \",\" b[f] / n[f] }' | sort -n", m, T)
plot for [T = 1:4] s("austen.safetensors", T) using 1:2 with linespoints lt 10 + T title sprintf("T = %d", T)

load "walkthrough/figures/style.gnuplot"
set logscale x 2
set xlabel "position of the byte predicted"; set ylabel "bits per byte"
set title "a novel the model has not seen, 14 excerpts of 2048 bytes (tiny model)"
set key top right Right noreverse
set xrange [12:2048]
s(m, T) = sprintf("< for i in $(seq 0 13); do tail -c +$((i * 2048 + 1)) data/austen-heldout.txt | head -c 2048 > part.txt; yocou score data/%s part.txt --loops %d --by-position --threads 1 --csv 2>/dev/null | awk -F, 'NF == 4 && $1 ~ /^[0-9]/ && $2 ~ /^[0-9]+$/ && $3 < 2048 && $3 > 0 && seen { print } /^loops,from/ { seen = 1 }'; done | awk -F, '{ n[$2] += $3 - $2 + 1; b[$2] += $4 * ($3 - $2 + 1); to[$2] = $3 } END { for (f in n) if (f + 0 >= 8) print sqrt(f * (to[f] + 1)) \",\" b[f] / n[f] }' | sort -n", m, T)
set arrow from 256,graph 0 to 256,graph 1 nohead lc rgb "#999999" dt 2
set label "trained on 256 bytes" at 270,graph 0.05 textcolor rgb "#666666"
plot for [T = 2:4] s("austen.safetensors", T) using 1:2 with linespoints lt T-1 title sprintf("T = %d", T)

load "walkthrough/figures/style.gnuplot"
set xlabel "moves"; set ylabel "exact answers"
set yrange [0:1.05]; set xrange [0:40]; set key outside right center Left reverse
set title "three cups, one checkpoint, T chosen when it runs (tiny model, synthetic task)"
# Four move counts together; 1/6 is a guess. Arrows: 4 T, how far back the self-decoder reaches.
c(T) = sprintf("< yocou eval data/cups-random.safetensors data/cups.jsonl --by moves --loops %d --threads 1 --csv 2>/dev/null | awk -F, 'NR > 1 { b = int(($2 - 1) / 4); n[b] += $3; c[b] += $4 } END { for (b = 0; b < 10; ++b) print 4 * b + 2.5 \",\" c[b] / n[b] }'", T)
do for [i = 1:5] { T = int(word("1 2 3 5 8", i)); set arrow i from 4*T,graph 0.06 to 4*T,graph 0 lt 10 + i size graph 0.012,25 filled front }
plot for [i = 1:5] c(int(word("1 2 3 5 8", i))) using 1:2 with linespoints lt 10 + i title "T = ".word("1 2 3 5 8", i), \
     1/6. with lines lc rgb "#999999" lw 1 dt 2 title "guess"

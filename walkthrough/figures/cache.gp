load "walkthrough/figures/style.gnuplot"
set xlabel "tokens N"; set ylabel "cache, KiB"
set title "shape tiny, float32: rings at once, then a block every 256 tokens"
set yrange [0:*]
c(a) = sprintf("< yocou cost --shape tiny --arch %s --kv-bytes 4 -N $(seq -s, 1 10 1600) --csv", a)
plot for [a in "yoco yoco-u transformer ut"] c(a) using 2:($4/1024) skip 1 with steps title a

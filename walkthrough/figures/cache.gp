load "walkthrough/figures/style.gnuplot"
set xlabel "tokens N"; set ylabel "cache, KiB"
set title "shape tiny, float32: rings at once, then a block every 256 tokens"
set yrange [0:*]; set xrange [0:1600]; set xtics 256
edges = "1,257,513,769,1025,1281,1537,1600"  # the first token of each block
c(a) = sprintf("< yocou cost --shape tiny --arch %s --kv-bytes 4 -N %s --csv", a, edges)
plot for [a in "yoco yoco-u transformer ut"] c(a) using 2:($4/1024) skip 1 with steps lt of(a) title a

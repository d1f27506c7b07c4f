load "walkthrough/figures/style.gnuplot"
set logscale xy 2
set xlabel "tokens N of the prompt"; set ylabel "prefill, GFLOP per token of the prompt"
set xrange [900:300000]; set xtics ("1K" 1024, "4K" 4096, "16K" 16384, "64K" 65536, "256K" 262144)
set title "1.3B shape: work of a prefill, by formula (compare Figure 7a)"
N = "1024,2048,4096,8192,16384,32768,65536,131072,262144"
c(a) = sprintf("< yocou cost --shape 1.3b --arch %s -N %s --csv", a, N)
plot for [a in "rins transformer yoco-u yoco"] c(a) using 2:($5/$2/1e9) skip 1 with linespoints lt of(a) title a

load "walkthrough/figures/style.gnuplot"
set logscale xy 2
set xlabel "tokens N"; set ylabel "K and V of one sequence, MB (2^{20})"
set format x "%.0f"; set format y "%.0f"
set xtics ("4K" 4096, "16K" 16384, "64K" 65536, "256K" 262144, "1M" 1048576)
set title "1.3B shape, BF16: what one sequence keeps (the paper's Figure 7c)"
c(a) = sprintf("< yocou cost --shape 1.3b --arch %s -N 4096,8192,16384,32768,65536,131072,262144,524288,1048576 --csv", a)
plot for [a in "rins transformer yoco-u yoco"] c(a) using 2:($4/2**20) skip 1 with linespoints lt of(a) title a

load "walkthrough/figures/style.gnuplot"
set terminal svg size 760,380 dynamic background "#ffffff" font "sans-serif,14"
set multiplot layout 1,2 margins 0.09,0.98,0.16,0.88 spacing 0.1
set logscale x 2
set xlabel "tokens N before the step"; set logscale y 2; set xrange [900:330000]
set xtics ("1K" 1024, "8K" 8192, "64K" 65536, "256K" 262144)
N = "1024,2048,4096,8192,16384,32768,65536,131072,262144"
c(a) = sprintf("< yocou cost --shape 1.3b --arch %s -N %s --csv", a, N)
set title "GFLOP of a step, one sequence"
plot for [a in "rins transformer yoco-u yoco"] c(a) using 2:($6/1e9) skip 1 with linespoints lt of(a) title a
set title "GB read by a step, one sequence"
plot for [a in "rins transformer yoco-u yoco"] c(a) using 2:($11/2**30) skip 1 with linespoints lt of(a) title a

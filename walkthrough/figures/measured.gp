load "walkthrough/figures/style.gnuplot"
set terminal svg size 760,760 dynamic background "#ffffff" font "sans-serif,14" fontscale 1
set multiplot layout 3,1
set logscale xy 2
set xrange [900:75000]; set xtics ("1K" 1024, "4K" 4096, "16K" 16384, "64K" 65536)
rows(a, phase) = sprintf("< grep '^%s,' docs/bench.csv | grep ',%s,'", a, phase)
set key outside right top
set ylabel "prefill, tok/s"
set title "Measured on two CPU cores, small shape (compare Figure 7)"
plot for [a in "yoco-u yoco transformer rins"] rows(a, "prefill") using 2:5 with linespoints lt of(a) title a
unset title
set ylabel "decode, tok/s"
plot for [a in "yoco-u yoco transformer rins"] rows(a, "decode") using 2:5 with linespoints lt of(a) title a
set ylabel "cache, MB"; set xlabel "tokens N"
plot for [a in "yoco-u yoco transformer rins"] rows(a, "decode") using 2:($12/2**20) with linespoints lt of(a) title a
unset multiplot

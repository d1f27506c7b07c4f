load "walkthrough/figures/style.gnuplot"
set terminal svg size 760,760 dynamic background "#ffffff" font "sans-serif,14" fontscale 1
set multiplot layout 3,1
set logscale xy 2
set xtics ("1K" 1024, "4K" 4096, "16K" 16384, "64K" 65536)
rows(a, phase) = sprintf("< grep '^%s,' docs/bench.csv | grep ',%s,'", a, phase)
archs = "yoco-u yoco transformer rins"
set key outside right top
set ylabel "prefill, tok/s"
set title "Measured on two CPU cores, small shape (compare Figure 7)"
plot for [a in archs] rows(a, "prefill") using 2:5 with linespoints title a
unset title
set ylabel "decode, tok/s"
plot for [a in archs] rows(a, "decode") using 2:5 with linespoints title a
set ylabel "cache, MB"; set xlabel "tokens N"
plot for [a in archs] rows(a, "decode") using 2:($12/2**20) with linespoints title a
unset multiplot

load "walkthrough/figures/style.gnuplot"
set terminal svg size 760,300 dynamic background "#ffffff" font "sans-serif,14"
# A decode step at 16K does so many FLOP for each byte that it must read; a point is a batch. An H100 (data sheet: 989
# TFLOP/s BF16, 3.35 TB/s) needs 295 of them to be bound by arithmetic.
set logscale x 2; set xlabel "FLOP per byte read by a step"; set xrange [0.7:2100]
set yrange [0.4:4.2]; unset ylabel; set ytics ("transformer" 1, "yoco" 2, "yoco-u" 3); unset key; set grid noytics
set title "decode of the 1.3B shape at 16K, batch 1 to 256, on an H100 (data sheet)"
ridge = 989e12 / 3.35e12
set arrow from ridge,graph 0 to ridge,graph 1 nohead lc rgb "#555555" lw 1.5
set label "read-bound" at ridge,3.8 right offset -0.7,0 textcolor rgb "#555555"; set label "arithmetic-bound" at ridge,3.8 left offset 0.7,0 textcolor rgb "#555555"
c(a) = sprintf("< for b in 1 4 16 256; do yocou cost --shape 1.3b --arch %s -N 16384 --batch $b --csv | tail -1; done", a)
row(a) = a eq "transformer" ? 1 : a eq "yoco" ? 2 : 3
plot for [a in "yoco-u yoco transformer"] c(a) using ($6/$11):(row(a)) with linespoints lt of(a) ps 1.2, \
     for [a in "yoco-u yoco transformer"] c(a) using ($6/$11):(row(a) + ($3 == 16 ? -0.32 : 0.32)):3 with labels font ",12" notitle

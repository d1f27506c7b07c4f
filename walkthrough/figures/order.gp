load "walkthrough/figures/style.gnuplot"
# A swap of two neighbours, by its distance to the last token, and the two ways by which the last row can know of it.
set logscale y; set format y "10^{%L}"; set yrange [5e-7:20]; set xrange [24:0]; set xtics 2
set xlabel "the swapped pair stands so many tokens before the last one"; set ylabel "largest change of a logit"
set title "two neighbours change places: what tells the last row? (D 4, W 3, T 3, 2 + 2 layers)"
set key bottom left Left reverse
set arrow from 12.5,graph 0 to 12.5,graph 1 nohead lc rgb "#999999" dt 2
set label "reach of the self-decoder: 12" at 12.2,graph 0.93 left textcolor rgb "#555555"
run = "< python3 walkthrough/figures/order.py"
plot run using 1:2 with lines lc rgb "#bbbbbb" lw 6 title "everything anew", \
     run using 1:3 with linespoints lc rgb "#e08e0b" lw 2 pt 7 ps 0.7 title "only K̂ and V̂ anew", \
     run using 1:($4 > 0 ? $4 : 1/0) with linespoints lc rgb "#d1495b" lw 2 pt 5 ps 0.6 title "only the entering state anew"

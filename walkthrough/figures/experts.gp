load "walkthrough/figures/style.gnuplot"
set terminal svg size 760,360 dynamic background "#ffffff" font "sans-serif,14"
# Layer 0 of the small language model: the two experts of each byte, in each loop. A column is a byte.
set datafile separator "\t"
set multiplot layout 3,1 margins 0.11,0.985,0.19,0.9 spacing 0.045
set xrange [-0.7:23.7]; set yrange [7.6:-0.6]; set ytics 2 scale 0; unset key; unset xtics; set grid noxtics; set border 15 lc rgb "#cccccc"
rows(loop) = sprintf("< python3 walkthrough/figures/experts.py 24 | awk -F'\t' '$1 == %d && $2 == 0'", loop)
set style fill solid 1 noborder
set title "layer 0 of the Austen model: the two experts of 8 that each byte uses" offset 0,-0.4
set ylabel "loop 0"
plot rows(0) using 3:5:(0.42):(0.4) with boxxyerror lc rgb "#8fb8d6"
unset title; set ylabel "loop 1"
plot rows(1) using 3:5:(0.42):(0.4) with boxxyerror lc rgb "#4f93c4"
set ylabel "loop 2"; set xtics scale 0 textcolor rgb "#333333"; set xlabel "the text, byte by byte (dots are spaces and line ends)"
plot rows(2) using 3:5:(0.42):(0.4):xtic(strcol(4) eq " " || strcol(4) eq "\\n" ? "·" : strcol(4)) with boxxyerror lc rgb "#0b62a4"
unset multiplot

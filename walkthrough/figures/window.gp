load "walkthrough/figures/style.gnuplot"
set terminal svg size 760,330 dynamic background "#ffffff" font "sans-serif,14"
# Measured: reach.sh flips token j and asks which rows of logits change.
set multiplot layout 1,3 margins 0.095,0.985,0.21,0.88 spacing 0.05
unset key; set xrange [-0.7:31.7]; set yrange [31.7:-0.7]; set tics 8; unset grid; set border 15
set xlabel "token it depends on (flipped)"; set ylabel "row of logits"
set title "1 layer, once"
plot "< bash walkthrough/figures/reach.sh 1 1 32" using ($3 == 1 ? $2 : 1/0):1 with points lt 1 pt 5 ps 0.55
unset ylabel; set format y ""; set title "2 layers, once"
plot "< bash walkthrough/figures/reach.sh 2 1 32" using ($3 == 1 ? $2 : 1/0):1 with points lt 1 pt 5 ps 0.55
set title "the same 2 layers, T = 3"
plot "< bash walkthrough/figures/reach.sh 2 3 32" using ($3 == 1 ? $2 : 1/0):1 with points lt 1 pt 5 ps 0.55

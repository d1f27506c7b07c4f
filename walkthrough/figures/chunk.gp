load "walkthrough/figures/style.gnuplot"
set terminal svg size 760,300 dynamic background "#ffffff" font "sans-serif,14"
# A ring of W = 4 holds positions 2 to 5 when a chunk of positions 6, 7 and 8 comes. Left: what each of its queries needs,
# and where that is if the chunk is written first. Right: if it is written afterwards. Position p is in row p mod W.
W = 4; from = 6; to = 8
first(q, p) = p > to - W ? 1 : 0               # written first: the ring keeps the last W of all
set multiplot layout 1,2 margins 0.09,0.985,0.2,0.84 spacing 0.07
set xrange [2.4:8.6]; set yrange [8.6:5.4]; set ytics 6,1,8; set xtics 1; unset grid; unset key; set border 0; set tics scale 0
set xlabel "position of the key"; set ylabel "query at"
set title "written first: the red keys are lost"
set style fill solid 1 border lc rgb "#ffffff"
cells = "< for q in 6 7 8; do for p in 3 4 5 6 7 8; do echo $q,$p; done; done"
seen(q, p) = p <= q && p > q - W
plot cells using (seen($1, $2) && first($1, $2) ? $2 : 1/0):1:(0.46):(0.42) with boxxyerror lc rgb "#dbe8f3", \
     cells using (seen($1, $2) && !first($1, $2) ? $2 : 1/0):1:(0.46):(0.42) with boxxyerror lc rgb "#d1495b", \
     cells using (seen($1, $2) && first($1, $2) ? $2 : 1/0):1:(sprintf("row %d", int($2) % W)) with labels font ",12", \
     cells using (seen($1, $2) && !first($1, $2) ? $2 : 1/0):1:(sprintf("row %d:\nnow %d", int($2) % W, $2 + W)) with labels offset 0,0.4 font ",12" textcolor rgb "#ffffff"
unset ylabel; set format y ""; set title "written afterwards: all are there"
plot cells using (seen($1, $2) && $2 < from ? $2 : 1/0):1:(0.46):(0.42) with boxxyerror lc rgb "#fbe3b8", \
     cells using (seen($1, $2) && $2 >= from ? $2 : 1/0):1:(0.46):(0.42) with boxxyerror lc rgb "#dbe8f3", \
     cells using (seen($1, $2) ? $2 : 1/0):1:($2 < from ? sprintf("row %d", int($2) % W) : "fresh") with labels font ",12"
unset multiplot

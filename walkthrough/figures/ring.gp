load "walkthrough/figures/style.gnuplot"
set terminal svg size 760,260 dynamic background "#ffffff" font "sans-serif,14"
# Position p lives in row p mod W; what row r holds after token p is the last position <= p with that remainder.
W = 4
held(p, r) = p - (p - r + W) % W
set title "the position that each row holds; red: just written"
set xlabel "after token p"; set ylabel "row of the ring, W = 4"
set xrange [-0.6:13.6]; set yrange [3.6:-0.6]; set xtics 1; set ytics 1; unset grid; unset key
set sample 14
plot for [r = 0:3] "+" using (int($0)):(r):(held(int($0), r) < 0 || held(int($0), r) == int($0) ? "" : sprintf("%d", held(int($0), r))) with labels textcolor rgb "#555555", \
     "+" using (int($0)):(int($0) % W):(sprintf("%d", int($0))) with labels textcolor rgb "#d1495b" font ",16"

load "walkthrough/figures/style.gnuplot"
set terminal svg size 760,400 dynamic background "#ffffff" font "sans-serif,14"
# What a decode step of the 1.3B YOCO-U reads, each term as a share of all. The number over a bar is the whole, in GB.
set multiplot layout 1,2 margins 0.08,0.985,0.3,0.86 spacing 0.06
set style data histogram; set style histogram rowstacked; set style fill solid 1 border lc rgb "#ffffff"; set boxwidth 0.8
set yrange [0:1.12]; set ytics 0.25; set xtics ("1K" 0, "4K" 1, "16K" 2, "64K" 3, "256K" 4); unset grid; set grid ytics
set xlabel "tokens N"; unset key; set xrange [-0.6:4.6]
share(i) = column(i) / $7
t(batch) = sprintf("< python3 walkthrough/figures/terms.py %d", batch)
set ylabel "share of the bytes read"
set label "■ self-decoder's weights, T times" at screen 0.08,0.11 textcolor rgb "#0b62a4"; set label "■ cross-decoder's weights" at screen 0.43,0.11 textcolor rgb "#d1495b"
set label "■ head and embedding" at screen 0.71,0.11 textcolor rgb "#888888"; set label "■ rings" at screen 0.08,0.05 textcolor rgb "#c99a45"
set label "■ K̂, V̂, read by L/2 layers" at screen 0.43,0.05 textcolor rgb "#e08e0b"
set title "batch 1"
plot t(1) using (share(2)) lc rgb "#0b62a4", "" using (share(3)) lc rgb "#d1495b", "" using (share(4)) lc rgb "#888888", \
     "" using (share(5)) lc rgb "#f2c572", "" using (share(6)) lc rgb "#e08e0b", \
     "" using 0:(1.06):(sprintf("%.1f GB", $7 / 2**30)) with labels font ",12"
unset label; unset ylabel; set format y ""
set title "batch 32"
plot t(32) using (share(2)) lc rgb "#0b62a4", "" using (share(3)) lc rgb "#d1495b", \
     "" using (share(4)) lc rgb "#888888", "" using (share(5)) lc rgb "#f2c572", \
     "" using (share(6)) lc rgb "#e08e0b", \
     "" using 0:(1.06):(sprintf("%.0f GB", $7 / 2**30)) with labels font ",12"
unset multiplot

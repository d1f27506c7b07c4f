load "walkthrough/figures/style.gnuplot"
set xlabel "application of a layer"; set ylabel "angle to the state before, / π"
set title "two layers three times, then the cross-decoder (the paper's Figure 8, on a tiny model)"
set yrange [0:*]; set xtics 1; set key top right Right noreverse
t = "< yocou trace data/austen.safetensors -p \"$(head -c 512 data/austen-heldout.txt)\" --threads 1 --csv | awk -F, 'NR > 2 { print $1 \",\" $6 \",\" ($2 == \"cross\" ? 3 : $3) }'"
set arrow from 2.5,graph 0 to 2.5,graph 0.9 nohead lc rgb "#999999" dt 2
set arrow from 4.5,graph 0 to 4.5,graph 0.9 nohead lc rgb "#999999" dt 2
set arrow from 6.5,graph 0 to 6.5,graph 0.9 nohead lc rgb "#999999" dt 2
set label "loop 0" at 1.5,graph 0.94 center; set label "loop 1" at 3.5,graph 0.94 center
set label "loop 2" at 5.5,graph 0.94 center; set label "cross" at 7.5,graph 0.94 center
set xrange [0.5:8.5]
plot t using 1:2 with linespoints lt 1 ps 0.9 notitle

load "walkthrough/figures/style.gnuplot"
set logscale xy 2
set xlabel "FLOP per byte read"; set ylabel "bound, TFLOP/s"
set title "decode of the 1.3B shape at 16K under an H100's roof: 989 TFLOP/s BF16, 3.35 TB/s (data sheet)"
set xrange [0.5:1024]; set yrange [2:1400]; set key bottom right Right noreverse
roof(x) = x * 3.35 < 989 ? x * 3.35 : 989
c(a, b) = sprintf("< yocou cost --shape 1.3b --arch %s -N 16384 --batch %d --csv | tail -1", a, b)
set sample 400
plot roof(x) with lines lt 6 title "roof", \
     for [i = 1:3] sprintf("< for b in 1 4 16 64 256; do yocou cost --shape 1.3b --arch %s -N 16384 --batch $b --csv | tail -1; done", word("yoco-u yoco transformer", i)) \
       using ($6/$11):(roof($6/$11)):3 with points lt i pt 7 ps 1.2 title word("yoco-u yoco transformer", i), \
     "< for b in 1 16 256; do yocou cost --shape 1.3b --arch yoco-u -N 16384 --batch $b --csv | tail -1; done" using ($6/$11):(roof($6/$11)):(sprintf("batch %d", $3)) with labels right offset -1,0.6 notitle

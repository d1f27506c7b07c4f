# What all figures share. They are drawn on white, so that they are legible on a dark page too.
set terminal svg size 760,420 dynamic background "#ffffff" font "sans-serif,14" fontscale 1
set datafile separator ","
set border 3 lc rgb "#666666"
set tics nomirror textcolor rgb "#333333"
set grid lc rgb "#dddddd" lw 0.5
set key top left Left reverse samplen 2
# An architecture has one colour in all figures: of(NAME) is its line type.
archs = "yoco-u yoco transformer rins ut"
of(name) = sum [i = 1:words(archs)] (word(archs, i) eq name ? i : 0)
set linetype 1 lc rgb "#0b62a4" lw 2.5 pt 7 ps 0.5
set linetype 2 lc rgb "#2a9d5c" lw 2.5 pt 7 ps 0.5
set linetype 3 lc rgb "#d1495b" lw 2.5 pt 7 ps 0.5
set linetype 4 lc rgb "#e08e0b" lw 2.5 pt 7 ps 0.5
set linetype 5 lc rgb "#7b4ea3" lw 2.5 pt 7 ps 0.5
set linetype 6 lc rgb "#555555" lw 2.5 pt 7 ps 0.5
# Runs of one YOCO-U with different T: line type 10 + i for the i-th T, from light to dark, a shape each.
set linetype 11 lc rgb "#8fb8d6" lw 2.5 pt 7 ps 0.7
set linetype 12 lc rgb "#4f93c4" lw 2.5 pt 5 ps 0.6
set linetype 13 lc rgb "#0b62a4" lw 2.5 pt 9 ps 0.8
set linetype 14 lc rgb "#0a3d66" lw 2.5 pt 13 ps 0.8
set linetype 15 lc rgb "#071a2b" lw 2.5 pt 11 ps 0.8

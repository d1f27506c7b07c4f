# What all figures share. They are drawn on white, so that they are legible on a dark page too.
set terminal svg size 760,420 dynamic background "#ffffff" font "sans-serif,14" fontscale 1
set datafile separator ","
set border 3 lc rgb "#666666"
set tics nomirror textcolor rgb "#333333"
set grid lc rgb "#dddddd" lw 0.5
set key top left Left reverse samplen 2
set linetype 1 lc rgb "#0b62a4" lw 2.5 pt 7 ps 0.5
set linetype 2 lc rgb "#d1495b" lw 2.5 pt 7 ps 0.5
set linetype 3 lc rgb "#2a9d5c" lw 2.5 pt 7 ps 0.5
set linetype 4 lc rgb "#e08e0b" lw 2.5 pt 7 ps 0.5
set linetype 5 lc rgb "#7b4ea3" lw 2.5 pt 7 ps 0.5
set linetype 6 lc rgb "#555555" lw 2.5 pt 7 ps 0.5

load "walkthrough/figures/style.gnuplot"
set terminal svg size 760,560 dynamic background "#ffffff" font "sans-serif,13"
# decode.py says what it writes and reads, application by application; its logits are compared with the program's in
# exercise 2. Shape tiny, T = 3, W = 4: six tokens of prompt in chunks of three, then one step of decode.
run = "< yocou init --shape tiny --arch yoco-u --window 4 --dtype f32 -o f32.safetensors && python3 walkthrough/decode.py f32.safetensors 10,20,30,40,50,60,70 --prompt 6 --events"
# Rows of the picture, from below: 1 to 6 the self-decoder, 7 K^ V^, 8 and 9 the cross-decoder, 10 the head.
set xrange [-0.62:6.62]; set yrange [0.4:11.2]; unset grid; unset key; set border 0; set tics scale 0
set xtics 1; set xlabel "position of the token"
set ytics ("self, loop 0, layer 0" 1, "layer 1" 2, "loop 1, layer 0" 3, "layer 1" 4, "loop 2, layer 0" 5, "layer 1" 6, \
  "K̂, V̂" 7, "cross, layer 0" 8, "layer 1" 9, "norm, head" 10)
set label "prompt, first chunk" at 1,11 center; set label "prompt, second chunk" at 4,11 center
set label "decode" at 6,11 center
set arrow from 2.5,0.4 to 2.5,11.2 nohead lc rgb "#999999" dt 2; set arrow from 5.5,0.4 to 5.5,11.2 nohead lc rgb "#999999" dt 2
set style fill solid 1 border lc rgb "#ffffff"
pick(awk) = run." | awk -F, '".awk."'"
self(over) = pick(sprintf("$2 == \"self\" && ($6 %s \"\") { print $1 \",\" 1 + 2 * $3 + $4 \",\" $5 \",\" $6 }", over ? "!=" : "=="))
kv = pick("$2 == \"K^ V^\" { print $1 \",7,\" $5 }")
cross = pick("$2 == \"cross\" { print $1 \",\" 8 + $4 \",\" $7 }")
# A row that leaves: it wrote K^ and V^, and no cross layer ran on it. One that stays has logits.
gone = pick("{ if ($2 == \"K^ V^\") wrote[$1]; if ($2 == \"cross\") up[$1] } END { for (p in wrote) if (!(p in up)) print p }")." | sort -n"
up = pick("$2 == \"cross\" && $4 == 0 { print $1 \",10\" }")
box = 0.46
plot self(0) using 1:2:(box):(0.44) with boxxyerror lc rgb "#dbe8f3", \
     self(1) using 1:2:(box):(0.44) with boxxyerror lc rgb "#9fc3e0", \
     kv using 1:2:(box):(0.44) with boxxyerror lc rgb "#fbe3b8", \
     cross using 1:2:(box):(0.44) with boxxyerror lc rgb "#f4c9cf", \
     up using 1:2:(box):(0.44) with boxxyerror lc rgb "#e4e4e4", \
     self(0) using 1:2:3 with labels font ",12", \
     self(1) using 1:2:(sprintf("%s\nover %d", strcol(3), $4)) with labels offset 0,0.45 font ",11", \
     kv using 1:2:3 with labels font ",12", \
     cross using 1:2:(sprintf("reads %s", strcol(3))) with labels font ",12", \
     up using 1:2:("logits") with labels font ",12", \
     gone using 1:(8):("leaves") with labels textcolor rgb "#888888" font ",12"

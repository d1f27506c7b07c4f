# Doxygen 1.9.4 loses the members of a class in a nameless namespace when they are defined outside of it.
s/^namespace {$/namespace device {/

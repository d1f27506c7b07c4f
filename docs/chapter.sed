# GitHub Markdown to Doxygen's dialect, line by line, so that warnings keep their line numbers. Code regions become
# \snippetlineno (real line numbers, every symbol a link); formulas become \f[ \f] and \f$ \f$. A line <details> goes
# around Doxygen, which would tear it apart; what it folds does not.
2s/^$/[TOC]/
/^```cpp snippet=/,/^```$/{
  s/^```cpp snippet=\([^:]*\):\(.*\)$/\\snippetlineno \1 \2/
  t
  s/^```cpp snippet=\(.*\)$/\\snippetlineno yocou.cpp \1/
  t
  s/.*//
  b
}
/^```math$/,/^```$/{
  s/^```math$/\\f[/
  s/^```$/\\f]/
  b
}
s/^```console volatile$/```console/
s/^```python.*$/```py/
s/^```text printed$/```text/
s/^<\/*details.*$/@htmlonly[block]&@endhtmlonly/
/^```/,/^```$/b
s/\$`\([^`]*\)`\$/\\f$\1\\f$/g
s|](\(\.\./\)*yocou\.cpp)|](@ref yocou.cpp)|g
s|](\(\.\./\)*checkpoint\.cpp)|](@ref checkpoint.cpp)|g
s|](\(\.\./\)*main\.cpp)|](@ref main.cpp)|g
s|](\(\.\./\)*yocou\.h)|](@ref yocou.h)|g
s|](\(\.\./\)*kernels\.cu)|](@ref kernels.cu)|g
s|](\.\./docs/\([a-z]*\)\.md)|](md_docs_\1.html)|g
s|](../walkthrough/figures/|](figures/|g
s|](\.\./data/README\.md)|](md_data_README.html)|g
s|](\.\./README\.md)|](md_README.html)|g
s|](\([0-9][0-9]\)-\([a-z]*\)\.md#|](md_walkthrough_\1_\2.html#|g

"""What compilers make of a step.

`fusion.compile_graph` fuses by Inductor's rules, from the `parts` of operators; `float8` converts
linear layers as torchao does.
"""

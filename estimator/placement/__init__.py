"""Where ranks run.

In: allocation texts, cluster files, profiles. Out: for each rank its machine, node and network.
`allocation` is the noun, `columns` many of them; `topology` describes clusters and a
node's network; `placement.place` puts an allocation onto machines; `mesh` gives every axis its
process groups.
"""

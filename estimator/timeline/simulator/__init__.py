"""Play tasks on lanes.

`tasks` is what a step is made of, and plays it for one step or a row of each of many;
`simulation` plays the same by events and shares no code with it: each is the other's test.
"""

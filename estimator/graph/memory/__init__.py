"""What a rank holds during a step.

`step` simulates it from what a strategy has the rank hold (`Holding`) and knows no strategy; `peak`
has what it is seen as: the most for every number of shards, and what is held when.
`sizes` has the tensors, what optimizers hold and what operators take inside themselves.
"""

"""What a rank holds during a step.

`peak` and `step` answer how much at most, under every strategy and for many shard counts at once;
`curve` says what is held when; `workspace` what operators take inside themselves.
"""

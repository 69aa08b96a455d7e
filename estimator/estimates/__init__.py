"""Answer questions: how long a step takes, with its interval and reasons.

`engine.Engine` keeps all that is worked out once and answers one question; `estimate.Estimate` is
the answer; `table` answers many allocations at once, each row equal to one estimate.
"""

"""Answer questions: how long a step takes, with its interval and reasons.

`request.EstimateRequest` is a question, parsed and checked once; `engine.Engine` answers it and
keeps what it works out; `balance` splits a global batch over unlike devices; `estimate.Estimate`
is the answer; `table` answers many allocations at once, each row equal to one estimate.
"""

"""Replay jobs on a described cluster under a scheduling policy.

`job_files` reads or draws jobs, `speeds` says how fast they train, `view` is what a policy sees
and answers, `nodes` packs, `replay.replay` runs the clock. `policies` has the policies: queues,
elastic ones, by goodput, by shares of time, by evolution.
"""

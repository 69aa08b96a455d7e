"""Probe several nodes together, started by torchrun on each.

`cluster_probe` leads: `leader` gives tasks, `worker` does them, `messages` carries and signs what
they say, `discovery` finds the launch's ranks and secret, `parts` and `shapes` measure, `findings`
collects.
"""

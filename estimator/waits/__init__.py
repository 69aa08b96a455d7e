"""Say what a training step waits for: other devices, other nodes, its data.

`predicted` says it of a model, `measured` of a real script, which `runs` starts under `hooks`;
`loaders` measures what a loader costs.
"""

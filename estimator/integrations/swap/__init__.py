"""Run training steps under a plan of memory: `apply_plan` moves and recomputes as planned."""

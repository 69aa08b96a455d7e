"""Say what a training step waits for: other devices, other nodes, its data."""

"""Measure what joins devices: `copies`, `collectives` with their `overlap`, the `network`."""

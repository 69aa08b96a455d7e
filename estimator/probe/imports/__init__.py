"""Read what other tools have measured or described of a machine: one module per format."""

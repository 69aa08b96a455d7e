"""Build the models that benchmarks look at: by transformers, or written out in plain torch."""

"""Train a model for real (`training`) and set predictions beside it (`validation`)."""

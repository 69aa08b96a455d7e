"""Learn from observed steps.

In: step times, kept in a `store`. Out: a `calibrator.Calibrator`, which estimates take as
`calibration=`. `watching` times a training loop, `regressor` fits the `performance_model` (its
`design`, `change_points`, `mixture` with simple forms, `intervals`), `review` says what the store
shows.
"""

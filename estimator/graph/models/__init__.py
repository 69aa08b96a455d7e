"""Build the model that a MODEL text names.

`model_text.load_model` is the way in: a user's function (`functions`) or a transformers type
(`transformers_models`, its batch by `transformers_batches`), offline, with random weights.
"""

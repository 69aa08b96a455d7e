"""List the models that are trained on a GPU, at the sizes that people train them, and tiny ones."""

from __future__ import annotations

from zoo.trained import functions

ALL = [*functions("gpu"), *functions("tiny")]
globals().update({function.__name__: function for function in ALL})

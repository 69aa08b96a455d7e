"""List the small real architectures on which predictions are checked against real training.

Each function of `ALL` takes a batch size and returns a model and a batch, some a loss too.
"""

from __future__ import annotations

from zoo.trained import functions

ALL = functions("cores")
globals().update({function.__name__: function for function in ALL})

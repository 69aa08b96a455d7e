"""Build the model that a MODEL text names: of a user's function, or a transformers type.

`functions` calls the former, `transformers_models` builds the latter, its batch by
`transformers_batches`, offline, with random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from estimator.errors import ModelError

if TYPE_CHECKING:
    from estimator.graph.models.functions import Loaded


def load_model(
    text: str,
    *,
    batch: int | None = None,
    seq_len: int | None = None,
    weights: bool = True,
    say: Callable[[str], None] | None = None,
) -> Loaded:
    """The model, a batch for it, its loss (None: the default one) and its name.

    `text` is ``path/to/file.py:function``, ``package.module:function`` (the function returns
    ``(model, batch)`` or ``(model, batch, loss)`` and gets ``batch`` and ``seq_len`` if it has such
    parameters) or ``hf:TYPE[:TASK][,key=value...]``, or the path of a config.json for TYPE. With
    `weights` False a large model may be left without weights, which is enough to trace it;
    `say` is told where that cannot be and takes memory. Raises ModelError.
    """
    for what, number in (("batch", batch), ("seq_len", seq_len)):
        if number is not None and number < 1:
            raise ModelError(f"{what} must be at least 1, found {number}")
    if text.startswith("hf:"):
        from estimator.graph.models.transformers_models import build_transformers_model

        return build_transformers_model(text, batch=batch, seq_len=seq_len, weights=weights)
    from estimator.graph.models.functions import call_model_function

    return call_model_function(text, batch=batch, seq_len=seq_len, weights=weights, say=say)

"""Run packed sequences at the length that they are padded to, since a trace has no lengths."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

ASSUMPTION = "packed sequences are computed at the length that they are padded to"
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def packed_as_padded(assumptions: MutableMapping[str, None]) -> Iterator[None]:
    """Let every sequence that is packed have the full length; `assumptions` gets a line if one is.

    torch.nn.utils.rnn packs, and recurrent modules run, by functions of `torch._VF`.
    """
    functions: Any = torch._C._VariableFunctions
    place: Any = torch._VF

    def pack(source: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        assumptions[ASSUMPTION] = None
        padded = source.transpose(0, 1) if batch_first else source
        steps, samples = padded.shape[:2]
        with unset_fake_temporarily():
            batch_sizes = torch.full((steps,), samples)
        return padded.reshape(steps * samples, *padded.shape[2:]), batch_sizes

    def pad(
        data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, longest: int
    ) -> tuple[Tensor, Tensor]:
        padded = _padded(data, batch_sizes)
        lengths = torch.full((padded.shape[1],), len(padded))
        return padded.transpose(0, 1) if batch_first else padded, lengths

    def recurrent(name: str) -> Any:
        run = getattr(functions, name)

        def ran(*arguments: Any) -> Any:
            # A packed sequence comes as (data, batch sizes, state, weights, ...).
            if not isinstance(arguments[3], (list, tuple)):
                return run(*arguments)
            data, batch_sizes, *rest = arguments
            output, *state = run(_padded(data, batch_sizes), *rest, False)
            return (output.reshape(-1, output.shape[-1]), *state)

        return ran

    place._pack_padded_sequence, place._pad_packed_sequence = pack, pad
    for name in _RECURRENT:
        setattr(place, name, recurrent(name))
    try:
        yield
    finally:
        for name in ("_pack_padded_sequence", "_pad_packed_sequence", *_RECURRENT):
            delattr(place, name)


def _padded(data: Tensor, batch_sizes: Tensor) -> Tensor:
    """(steps, samples, ...) of what `pack` laid out row by row."""
    return data.reshape(len(batch_sizes), -1, *data.shape[1:])

"""Give a batch of text the images that its model also takes, and the tokens that stand for them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from estimator.errors import EstimatorError, TraceError
from estimator.graph.eager_branches import quiet_fakes
from estimator.graph.eager_rules import EagerFunctions
from estimator.graph.fake_tensors import kept_as_it_was, put_fake_tensors
from estimator.graph.record import Recorder
from estimator.graph.user_code import UserCode

# Patches along each side of an image that a model takes as a list of patches (Qwen-VL's form).
PATCHES_PER_SIDE = 16
# Not learned from: torch.nn.functional.cross_entropy's ignore_index.
_IGNORED = -100
_PICTURES = ("pixel_values", "image_grid_thw")


def with_image_tokens(model: nn.Module, config: Any, made: dict[str, Any]) -> dict[str, Any]:
    """The batch with tokens in front of each text for the features of its image.

    As processors do it: as many tokens as the model makes features of one image, not learned
    from. Without the images if the model cannot take them in this form: it is then trained on text.
    """
    taken = inspect.signature(model.get_image_features).parameters  # type: ignore[arg-type]
    pictures = {name: made[name] for name in taken if name in made}
    token = next(
        (
            value
            for name in ("image_token_id", "image_token_index")
            if isinstance(value := getattr(config, name, None), int)
        ),
        None,
    )
    if "pixel_values" not in pictures or token is None or "input_ids" not in made:
        return made
    accepted = inspect.signature(model.forward).parameters
    try:
        features = _features_per_sample(model, pictures, made["input_ids"].shape[0])
    except EstimatorError:
        return {
            name: value
            for name, value in made.items()
            if name not in _PICTURES or accepted[name].default is inspect.Parameter.empty
        }
    front = torch.full((made["input_ids"].shape[0], features), token)
    longer = dict(made)
    longer["input_ids"] = torch.cat((front, made["input_ids"]), dim=1)
    if "labels" in made:
        ignored = torch.full_like(front, _IGNORED)
        longer["labels"] = torch.cat((ignored, made["labels"]), dim=1)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in accepted:
            longer[name] = (longer["input_ids"] == token).long()
    return longer


def patches(vision: Any, batch: int, random: torch.Generator) -> dict[str, Tensor]:
    """Images as a list of patches with their grids: (time, height, width) in patches."""
    channels = next(
        (
            int(value)
            for name in ("in_channels", "in_chans", "num_channels")
            if (value := getattr(vision, name, None))
        ),
        3,
    )
    size, frames = (
        _first(getattr(vision, "patch_size", 14)),
        _first(getattr(vision, "temporal_patch_size", 1)),
    )
    grid = torch.tensor([[1, PATCHES_PER_SIDE, PATCHES_PER_SIDE]] * batch)
    shape = (batch * PATCHES_PER_SIDE**2, channels * frames * size * size)
    return {
        "pixel_values": torch.randn(shape, generator=random),
        "image_grid_thw": grid,
    }


def _first(value: Any) -> int:
    return int(value[0]) if isinstance(value, (list, tuple)) else int(value)


def _features_per_sample(model: nn.Module, pictures: Mapping[str, Tensor], samples: int) -> int:
    """How many features the model makes of one sample's images, found on fake tensors."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(model, fake_mode, "cpu")
    failed = UserCode("images cannot be taken", advice="train on text", error=TraceError)

    def fake(_path: str, real: Tensor) -> Tensor:
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
        recorder.place(fake, "input")
        recorder.constants.give(fake, real)
        return fake

    with kept_as_it_was(model), quiet_fakes(), fake_mode, torch.no_grad():
        found = put_fake_tensors(model, dtype=None, device="cpu")
        for name, buffer in found.buffers.items():
            recorder.place(buffer, "buffer")
            recorder.constants.give(buffer, found.real_buffers[name])
        given = {name: fake(name, value) for name, value in pictures.items()}
        with failed, recorder, EagerFunctions(recorder.constants):
            output: Any = model.get_image_features(**given)  # type: ignore[operator]
            features = getattr(output, "pooler_output", output)
            width = int(model.get_input_embeddings().weight.shape[-1])  # type: ignore[operator]
    elements = _elements(features, width)
    if elements == 0 or elements % (samples * width):
        raise TraceError(
            f"the model makes {elements} numbers of images, which is not a number of features of "
            f"width {width} for each of {samples} samples; train on text"
        )
    return elements // (samples * width)


def _elements(features: Any, width: int) -> int:
    """The numbers in features as wide as the text's, 0 for features of another width."""
    if isinstance(features, Tensor):
        return features.numel() if features.shape[-1] == width else 0
    if isinstance(features, (list, tuple)):
        return sum(_elements(item, width) for item in features)
    return 0

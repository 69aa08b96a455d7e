"""Read from a transformers model and its configuration how large its inputs are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

DEFAULT_LENGTH = 512
# Objects that a detector found in an image, for models that take those instead of pixels.
DETECTED_OBJECTS = 36


@dataclass(slots=True, kw_only=True)
class InputSizes:
    """Lengths and sizes of one sample's inputs."""

    model: Any
    config: Any
    head: str
    seq_len: int | None

    @property
    def text(self) -> Any:
        """The configuration of the part that reads or writes text."""
        try:
            return self.config.get_text_config()
        except ValueError:  # it has an encoder's and a decoder's
            return self.config.get_text_config(decoder=True)

    @property
    def length(self) -> int:
        """The sequence: as told, else 512 or as many positions as the model has."""
        limits = [
            value
            for part in (self.config, self.text)
            for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
            if type(value := getattr(part, name, None)) is int and value > 0
        ]
        most = min(limits) if limits else DEFAULT_LENGTH
        # RoBERTa's positions start after the padding index.
        offset = 2 if most % 2 == 0 and most & (most - 1) != 0 and most - 2 <= 512 else 0
        fixed = getattr(self.config, "axial_pos_shape", None)
        if fixed and getattr(self.config, "axial_pos_embds", False):
            # Reformer's positions are a grid that a training sequence fills.
            return math.prod(fixed)
        if self.config.model_type == "perceiver":
            # It decodes to all its positions.
            return int(self.config.max_position_embeddings)
        wanted = self.seq_len or min(DEFAULT_LENGTH, most - offset)
        return wanted // 2 if self.seq_len is None and wanted == most and offset else wanted

    @property
    def streams(self) -> int:
        """Token streams embedded side by side (text, codebooks of audio); 0 for plain text."""
        try:
            embeddings = self.model.get_input_embeddings()
        except NotImplementedError:  # transformers' word for a model that embeds otherwise
            return 0
        offsets = getattr(embeddings, "audio_tokens_offsets", None)
        return len(offsets) if isinstance(offsets, Tensor) else 0

    @property
    def latents(self) -> int:
        """Continuous latents of audio that a model speaks after half a text; 0 for other models."""
        return self.length // 2 if hasattr(self.config, "audio_latent_token_id") else 0

    @property
    def visual_labels(self) -> int:
        """Objects of an image that are labelled after the text; 0 for other models."""
        labelled = self.head == "PreTraining" and hasattr(self.config, "visual_embedding_dim")
        return DETECTED_OBJECTS if labelled else 0

    @property
    def frames_per_token(self) -> int:
        """Frames of audio that a model hears with each token of text; 0 for other models."""
        return int(getattr(self.config, "audio_length_per_tok", 0))

    @property
    def channels(self) -> int:
        """Codebooks of audio that a decoder takes side by side; 0 for plain tokens."""
        return int(getattr(getattr(self.config, "decoder_config", None), "num_channels", 0) or 0)

    @property
    def vision(self) -> Any:
        """The configuration of the part that sees."""
        for name in ("vision_config", "encoder", "backbone_config"):
            part = getattr(self.config, name, None)
            if part is not None and not hasattr(self.config, "image_size"):
                return part
        return self.config

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        size = getattr(self.vision, "image_size", None) or getattr(self.config, "image_size", None)
        if isinstance(size, (list, tuple)):
            return int(size[0]), int(size[-1])
        if isinstance(size, dict):
            return int(size["height"]), int(size["width"])
        if not size:
            return 224, 224
        # Whole windows of whole patches.
        windows = int(getattr(self.vision, "num_windows", 1) or 1)
        unit = int(self.vision.patch_size) * windows if windows > 1 else 1
        return (int(size) // unit * unit,) * 2

    @property
    def frames(self) -> int:
        """Pictures of one video."""
        for part in (self.config, self.vision):
            for name in ("num_frames", "frames_per_clip"):
                if frames := getattr(part, name, None):
                    return int(frames)
        return 8

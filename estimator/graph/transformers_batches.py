"""Make a labelled batch of random values for a transformers model, from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DEFAULT_LENGTH = 512
# Half a second to ten seconds of speech, as its models are trained on.
AUDIO_SAMPLES = 16_000 * 5
FEATURE_FRAMES = 512
OBJECTS_PER_IMAGE = 5

_TOKEN_LABELS = (
    "CausalLM",
    "Seq2SeqLM",
    "SpeechSeq2Seq",
    "MaskedLM",
    "ImageTextToText",
    "MultimodalLM",
    "PreTraining",
)


def make_batch(
    model: Any, config: Any, head: str, batch: int, seq_len: int | None
) -> dict[str, Any]:
    """What ``model(**batch)`` needs to return a loss: its main input, what it requires, labels."""
    maker = _Maker(model=model, config=config, head=head, batch=batch, seq_len=seq_len)
    return maker.make()


@dataclass(slots=True)
class _Maker:
    model: Any
    config: Any
    head: str
    batch: int
    seq_len: int | None
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def make(self) -> dict[str, Any]:
        accepted = inspect.signature(self.model.forward).parameters
        names = [self._main_input(accepted)]
        names += [name for name in self._always(names[0]) if name in accepted]
        for name, parameter in accepted.items():
            open_ended = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if parameter.default is inspect.Parameter.empty and not open_ended:
                names.append(name)
        made = {name: self._value(name) for name in dict.fromkeys(names)}
        made.update(self._labels(accepted))
        return made

    def _main_input(self, accepted: Any) -> str:
        main = str(getattr(self.model, "main_input_name", "input_ids"))
        if main in accepted:
            return main
        known = [name for name in self._makers() if name in accepted]
        return known[0] if known else next(iter(accepted))

    def _always(self, main: str) -> tuple[str, ...]:
        """Optional arguments without which the model does not run, or does other work."""
        by_head = {
            "ZeroShotImageClassification": ("input_ids", "pixel_values", "pixel_values_videos"),
            "ZeroShotObjectDetection": ("input_ids", "pixel_values"),
            "VisualQuestionAnswering": ("input_ids", "pixel_values"),
        }
        always: tuple[str, ...] = by_head.get(self.head, ())
        if main != "input_ids" and self.head in ("ImageTextToText", "CausalLM"):
            always += ("input_ids",)
        if self.config.model_type == "git":
            # Its loss skips the image's tokens, whether or not there is an image.
            always += ("pixel_values",)
        always += ("bbox", "return_loss", "visual_feats", "visual_pos", "input_mask")
        if main == "input_ids":
            always += ("visual_embeds",)
        return always

    def _value(self, name: str) -> Any:
        maker = self._makers().get(name)
        if maker is None:
            raise ValueError(f"its argument '{name}' is unknown")
        return maker()

    def _makers(self) -> dict[str, Callable[[], Any]]:
        return {
            "input_ids": self._tokens,
            "inputs": self._tokens,
            "decoder_input_ids": self._tokens,
            "qformer_input_ids": self._tokens,
            "pixel_values": self._pixels,
            "pixel_values_videos": self._video,
            "flattened_patches": self._patches,
            "input_values": self._audio,
            "input_features": self._features,
            "bbox": lambda: torch.zeros(self.batch, self.length, 4, dtype=torch.int64),
            "return_loss": lambda: True,
            "past_values": lambda: self._normal(self.batch, self.length),
            "visual_feats": lambda: self._normal(self.batch, 36, self.config.visual_feat_dim),
            "visual_pos": lambda: self._normal(self.batch, 36, self.config.visual_pos_dim),
            "visual_embeds": lambda: self._normal(self.batch, 36, self.config.visual_embedding_dim),
        }

    # Inputs

    @property
    def text(self) -> Any:
        return self.config.get_text_config()

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
        wanted = self.seq_len or min(DEFAULT_LENGTH, most - offset)
        return wanted // 2 if self.seq_len is None and wanted == most and offset else wanted

    def _tokens(self) -> Tensor:
        shape: tuple[int, ...] = (self.batch, self.length)
        if self.head == "MultipleChoice":
            shape = (self.batch, 2, self.length)
        return self._token_ids(shape)

    def _token_ids(self, shape: tuple[int, ...]) -> Tensor:
        vocabulary = int(getattr(self.text, "vocab_size", 1000))
        special = {
            value
            for part in (self.config, self.text)
            for name, value in vars(part).items()
            if name.endswith(("token_id", "token_index")) and type(value) is int
        }
        plain = next(number for number in range(vocabulary) if number not in special)
        tokens = torch.randint(0, vocabulary, shape, generator=self.random)
        for number in special:
            tokens[tokens == number] = plain
        return tokens

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    @property
    def vision(self) -> Any:
        for name in ("vision_config", "encoder", "backbone_config"):
            part = getattr(self.config, name, None)
            if part is not None and not hasattr(self.config, "image_size"):
                return part
        return self.config

    @property
    def image_size(self) -> tuple[int, int]:
        size = getattr(self.vision, "image_size", None) or getattr(self.config, "image_size", None)
        if isinstance(size, (list, tuple)):
            return int(size[0]), int(size[-1])
        if isinstance(size, dict):
            return int(size["height"]), int(size["width"])
        return (int(size), int(size)) if size else (224, 224)

    def _pixels(self) -> Tensor:
        channels = int(getattr(self.vision, "num_channels", 3) or 3)
        if self.head == "VideoClassification":
            return self._normal(self.batch, self._frames(), channels, *self.image_size)
        return self._normal(self.batch, channels, *self.image_size)

    def _video(self) -> Tensor:
        return self._normal(self.batch, self._frames(), 3, *self.image_size)

    def _frames(self) -> int:
        for name in ("num_frames", "frames_per_clip"):
            if frames := getattr(self.config, name, None):
                return int(frames)
        return 8

    def _patches(self) -> Tensor:
        vision = self.config.vision_config
        return self._normal(self.batch, 256, vision.patch_embed_hidden_size + 2)

    def _audio(self) -> Tensor:
        if hasattr(self.config, "num_mel_bins") and hasattr(self.config, "max_length"):
            return self._normal(self.batch, self.config.max_length, self.config.num_mel_bins)
        return self._normal(self.batch, AUDIO_SAMPLES)

    def _features(self) -> Tensor:
        encoder = getattr(self.config, "encoder_config", self.config)
        mel = next(
            (
                int(value)
                for part in (self.config, encoder)
                for name in (
                    "num_mel_bins",
                    "feature_size",
                    "input_dim",
                    "feature_projection_input_dim",
                )
                if (value := getattr(part, name, None))
            ),
            80,
        )
        if self.config.model_type == "whisper":
            return self._normal(self.batch, mel, 2 * self.config.max_source_positions)
        return self._normal(self.batch, FEATURE_FRAMES, mel)

    # Labels

    def _labels(self, accepted: Any) -> dict[str, Any]:
        if "start_positions" in accepted:
            return {name: self._classes(2) for name in ("start_positions", "end_positions")}
        if "mask_labels" in accepted and "class_labels" in accepted:
            return self._segment_labels()
        if "labels" not in accepted:
            return {}
        return {"labels": self._label()}

    def _classes(self, count: int, *shape: int) -> Tensor:
        return torch.randint(0, max(1, count), (self.batch, *shape), generator=self.random)

    def _label(self) -> Any:
        classes = int(getattr(self.config, "num_labels", 2) or 2)
        if self.head in ("ObjectDetection", "ZeroShotObjectDetection", "InstanceSegmentation"):
            return self._boxes(classes)
        if self.head == "SemanticSegmentation":
            return self._classes(classes, *self.image_size)
        if self.head in ("DepthEstimation", "ImageToImage"):
            return self._normal(self.batch, *self.image_size).abs()
        if self.head == "TokenClassification":
            return self._classes(classes, self.length)
        main = getattr(self.model, "main_input_name", "")
        if self.head in ("CTC", "RNNT", "TDT") or (
            self.head == "SpeechSeq2Seq" and main != "input_ids"
        ):
            return self._token_ids((self.batch, 32))
        if self.head in ("VisualQuestionAnswering",):
            return torch.zeros(self.batch, classes)
        if self.head in _TOKEN_LABELS:
            return self._token_ids((self.batch, self.length))
        return self._classes(2 if self.head == "MultipleChoice" else classes)

    def _boxes(self, classes: int) -> list[dict[str, Tensor]]:
        labels = []
        for _ in range(self.batch):
            boxes = torch.rand(OBJECTS_PER_IMAGE, 4, generator=self.random) * 0.4 + 0.1
            kinds = torch.randint(0, classes, (OBJECTS_PER_IMAGE,), generator=self.random)
            labels.append({"class_labels": kinds, "boxes": boxes})
        return labels

    def _segment_labels(self) -> dict[str, Any]:
        classes = int(getattr(self.config, "num_labels", 2) or 2)
        kinds = [
            torch.randint(0, classes, (OBJECTS_PER_IMAGE,), generator=self.random)
            for _ in range(self.batch)
        ]
        masks = [torch.zeros(OBJECTS_PER_IMAGE, *self.image_size) for _ in range(self.batch)]
        return {"mask_labels": masks, "class_labels": kinds}

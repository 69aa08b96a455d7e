"""Make a labelled batch of random values for a transformers model, from its configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from estimator.errors import EstimatorError, TraceError, UserCode
from estimator.graph.trace.fake_tensors import kept_as_it_was, put_fake_tensors
from estimator.graph.trace.functions import EagerFunctions, quiet_fakes
from estimator.graph.trace.record import Recorder

DEFAULT_LENGTH = 512
# Objects that a detector found in an image, for models that take those instead of pixels.
DETECTED_OBJECTS = 36


# Patches along each side of an image that a model takes as a list of patches (Qwen-VL's form).
PATCHES_PER_SIDE = 16
# Not learned from: torch.nn.functional.cross_entropy's ignore_index.
_IGNORED = -100
_PICTURES = ("pixel_values", "image_grid_thw")
# Half a second to ten seconds of speech, as its models are trained on.
AUDIO_SAMPLES = 16_000 * 5
FEATURE_FRAMES = 512
OBJECTS_PER_IMAGE = 5
TRANSCRIPT_LENGTH = 32
# BERT's "." (transformers' loss_grounding_dino.py).
_DELIMITER = 1012
# Where a model has several vocabularies, its tokens are below the smallest.
_VOCABULARIES = ("vocab_size", "codebook_vocab_size", "codebook_size")

# What a model that turns text to sound learns from, one entry per token of text.
_SPEECH_LABELS = ("spectrogram_labels", "duration_labels", "pitch_labels", "energy_labels")
_TOKEN_LABELS = (
    "CausalLM",
    "Seq2SeqLM",
    "SpeechSeq2Seq",
    "MaskedLM",
    "ImageTextToText",
    "MultimodalLM",
    "PreTraining",
)
_TEXT_AND_IMAGE = ("ImageTextToText", "MultimodalLM", "CausalLM", "Seq2SeqLM")


def make_batch(
    model: Any, config: Any, head: str, batch: int, seq_len: int | None
) -> dict[str, Any]:
    """What ``model(**batch)`` needs to return a loss: its main input, what it requires, labels."""
    return _Maker(model=model, config=config, head=head, batch=batch, seq_len=seq_len).make()


def _setting(parts: Iterable[Any], *names: str) -> Any:
    """The first of these settings that is given in the first part of a configuration with any."""
    known = (getattr(part, name, None) for part in parts for name in names)
    return next(filter(None, known), None)


@dataclass(slots=True, kw_only=True)
class _Maker:
    """Makes a batch of so many samples; texts are of `seq_len` tokens, None: as the model has."""

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
        makers = self._makers()
        if unknown := [name for name in names if name not in makers]:
            raise ValueError(f"its argument '{unknown[0]}' is unknown")
        made = {name: makers[name]() for name in dict.fromkeys(names)}
        made.update(self._labels(accepted))
        features = getattr(self.model, "get_image_features", None)
        if self.head in _TEXT_AND_IMAGE and features is not None:
            taken = inspect.signature(features).parameters
            if "image_grid_thw" in taken:
                made.update(patches(self.vision, self.batch, self.random))
            elif "pixel_values" in accepted:
                made.setdefault("pixel_values", self._pixels())
            made = with_image_tokens(self.model, self.config, made)
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
            "TextToSpectrogram": _SPEECH_LABELS,
            "TextToWaveform": _SPEECH_LABELS,
            "CTC": ("attention_mask",) if main == "input_features" else (),
            "RNNT": ("attention_mask", "decoder_input_ids"),
            "TDT": ("attention_mask", "decoder_input_ids"),
            "SpeechSeq2Seq": ("decoder_input_ids",) if self.channels else (),
            "VisualQuestionAnswering": ("input_ids", "pixel_values"),
        }
        where = {
            ("input_ids",): main != "input_ids" and self.head in ("ImageTextToText", "CausalLM"),
            # git's loss skips the image's tokens, whether or not there is an image.
            ("pixel_values",): self.config.model_type in ("git", "idefics"),
            ("bbox", "return_loss", "visual_feats", "visual_pos", "mm_token_type_ids"): True,
            ("spatial_shapes", "pixel_attention_mask"): main == "pixel_values",
            # Models that attend to images, instead of putting their features among the tokens.
            ("image_attention_mask", "image_embeds_position_mask"): self.head in _TEXT_AND_IMAGE,
            ("visual_embeds",): main == "input_ids",
            ("attention_mask", "visual_attention_mask"): self.visual_labels,
            ("input_features",): self.frames_per_token,
        }
        return (
            *by_head.get(self.head, ()),
            *(name for names, needed in where.items() if needed for name in names),
        )

    def _makers(self) -> dict[str, Callable[[], Any]]:
        return {
            "input_ids": self._tokens,
            "inputs": self._audio if self.head == "SpeechSeq2Seq" else self._tokens,
            "decoder_input_ids": self._decoder_tokens,
            "task_inputs": lambda: self._token_ids((self.batch, self.config.task_seq_len)),
            "qformer_input_ids": self._tokens,
            "pixel_values": self._pixels,
            "pixel_values_videos": lambda: self._normal(self.frames, 3, *self.image_size),
            "flattened_patches": lambda: self._normal(
                256, self.config.vision_config.patch_embed_hidden_size + 2
            ),
            "input_values": self._audio,
            "input_features": self._features,
            "mm_token_type_ids": lambda: torch.zeros(self.batch, self.length, dtype=torch.int64),
            "bbox": self._layout,
            "image_attention_mask": lambda: self._all(self.length, 1),
            "image_embeds_position_mask": self._image_places,
            "pixel_attention_mask": self._pixel_mask,
            "spatial_shapes": lambda: PATCHES_PER_SIDE * self._all(2),
            "return_loss": lambda: True,
            "past_values": lambda: self._normal(self.length),
            "attention_mask": lambda: self._all(
                self.length if self.visual_labels else FEATURE_FRAMES
            ),
            "visual_attention_mask": lambda: self._all(DETECTED_OBJECTS),
            # Every token lasts one frame, so that the spectrogram is as long as the text.
            "duration_labels": lambda: self._all(self.length),
            "pitch_labels": lambda: self._normal(self.length, 1),
            "energy_labels": lambda: self._normal(self.length, 1),
            "spectrogram_labels": lambda: self._normal(
                self.length, getattr(self.config, "model_config", self.config).num_mel_bins
            ),
            "visual_feats": lambda: self._objects(self.config.visual_feat_dim),
            "visual_pos": lambda: self._objects(self.config.visual_pos_dim),
            "visual_embeds": lambda: self._objects(self.config.visual_embedding_dim),
        }

    # Inputs

    def _tokens(self) -> Tensor:
        shape: tuple[int, ...] = (self.batch, self.length)
        if self.head == "MultipleChoice":
            shape = (self.batch, 2, self.length)
        elif self.streams:
            shape = (*shape, self.streams)
        tokens = self._token_ids(shape)
        if self.head == "ZeroShotObjectDetection":
            # Classes are told apart by the delimiters between their names ("cat . dog .").
            tokens[:, ::2] = _DELIMITER
        if self.latents:
            # Spoken after the text: a first position, then one per latent to be predicted.
            start = self.length - self.latents - 1
            tokens[:, start] = self.config.audio_bos_token_id
            tokens[:, start + 1 :] = self.config.audio_latent_token_id
        return tokens

    def _decoder_tokens(self) -> Tensor:
        if self.head in ("RNNT", "TDT"):
            # A blank, then the labels.
            return self._token_ids((self.batch, TRANSCRIPT_LENGTH + 1))
        shape = (self.batch, self.length)
        return self._token_ids((*shape, self.channels) if self.channels else shape)

    def _token_ids(self, shape: tuple[int, ...]) -> Tensor:
        sizes = [
            int(size)
            for part in (self.text, self.config, getattr(self.config, "decoder_config", None))
            for name in _VOCABULARIES
            if isinstance(size := getattr(part, name, None), int)
        ]
        vocabulary = min(sizes, default=1000)
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

    def _all(self, *shape: int) -> Tensor:
        return torch.ones(self.batch, *shape, dtype=torch.int64)

    def _pixel_mask(self) -> Tensor:
        pixels = self._pixels()
        return self._all(*(pixels.shape[1:2] if pixels.dim() == 3 else pixels.shape[2:]))

    def _layout(self) -> Tensor:
        """Boxes of words: in thousandths of the page, or where a model compares them, shares."""
        compared = hasattr(self.config, "relative_bias_args")
        kind = torch.float32 if compared else torch.int64
        return torch.zeros(self.batch, self.length, 4, dtype=kind)

    def _image_places(self) -> Tensor:
        """Where in the text the features of an image stand: at its beginning."""
        features = min(self.config.latent_query_num, self.length)
        places = torch.zeros(self.batch, self.length, dtype=torch.int64)
        places[:, :features] = 1
        return places

    def _objects(self, width: int) -> Tensor:
        return self._normal(DETECTED_OBJECTS, width)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn((self.batch, *shape), generator=self.random)

    def _pixels(self) -> Tensor:
        channels = int(_setting((self.vision,), "num_channels") or 3)
        accepted = inspect.signature(self.model.forward).parameters
        if "spatial_shapes" in accepted:
            size = int(self.vision.patch_size)
            return self._normal(PATCHES_PER_SIDE**2, channels * size * size)
        # A model that makes features of videos, but takes no other pixels, takes frames.
        filmed = hasattr(self.model, "get_video_features") and not any(
            "video" in name for name in accepted
        )
        if self.head == "VideoClassification" or filmed:
            return self._normal(self.frames, channels, *self.image_size)
        if "image_attention_mask" in accepted:
            return self._normal(1, channels, *self.image_size)
        return self._normal(channels, *self.image_size)

    def _audio(self) -> Tensor:
        if hasattr(self.config, "num_mel_bins") and hasattr(self.config, "max_length"):
            return self._normal(self.config.max_length, self.config.num_mel_bins)
        return self._normal(AUDIO_SAMPLES)

    def _features(self) -> Tensor:
        layers = self.model.named_modules()
        linear = next((layer for name, layer in layers if name.endswith("input_linear")), None)
        if linear is not None:
            return self._normal(FEATURE_FRAMES, linear.in_features)
        encoder = getattr(self.config, "encoder_config", self.config)
        if self.frames_per_token:
            mel = self.config.audio_config.num_mel_bins
            return self._normal(mel, self.frames_per_token * self.length)
        names = "num_mel_bins", "feature_size", "input_dim", "feature_projection_input_dim"
        mel = int(_setting((self.config, encoder), *names) or 80)
        if self.config.model_type == "whisper":
            return self._normal(mel, 2 * self.config.max_source_positions)
        return self._normal(FEATURE_FRAMES, mel)

    # Labels

    def _labels(self, accepted: Any) -> dict[str, Any]:
        if "start_positions" in accepted:
            return {name: self._classes(2) for name in ("start_positions", "end_positions")}
        if "mask_labels" in accepted and "class_labels" in accepted:
            kinds = [self._kinds() for _ in range(self.batch)]
            masks = [torch.zeros(OBJECTS_PER_IMAGE, *self.image_size) for _ in range(self.batch)]
            return {"mask_labels": masks, "class_labels": kinds}
        if "labels" not in accepted:
            return {}
        return {"labels": self._label()}

    def _classes(self, count: int, *shape: int) -> Tensor:
        return torch.randint(0, max(1, count), (self.batch, *shape), generator=self.random)

    def _label(self) -> Any:
        classes = self._class_count
        if self.head in ("ObjectDetection", "ZeroShotObjectDetection", "InstanceSegmentation"):
            return self._boxes()
        if self.head == "SemanticSegmentation":
            return self._classes(classes, *self.image_size)
        if self.head in ("DepthEstimation", "ImageToImage"):
            return self._normal(*self.image_size).abs()
        if self.head == "TokenClassification":
            return self._classes(classes, self.length)
        if self.latents:
            return self._normal(self.latents, self.config.latent_dim)
        if self.head == "TextToWaveform":
            decoder = getattr(self.config, "decoder", None)
            if books := self.streams or getattr(decoder, "num_codebooks", 0):
                return self._token_ids((self.batch, self.length, books))
            return self._token_ids((self.batch, self.length))
        if self.channels:
            return self._token_ids((self.batch * self.channels, self.length))
        main = getattr(self.model, "main_input_name", "")
        if self.head in ("CTC", "RNNT", "TDT") or (
            self.head == "SpeechSeq2Seq" and main != "input_ids"
        ):
            return self._token_ids((self.batch, TRANSCRIPT_LENGTH))
        if self.head == "VisualQuestionAnswering":
            return torch.zeros(self.batch, classes)
        if self.head in _TOKEN_LABELS:
            return self._token_ids((self.batch, self.length + self.visual_labels))
        return self._classes(2 if self.head == "MultipleChoice" else classes)

    @property
    def _class_count(self) -> int:
        return int(getattr(self.config, "num_labels", 2) or 2)

    def _kinds(self) -> Tensor:
        return torch.randint(0, self._class_count, (OBJECTS_PER_IMAGE,), generator=self.random)

    def _boxes(self) -> list[dict[str, Tensor]]:
        labels = []
        for _ in range(self.batch):
            boxes = torch.rand(OBJECTS_PER_IMAGE, 4, generator=self.random) * 0.4 + 0.1
            labels.append({"class_labels": self._kinds(), "boxes": boxes})
        return labels

    # Sizes

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
        return int(_setting((getattr(self.config, "decoder_config", None),), "num_channels") or 0)

    @property
    def vision(self) -> Any:
        """The configuration of the part that sees."""
        if hasattr(self.config, "image_size"):
            return self.config
        part = _setting((self.config,), "vision_config", "encoder", "backbone_config")
        return part or self.config

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        size = _setting((self.vision, self.config), "image_size")
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
        parts = self.config, self.vision
        return int(_setting(parts, "num_frames", "frames_per_clip") or 8)


def with_image_tokens(model: nn.Module, config: Any, made: dict[str, Any]) -> dict[str, Any]:
    """The batch with tokens in front of each text for the features of its image.

    As processors do it: as many tokens as the model makes features of one image, not learned
    from. Without the images if the model cannot take them in this form: it is then trained on text.
    """
    taken = inspect.signature(model.get_image_features).parameters  # type: ignore[arg-type]
    pictures = {name: made[name] for name in taken if name in made}
    token = _setting((config,), "image_token_id", "image_token_index")
    if "pixel_values" not in pictures or not isinstance(token, int) or "input_ids" not in made:
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
    channels = int(_setting((vision,), "in_channels", "in_chans", "num_channels") or 3)
    size, frames = (
        value[0] if isinstance(value, (list, tuple)) else int(value)
        for value in (getattr(vision, "patch_size", 14), getattr(vision, "temporal_patch_size", 1))
    )
    grid = torch.tensor([[1, PATCHES_PER_SIDE, PATCHES_PER_SIDE]] * batch)
    shape = (batch * PATCHES_PER_SIDE**2, channels * frames * size * size)
    return {
        "pixel_values": torch.randn(shape, generator=random),
        "image_grid_thw": grid,
    }


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
        fakes = put_fake_tensors(model, dtype=None)
        for name, buffer in fakes.buffers.items():
            recorder.place(buffer, "buffer")
            recorder.constants.give(buffer, fakes.real_buffers[name])
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

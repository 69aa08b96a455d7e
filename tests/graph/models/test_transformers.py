"""Transformers types get batches that they learn from, and what their configurations lack."""

from __future__ import annotations

import pytest
from torch import nn

transformers = pytest.importorskip("transformers")

from estimator.graph.models import load_model  # noqa: E402 - after the skip
from estimator.graph.models.transformers_models import (  # noqa: E402
    fill_gaps,
    fit_rotary_sections,
    mend_contradictions,
)
from estimator.graph.trace.trace import trace_graph  # noqa: E402

_TEXT = (
    "text_config.num_hidden_layers=1,text_config.hidden_size=32,text_config.intermediate_size=32,"
    "text_config.num_attention_heads=2,text_config.num_key_value_heads=2"
)
LLAVA = (
    f"hf:llava,{_TEXT},vision_config.hidden_size=32,vision_config.intermediate_size=32,"
    "vision_config.num_hidden_layers=2,vision_config.num_attention_heads=2,"
    "vision_config.image_size=28,vision_config.patch_size=14"
)


def test_an_image_stands_in_the_text_as_the_tokens_of_its_features() -> None:
    model, batch, _, name = load_model(LLAVA, batch=2, seq_len=8, weights=False)
    # 28 / 14 patches along each side, four in all, before eight tokens of text.
    is_image = batch["input_ids"] == model.config.image_token_id
    assert is_image.tolist() == [[True] * 4 + [False] * 8] * 2
    assert (batch["labels"][is_image] == -100).all()
    assert batch["pixel_values"].shape == (2, 3, 28, 28)
    assert "text alone" not in name
    targets = {op.module for op in trace_graph(model, batch).ops}
    assert any("vision_tower" in module for module in targets)


def test_a_model_whose_images_do_not_fit_its_text_says_that_it_learns_from_text_alone() -> None:
    # transformers' own default: 256 features of an image of 14 x 14 patches.
    text = f"hf:gemma3,{_TEXT},vision_config.num_hidden_layers=1,vision_config.hidden_size=32"
    text += ",vision_config.num_attention_heads=2,vision_config.intermediate_size=32"
    _, batch, _, name = load_model(text, batch=2, seq_len=8, weights=False)
    assert "pixel_values" not in batch
    assert name.endswith(" (text alone)")


def test_the_classes_of_a_detection_prompt_are_told_apart_by_delimiters() -> None:
    text = "hf:grounding-dino,encoder_layers=1,decoder_layers=2,num_queries=20"
    _, batch, _, _ = load_model(text, batch=2, seq_len=8, weights=False)
    # 1012 is BERT's ".".
    assert batch["input_ids"][:, ::2].unique().tolist() == [1012]
    assert 1012 not in batch["input_ids"][:, 1::2]


def test_codebooks_of_audio_stand_beside_the_text() -> None:
    text = "hf:kyutai_speech_to_text,num_hidden_layers=1,hidden_size=32,num_attention_heads=2"
    model, batch, _, _ = load_model(text, batch=2, seq_len=8, weights=False)
    assert batch["input_ids"].shape == (2, 8, model.config.num_codebooks + 1)
    assert int(batch["input_ids"].max()) < model.config.codebook_vocab_size
    assert batch["labels"].shape == (2, 8)


def test_latents_of_audio_follow_the_text_that_they_speak() -> None:
    text = "hf:pocket_tts,num_hidden_layers=1"
    model, batch, _, _ = load_model(text, batch=2, seq_len=8, weights=False)
    config = model.config
    assert (batch["input_ids"][:, 3] == config.audio_bos_token_id).all()
    assert (batch["input_ids"][:, 4:] == config.audio_latent_token_id).all()
    assert batch["labels"].shape == (2, 4, config.latent_dim)


def test_every_token_of_a_streaming_text_hears_its_own_frames() -> None:
    text = "hf:voxtral_realtime,text_config.num_hidden_layers=1,audio_config.num_hidden_layers=1"
    model, batch, _, _ = load_model(text, batch=2, seq_len=8, weights=False)
    frames = 8 * model.config.audio_length_per_tok
    assert batch["input_features"].shape == (2, model.config.audio_config.num_mel_bins, frames)


def test_objects_of_an_image_are_labelled_after_the_text() -> None:
    text = "hf:visual_bert,num_hidden_layers=1,hidden_size=32,num_attention_heads=2"
    _, batch, _, _ = load_model(text, batch=2, seq_len=8, weights=False)
    assert batch["visual_attention_mask"].shape == (2, 36)
    assert batch["labels"].shape == (2, 8 + 36)


def test_a_missing_vocabulary_size_is_filled_and_said_in_the_name() -> None:
    text = "hf:esm,num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=32"
    model, batch, _, name = load_model(text, batch=2, seq_len=8, weights=False)
    assert name == f"{text.removeprefix('hf:')},vocab_size=32000"
    assert model.get_input_embeddings().num_embeddings == 32_000
    assert int(batch["labels"].max()) < 32_000


def test_a_configuration_that_builds_is_left_alone() -> None:
    text = "hf:gpt2,n_layer=1,n_embd=32,n_head=2,vocab_size=100"
    assert load_model(text, weights=False)[3] == text.removeprefix("hf:")


def test_heads_that_do_not_divide_the_width_become_the_next_fewer_that_do() -> None:
    config = transformers.SiglipVisionConfig(hidden_size=30, num_attention_heads=4)
    assert fill_gaps(config, ValueError("heads")) == {"num_attention_heads": 3}
    assert config.num_attention_heads == 3


def test_a_missing_library_is_no_gap_in_a_configuration() -> None:
    config = transformers.EsmConfig()
    assert fill_gaps(config, ImportError("requires the natten library")) == {}
    assert config.vocab_size is None


def test_experts_of_which_none_is_chosen_are_chosen_in_pairs() -> None:
    config = transformers.DeepseekV2Config(n_routed_experts=4, num_experts_per_tok=None)
    assert mend_contradictions(config) == {"num_experts_per_tok": 2}
    assert mend_contradictions(config) == {}


def test_features_of_images_become_as_wide_as_the_text() -> None:
    config = transformers.AutoConfig.for_model("qwen3_vl")
    config.text_config.hidden_size, config.vision_config.out_hidden_size = 64, 48
    assert mend_contradictions(config) == {"vision_config.out_hidden_size": 64}
    assert config.vision_config.out_hidden_size == 64


def test_rotary_sections_are_scaled_to_the_rotary_dimensions() -> None:
    import torch

    class Rotary(nn.Module):
        def __init__(self, pairs: int) -> None:
            super().__init__()
            self.mrope_section = [8, 12, 12]
            self.inv_freq = nn.Buffer(torch.ones(pairs))

    # 8:12:12 of 64 pairs; of 11 pairs 2.75, 4.125 and 4.125, the rest going to the first.
    assert fit_rotary_sections(Rotary(64)) == {"mrope_section": [16, 24, 24]}
    assert fit_rotary_sections(Rotary(11)) == {"mrope_section": [3, 4, 4]}
    assert fit_rotary_sections(Rotary(32)) == {}


def test_a_vocabulary_without_a_place_for_images_gets_its_last_token_as_one() -> None:
    config = transformers.ChameleonConfig(vocab_size=100)
    filled = fill_gaps(config, AttributeError("'NoneType' object has no attribute 'get'"))
    assert filled["vocabulary_map"] == {"<image>": 99}

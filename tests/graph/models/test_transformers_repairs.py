"""Check what is set in a transformers configuration that names no buildable model."""

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

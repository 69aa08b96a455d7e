"""Check which model a MODEL text names, and what is said of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from estimator.errors import ModelError
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.models import load_model
from estimator.graph.trace.trace import trace_graph

MODELS = """
import sys
import torch
from torch import nn

def plain(batch=4):
    return nn.Linear(3, 2), torch.randn(batch, 3)

def with_loss():
    return nn.Linear(3, 2), torch.randn(4, 3), lambda output, batch: output.sum()

def raises():
    raise RuntimeError("out of\\nideas")

def leaves():
    sys.exit(3)

def returns_model():
    return nn.Linear(3, 2)

def returns_number():
    return 3, torch.randn(4, 3)

def returns_class():
    return nn.Linear, torch.randn(4, 3)

def returns_word_as_loss():
    return nn.Linear(3, 2), torch.randn(4, 3), "mse"

not_a_function = 5
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "some_models.py"
    path.write_text(MODELS)
    return path


def test_a_function_of_a_file_gets_the_batch_it_asks_for(models: Path) -> None:
    model, batch, loss, name = load_model(f"{models}:plain", batch=6)
    assert isinstance(model, torch.nn.Linear)
    assert batch.shape == (6, 3)
    assert (loss, name) == (None, "plain")


def test_a_function_without_a_batch_parameter_keeps_its_own(models: Path) -> None:
    _, batch, loss, _ = load_model(f"{models}:with_loss", batch=6)
    assert batch.shape == (4, 3)
    assert loss is not None


def test_a_function_without_a_length_of_samples_is_not_told_one(models: Path) -> None:
    with pytest.raises(ModelError, match="takes no seq_len; let it, or leave --seq-len out"):
        load_model(f"{models}:with_loss", seq_len=6)


def test_a_function_of_a_package_is_found(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models.parent)
    assert load_model("some_models:plain")[3] == "plain"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("plan", "did you mean plain"),
        ("not_a_function", "has no function"),
        ("raises", r"RuntimeError: out of ideas"),
        ("leaves", "SystemExit: 3"),
        ("returns_model", r"returned a Linear; return \(model, batch\)"),
        ("returns_number", "returned a int as the model"),
        ("returns_class", r"returned the class Linear as the model; return \(Linear\(…\), batch\)"),
        ("returns_word_as_loss", "returned a str as the loss"),
    ],
)
def test_a_function_that_is_no_model_is_refused_in_one_sentence(
    models: Path, function: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_model(f"{models}:{function}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gone.py:build", "there is no file gone.py"),
        ("no_such_package:build", "cannot be imported"),
        ("resnet", "does not name a model"),
        ("hf:gtp2", "did you mean gpt2"),
        ("hf:gpt2:translation", "has no task 'translation'; it has CausalLM"),
        ("hf:llama,hiden_size=8", "did you mean hidden_size"),
        ("hf:llama,hidden_size", "is no setting"),
        ("hf:llama,hidden_size=64,hidden_size=128", "'hidden_size' stands twice; write it once"),
        ("hf:llama,hidden_size=many", "configuration of 'llama' fails"),
        ("hf:meta-llama/Llama-2-7b-hf", "save its config.json .* and write hf:PATH/config.json"),
        ("hf:gone/config.json", "cannot be read: No such file"),
    ],
)
def test_a_wrong_model_text_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(text)


def test_a_file_of_a_package_is_told_how_to_be_named(tmp_path: Path) -> None:
    package = tmp_path / "nets"
    package.mkdir()
    (package / "models.py").write_text("from .layers import Net\n")
    with pytest.raises(ModelError, match=r"relative import .*; fix the file$"):
        load_model(f"{package}/models.py:build")
    (package / "__init__.py").touch()
    with pytest.raises(ModelError, match=r"or write nets\.models:function where nets is a folder$"):
        load_model(f"{package}/models.py:build")


def test_a_config_json_is_a_transformers_model_in_the_precision_that_is_asked_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.json"
    saved = {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "torch_dtype": "float16",
        **{"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2},
        **{"intermediate_size": 64, "vocab_size": 100, "transformers_version": "4.31.0.dev0"},
    }
    path.write_text(json.dumps(saved))
    model, batch, _, name = load_model(f"hf:{path},num_hidden_layers=1", weights=False)
    assert type(model).__name__ == "BertForSequenceClassification"
    assert len(model.bert.encoder.layer) == 1  # the text's setting, not the file's
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert batch["labels"].shape == (8,)
    assert name == f"{path},num_hidden_layers=1"
    assert type(load_model(f"hf:{tmp_path}:MaskedLM")[0]).__name__ == "BertForMaskedLM"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "has no 'model_type'"),
        ('{"model_type": "lama"}', "no type 'lama'; did you mean llama"),
        ('{"model_type": "llama", "hidden_size": 1000000000}', "a model has 0 to 1e"),
    ],
)
def test_a_config_json_that_is_none_says_so(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=message):
        load_model(f"hf:{path}")


def test_a_file_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (")
    with pytest.raises(ModelError, match="SyntaxError"):
        load_model(f"{tmp_path / 'broken.py'}:build")


SMALL = {
    "hf:gpt2,n_layer=1,n_embd=32,n_head=2,vocab_size=100": ("input_ids", (8, 512)),
    "hf:bert,num_hidden_layers=1,hidden_size=32,num_attention_heads=2": ("input_ids", (8, 512)),
    "hf:t5,num_layers=1,d_model=32,d_ff=32": ("input_ids", (8, 512)),
    "hf:vit,num_hidden_layers=1,hidden_size=32,num_attention_heads=2": (
        "pixel_values",
        (8, 3, 224, 224),
    ),
}


@pytest.mark.parametrize("text", SMALL)
def test_a_transformers_type_comes_with_a_labelled_batch_that_it_can_train_on(text: str) -> None:
    model, batch, _, _ = load_model(text, weights=False)
    name, shape = SMALL[text]
    assert batch[name].shape == shape
    assert "labels" in batch
    assert model.training
    assert trace_graph(model, batch).other_batch == 16


def test_batch_and_sequence_length_of_a_transformers_type_can_be_chosen() -> None:
    text = "hf:llama,num_hidden_layers=1,hidden_size=32,num_attention_heads=2"
    _, batch, _, _ = load_model(text, batch=3, seq_len=17, weights=False)
    assert batch["input_ids"].shape == (3, 17)


def test_a_type_that_reads_images_is_by_default_not_trained_to_classify() -> None:
    transformers = pytest.importorskip("transformers")
    from estimator.graph.models.transformers_models import heads_of

    heads = heads_of(transformers, transformers.AutoConfig.for_model("qwen3_5"))
    assert "SequenceClassification" in heads
    assert next(iter(heads)) == "ImageTextToText"


def test_checkpoints_and_the_form_of_attention_can_be_chosen_for_a_transformers_type() -> None:
    text = "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=100"

    def count(more: str, target: str, phase: str) -> int:
        model, batch, loss, name = load_model(text + more, batch=2, seq_len=8)
        graph = trace_graph(model, batch, loss=loss, target="cuda", precision="bf16", name=name)
        return sum(op.call.target == target and op.phase == phase for op in graph.ops)

    again = ",gradient_checkpointing=true"
    # Four products with a bias in each of two blocks, all computed again in backward.
    assert count("", "aten.addmm.default", "backward") == 0
    assert count(again, "aten.addmm.default", "backward") == 8
    # Attention written out is two products of batches in each block.
    flash = "aten._scaled_dot_product_flash_attention.default"
    assert count("", flash, "forward") == 2
    assert count(",attn_implementation=eager", flash, "forward") == 0
    assert count(",attn_implementation=eager", "aten.bmm.default", "forward") == 4


def test_a_transformers_type_without_checkpoints_says_so() -> None:
    with pytest.raises(ModelError, match="leave gradient_checkpointing out"):
        load_model("hf:resnet,gradient_checkpointing=true")


LARGE = """
import torch

class Wide(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

def wide(batch=16, layers=4):
    return Wide(layers), (torch.randn(batch, 2048), torch.randint(9, (batch, 2048))), loss

def loss(out, batch):
    return (out * batch[1]).sum()

def reads_weights(batch=16):
    model, *rest = wide(batch)
    assert float(model.layers[0].weight.abs().sum()) > 0
    return model, *rest
"""


def test_a_large_model_of_ones_own_is_traced_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large.py").write_text(LARGE)
    text = f"{tmp_path / 'large.py'}:wide"
    # Four layers of 2048 * 2049 parameters in float32.
    size = 4 * 2048 * 2049 * 4

    def graph(most_bytes: int) -> OpGraph:
        monkeypatch.setattr("estimator.graph.models.functions.MOST_WEIGHT_BYTES", most_bytes)
        model, batch, loss, name = load_model(text, weights=False)
        assert any(each.is_meta for each in model.parameters()) == (most_bytes < size)
        assert not any(each.is_meta for each in batch)
        return trace_graph(model, batch, loss=loss, name=name)

    assert graph(size - 1) == graph(size)
    assert not any(each.is_meta for each in load_model(text)[0].parameters())


def test_a_large_model_that_reads_its_weights_is_built_with_them_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large.py").write_text(LARGE)
    monkeypatch.setattr("estimator.graph.models.functions.MOST_WEIGHT_BYTES", 1 << 20)
    said: list[str] = []
    model, *_ = load_model(f"{tmp_path / 'large.py'}:reads_weights", weights=False, say=said.append)
    assert not any(each.is_meta for each in model.parameters())
    (sentence,) = said
    # All four layers were made before they were read.
    assert "with its weights, at least 64.0 MiB" in sentence

"""Models and training set-ups as people have them, each as a function of a user's own file.

`test_setups.py` asks about every one of them unchanged. Sizes are small, forms are not.
Needs torchvision, timm, transformers, peft, torch-geometric and lightning where they are named.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn
from torch.utils.data import DataLoader, Dataset, TensorDataset

Setup = tuple[Any, ...]


def _images(batch: int = 8, size: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(10, (batch,))


def _table(batch: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 20), torch.randint(10, (batch,))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


# Plain PyTorch


def classifier() -> Setup:
    return _mlp(), _table(), nn.CrossEntropyLoss()


def regression() -> Setup:
    return nn.Linear(20, 1), (torch.randn(32, 20), torch.randn(32, 1)), nn.MSELoss()


def multi_label() -> Setup:
    return _mlp(), (torch.randn(32, 20), torch.rand(32, 10)), nn.BCEWithLogitsLoss()


def dataset() -> Setup:
    class Own(Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.randn(20), index % 10

    return _mlp(), Own(), nn.CrossEntropyLoss()


def compiled() -> Setup:
    return torch.compile(_mlp()), _table(), nn.CrossEntropyLoss()


def own_loss() -> Setup:
    class Focal(nn.Module):
        def forward(self, logits: Tensor, target: Tensor) -> Tensor:
            losses = functional.cross_entropy(logits, target, reduction="none")
            return ((1 - torch.exp(-losses)) ** 2 * losses).mean()

    return _mlp(), _table(), Focal()


def several_outputs() -> Setup:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = (
                nn.Linear(20, 32),
                nn.Linear(32, 10),
                nn.Linear(32, 1),
            )

        def forward(self, source: Tensor) -> dict[str, Tensor]:
            hidden = self.body(source).relu()
            return {"class": self.first(hidden), "value": self.second(hidden)}

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return functional.cross_entropy(output["class"], target) + output["value"].pow(2).mean()

    return Heads(), _table(), loss


def two_inputs() -> Setup:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(20, 8), nn.Linear(5, 8)

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            return self.one(one) * self.two(two)

    batch = ((torch.randn(16, 20), torch.randn(16, 5)), torch.randint(8, (16,)))
    return Both(), batch, nn.CrossEntropyLoss()


def contrastive() -> Setup:
    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(20, 16)

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            return functional.normalize(self.body(one)) @ functional.normalize(self.body(two)).T

    def loss(scores: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(scores * 10, torch.arange(len(scores)))

    return Twin(), (torch.randn(16, 20), torch.randn(16, 20)), loss


def triplet() -> Setup:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(20, 16)

        def forward(self, *sides: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.body(side) for side in sides)

    def loss(output: tuple[Tensor, ...], batch: Any) -> Tensor:
        return functional.triplet_margin_loss(*output)

    return Embed(), tuple(torch.randn(16, 20) for _ in range(3)), loss


def autoencoder() -> Setup:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(20, 8), nn.Linear(4, 20)

        def forward(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, deviation = self.encoder(source).chunk(2, -1)
            code = mean + torch.randn_like(mean) * torch.exp(0.5 * deviation)
            return self.decoder(code), mean, deviation

    def loss(output: Any, source: Tensor) -> Tensor:
        found, mean, deviation = output
        divergence = -0.5 * (1 + deviation - mean.pow(2) - deviation.exp()).mean()
        return functional.mse_loss(found, source) + divergence

    return Vae(), torch.randn(32, 20), loss


def language_model() -> Setup:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, 64)
            layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
            self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(64, 1000)

        def forward(self, tokens: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            return self.head(self.body(self.embed(tokens), mask=mask, is_causal=True))

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    tokens = torch.randint(1000, (8, 33))
    return Model(), (tokens[:, :-1], tokens[:, 1:]), loss


def packed_text() -> Setup:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, 32, padding_idx=0)
            self.body, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 2)

        def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
            packed = rnn.pack_padded_sequence(
                self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            _, (hidden, _) = self.body(packed)
            return self.head(hidden[-1])

    batch = (torch.randint(1000, (8, 40)), torch.randint(1, 40, (8,)), torch.randint(2, (8,)))
    return Model(), batch, nn.CrossEntropyLoss()


def speech() -> Setup:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.GRU(80, 64, 2, bidirectional=True), nn.Linear(128, 30)

        def forward(self, frames: Tensor) -> Tensor:
            return self.head(self.body(frames)[0]).log_softmax(-1)

    def loss(output: Tensor, batch: Any) -> Tensor:
        frames, samples = output.shape[:2]
        lengths = torch.full((samples,), frames), torch.full((samples,), 10)
        return functional.ctc_loss(output, torch.randint(1, 30, (samples, 10)), *lengths)

    return Model(), torch.randn(50, 8, 80), loss


def segmentation() -> Setup:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.middle = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
            self.up, self.out = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(32, 5, 2, 2)

        def forward(self, image: Tensor) -> Tensor:
            first = self.down(image).relu()
            second = self.up(self.middle(first).relu())
            return self.out(torch.cat((first, second), 1))

    batch = torch.randn(4, 3, 64, 64), torch.randint(5, (4, 64, 64))
    return Net(), batch, nn.CrossEntropyLoss()


def diffusion() -> Setup:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.body = nn.Linear(1, 3), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, image: Tensor) -> Tensor:
            noise = torch.randn_like(image)
            level = torch.rand(len(image), 1)
            mixed = image + level[:, :, None, None] * noise
            shift = self.time(level)[:, :, None, None]
            return functional.mse_loss(self.body(mixed) + shift, noise)

    return Denoiser(), torch.randn(4, 3, 32, 32)


def recommender() -> Setup:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(5000, 32), nn.EmbeddingBag(2000, 32, mode="mean")

        def forward(self, user: Tensor, items: Tensor) -> Tensor:
            return (self.users(user) * self.items(items)).sum(-1)

    batch = (torch.randint(5000, (64,)), torch.randint(2000, (64, 7)), torch.rand(64))
    return Towers(), batch, nn.BCEWithLogitsLoss()


def frozen_body() -> Setup:
    body = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256)).requires_grad_(False)
    return nn.Sequential(body, nn.Linear(256, 10)), _table(), nn.CrossEntropyLoss()


def teacher_and_student() -> Setup:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = _mlp().requires_grad_(False), nn.Linear(20, 10)

        def forward(self, source: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = self.teacher(source).softmax(-1)
            return functional.kl_div(self.student(source).log_softmax(-1), wanted)

    return Distilled(), torch.randn(32, 20)


def policy() -> Setup:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _mlp()

        def forward(self, state: Tensor, action: Tensor, advantage: Tensor) -> Tensor:
            chosen = torch.distributions.Categorical(logits=self.body(state))
            return -(chosen.log_prob(action) * advantage).mean() - 0.01 * chosen.entropy().mean()

    return Actor(), (torch.randn(32, 20), torch.randint(10, (32,)), torch.randn(32))


# Libraries


def torchvision_resnet() -> Setup:
    from torchvision.models import resnet18

    return resnet18(num_classes=10), _images(), nn.CrossEntropyLoss()


def torchvision_vit() -> Setup:
    from torchvision.models import vit_b_16

    return vit_b_16(num_classes=10), _images(2, 224), nn.CrossEntropyLoss()


def torchvision_segmentation() -> Setup:
    from torchvision.models.segmentation import fcn_resnet50

    model = fcn_resnet50(num_classes=5, weights=None, weights_backbone=None)
    batch = torch.randn(2, 3, 64, 64), torch.randint(5, (2, 64, 64))
    return model, batch, lambda output, target: functional.cross_entropy(output["out"], target)


def timm_convnext() -> Setup:
    import timm

    return timm.create_model("convnext_atto", num_classes=10), _images(), nn.CrossEntropyLoss()


def timm_vit() -> Setup:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    return model, _images(4, 224), nn.CrossEntropyLoss()


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, use_cache=False))


def transformers_gpt2() -> Setup:
    tokens = torch.randint(1000, (4, 64))
    return _gpt2(), {"input_ids": tokens, "labels": tokens}


def transformers_bert() -> Setup:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
    batch = {"input_ids": torch.randint(1000, (4, 32)), "attention_mask": torch.ones(4, 32).long()}
    return BertForSequenceClassification(config), batch | {"labels": torch.randint(2, (4,))}


def transformers_checkpointing() -> Setup:
    model = _gpt2()
    model.gradient_checkpointing_enable()
    tokens = torch.randint(1000, (4, 64))
    return model.train(), {"input_ids": tokens, "labels": tokens}


def transformers_loader() -> Setup:
    tokens = torch.randint(1000, (16, 64))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    return _gpt2(), DataLoader(samples, batch_size=4)  # type: ignore[arg-type]


def peft_lora() -> Setup:
    from peft import LoraConfig, get_peft_model

    tokens = torch.randint(1000, (4, 64))
    config = LoraConfig(r=8, target_modules=["c_attn"], task_type="CAUSAL_LM")
    return get_peft_model(_gpt2(), config), {"input_ids": tokens, "labels": tokens}


def lightning_module() -> Setup:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = _mlp()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            source, target = batch
            loss = functional.cross_entropy(self.body(source), target)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    return Lit(), DataLoader(TensorDataset(*_table(64)), batch_size=16)


def lightning_gan() -> Setup:
    """Optimises by hand, which needs Lightning's own loop: refused."""
    import lightning

    class Gan(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = nn.Linear(16, 20), nn.Linear(20, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()  # type: ignore[misc]
            loss = self.discriminator(batch).mean()
            self.manual_backward(loss)
            first.step()
            self.manual_backward(self.discriminator(self.generator(torch.randn(8, 16))).mean())
            second.step()

    return Gan(), torch.randn(8, 20)


def geometric_gcn() -> Setup:
    from torch_geometric.nn import GCNConv

    class Gcn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(16, 32), GCNConv(32, 5)

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            return self.second(self.first(nodes, edges).relu(), edges)

    batch = (torch.randn(100, 16), torch.randint(100, (2, 400)), torch.randint(5, (100,)))
    return Gcn(), batch, nn.CrossEntropyLoss()


def geometric_data() -> Setup:
    """A batch that is an object of the library."""
    from torch_geometric.data import Data
    from torch_geometric.nn import SAGEConv

    class Sage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = SAGEConv(16, 5)

        def forward(self, data: Any) -> Tensor:
            return self.body(data.x, data.edge_index)

    data = Data(x=torch.randn(100, 16), edge_index=torch.randint(100, (2, 400)))
    return Sage(), data, lambda output, batch: output.pow(2).mean()


# What a person forgets


def no_loss() -> Setup:
    """A batch with targets and nothing that takes them: refused."""
    return _mlp(), _table()


def no_batch() -> Any:
    """A model alone: refused."""
    return _mlp()


def optimizer_too() -> Setup:
    """An optimizer as a fourth part: refused."""
    model = _mlp()
    return model, _table(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)


def models_without_step() -> Setup:
    """Two models and nothing that trains them: refused."""
    return [_mlp(), _mlp()], torch.randn(8, 20)

"""Set-ups of research code: own steps, own autograd functions, trainers, unusual batches.

As in user_setups.py each is a function of a user's own file. Needs transformers and accelerate
where they are named.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

Setup = tuple[Any, ...]


def _table(batch: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 20), torch.randint(10, (batch,))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = _mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def towers_of_a_mapping() -> Setup:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleDict({"age": nn.Linear(3, 8), "text": nn.Linear(7, 8)})
            self.head = nn.Linear(16, 10)

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return self.head(torch.cat([self.towers[k](v) for k, v in inputs.items()], 1))

    inputs = {"age": torch.randn(32, 3), "text": torch.randn(32, 7)}
    return Towers(), (inputs, torch.randint(10, (32,))), nn.CrossEntropyLoss()


def dataset_of_mappings() -> Setup:
    class Weighted(Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.randn(20), "target": index % 10, "weight": 1.0}

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        each = functional.cross_entropy(output, batch["target"], reduction="none")
        return (each * batch["weight"]).mean()

    return _Body(), DataLoader(Weighted(), batch_size=8), loss


def own_autograd_function() -> Setup:
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            s = torch.sigmoid(x)
            return gradient * (s * (1 + x * (1 - s)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(20, 64), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Swish.apply(self.first(x)))

    return Net(), _table(), nn.CrossEntropyLoss()


def vector_quantised() -> Setup:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(20, 16), nn.Linear(16, 20)
            self.codes = nn.Embedding(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            z = self.encoder(x)
            code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
            loss = functional.mse_loss(code, z.detach())
            loss = loss + 0.25 * functional.mse_loss(z, code.detach())
            return functional.mse_loss(self.decoder(z + (code - z).detach()), x) + loss

    return Quantised(), torch.randn(32, 20)


def averaged_copy() -> Setup:
    class Byol(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = _mlp()
            self.average = copy.deepcopy(self.online).requires_grad_(False)

        @torch.no_grad()
        def update(self) -> None:
            pairs = zip(self.average.parameters(), self.online.parameters(), strict=True)
            for average, parameter in pairs:
                average.mul_(0.99).add_(parameter.detach(), alpha=0.01)

        def forward(self, x: Tensor) -> Tensor:
            self.update()
            with torch.no_grad():
                target = self.average(x)
            return functional.mse_loss(self.online(x), target)

    return Byol(), torch.randn(32, 20)


def inner_gradient() -> Setup:
    class Maml(_Body):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            def loss(parameters: dict[str, Tensor], rows: slice) -> Tensor:
                output = torch.func.functional_call(self.body, parameters, (x[rows],))
                return functional.cross_entropy(output, y[rows])

            parameters = dict(self.body.named_parameters())
            gradients = torch.func.grad(loss)(parameters, slice(0, 16))
            moved = {name: each - 0.1 * gradients[name] for name, each in parameters.items()}
            return loss(moved, slice(16, None))

    return Maml(), _table()


def gradient_penalty() -> Setup:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_(True)
            score = self.layers(x).sum()
            (gradient,) = torch.autograd.grad(score, x, create_graph=True)
            return ((gradient.norm(2, 1) - 1) ** 2).mean() + score

    return Critic(), torch.randn(32, 20)


def tied_weights() -> Setup:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(100, 32)
            self.layers = nn.LSTM(32, 32, batch_first=True)
            self.head = nn.Linear(32, 100, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.layers(self.words(ids))[0]).flatten(0, 1)

    ids = torch.randint(100, (8, 17))
    return Tied(), (ids[:, :-1], ids[:, 1:].flatten()), nn.CrossEntropyLoss()


def fake_quantised() -> Setup:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(100, 16), nn.Linear(16, 10)

        def forward(self, ids: Tensor) -> Tensor:
            weight = torch.fake_quantize_per_tensor_affine(self.words.weight, 0.1, 0, -128, 127)
            return self.head(functional.embedding(ids, weight).mean(1))

    return Quantised(), (torch.randint(100, (8, 12)), torch.randint(10, (8,))), nn.NLLLoss()


def translation() -> Setup:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(50, 32), nn.Embedding(50, 32)
            self.layers = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
            self.head = nn.Linear(32, 50)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            padding = source == 0
            output = self.layers(
                self.source(source),
                self.target(target),
                tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1]),
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
                tgt_is_causal=True,
            )
            return self.head(output).transpose(1, 2)

    texts = torch.randint(50, (4, 11)), torch.randint(50, (4, 9))
    return Translator(), (texts, torch.randint(50, (4, 9))), nn.CrossEntropyLoss(ignore_index=0)


def denoising_step() -> Setup:
    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.times = nn.Embedding(1000, 16)
            self.first = nn.Conv2d(3, 16, 3, padding=1)
            self.down, self.up = nn.Conv2d(16, 32, 3, 2, 1), nn.ConvTranspose2d(32, 16, 2, 2)
            self.last = nn.Conv2d(32, 3, 3, padding=1)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            left = functional.silu(self.first(x) + self.times(t)[:, :, None, None])
            right = functional.silu(self.up(functional.silu(self.down(left))))
            return self.last(torch.cat([left, right], 1))

    kept = torch.linspace(0.99, 0.01, 1000)

    def step(model: nn.Module, images: Tensor) -> Tensor:
        t = torch.randint(0, 1000, (images.shape[0],), device=images.device)
        noise = torch.randn_like(images)
        share = kept.to(images.device)[t][:, None, None, None]
        noisy = share.sqrt() * images + (1 - share).sqrt() * noise
        return functional.mse_loss(model(noisy, t), noise)

    return Unet(), torch.randn(4, 3, 32, 32), step


def two_towers() -> Setup:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.document = _mlp(), _mlp()
            self.scale = nn.Parameter(torch.tensor(2.6))

        def forward(self, query: Tensor, document: Tensor) -> Tensor:
            queries = functional.normalize(self.query(query), dim=-1)
            documents = functional.normalize(self.document(document), dim=-1)
            return queries @ documents.T * self.scale.exp()

    def loss(logits: Tensor) -> Tensor:
        labels = torch.arange(logits.shape[0], device=logits.device)
        return functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)

    return Towers(), (torch.randn(16, 20), torch.randn(16, 20)), loss


def proximal_policy() -> Setup:
    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = (
                nn.Linear(20, 64),
                nn.Linear(64, 4),
                nn.Linear(64, 1),
            )

        def forward(self, seen: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
            hidden = self.body(seen).tanh()
            actions = torch.distributions.Categorical(logits=self.actor(hidden))
            return actions, self.critic(hidden).squeeze(-1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        actions, value = model(batch["seen"])
        ratio = (actions.log_prob(batch["done"]) - batch["log_p"]).exp()
        gain = torch.min(ratio * batch["gain"], ratio.clamp(0.8, 1.2) * batch["gain"]).mean()
        return functional.mse_loss(value, batch["returns"]) - gain - 0.01 * actions.entropy().mean()

    batch = {name: torch.randn(64) for name in ("gain", "returns", "log_p")}
    batch |= {"seen": torch.randn(64, 20), "done": torch.randint(4, (64,))}
    return ActorCritic(), batch, loss


def gaussian_policy() -> Setup:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.scale = nn.Linear(20, 4), nn.Linear(20, 4)
            self.value = nn.Linear(24, 1)

        def forward(self, seen: Tensor) -> Tensor:
            law = torch.distributions.Normal(self.mean(seen), self.scale(seen).exp())
            action = law.rsample().tanh()
            value = self.value(torch.cat([seen, action], -1)).squeeze(-1)
            return (0.2 * law.log_prob(action).sum(-1) - value).mean()

    return Policy(), torch.randn(32, 20)


def routed_experts() -> Setup:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.head = nn.Linear(20, 4), nn.Linear(20, 10)
            self.experts = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(x).softmax(-1).topk(2)
            output = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                token, place = torch.where(chosen == index)
                output[token] += weights[token, place, None] * expert(x[token])
            return self.head(output)

    return Routed(), _table(), nn.CrossEntropyLoss()


def mixed_samples() -> Setup:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        share = torch.distributions.Beta(0.2, 0.2).sample()
        other = targets[torch.randperm(output.shape[0])]
        first = functional.cross_entropy(output, targets)
        return share * first + (1 - share) * functional.cross_entropy(output, other)

    return _mlp(), _table(), loss


def compiled_blocks() -> Setup:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
            self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Stack()
    for layer in model.layers:
        layer.compile()
    return model, torch.randn(8, 16, 32)


def accelerate_prepared() -> Setup:
    from accelerate import Accelerator

    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(*_table(64)), 16)
    model, optimizer, loader = Accelerator(cpu=True).prepare(model, optimizer, loader)
    return model, loader, nn.CrossEntropyLoss()


def _trainer() -> Any:
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Doubled(Trainer):
        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_more: Any
        ) -> Any:
            output = model(**inputs)
            return (output.loss * 2, output) if return_outputs else output.loss * 2

    words = [torch.randint(500, (16,)) for _ in range(16)]
    return Doubled(
        model=GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500)),
        args=TrainingArguments(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=4,
            report_to=[],
            dataloader_pin_memory=False,
        ),
        train_dataset=[{"input_ids": each, "labels": each} for each in words],
    )


def transformers_trainer() -> Setup:
    trainer = _trainer()
    return trainer.model, trainer.get_train_dataloader(), trainer.compute_loss


# What cannot be answered as it is.
def only_a_trainer() -> Any:
    return _trainer()


def loss_class() -> Setup:
    return _mlp(), _table(), nn.CrossEntropyLoss


def step_with_backward() -> Setup:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    return _mlp(), _table(), step


def step_that_logs() -> Setup:
    logged = []

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        logged.append(loss.item())
        return loss

    return _mlp(), _table(), step

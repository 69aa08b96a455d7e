"""Steps that train by themselves: optimizers that Lightning configures, and those of GANs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from estimator.api import OpGraph, estimate, trace_model
from estimator.errors import TraceError, WorkloadError
from estimator.graph.costs.call_costs import step_flops
from estimator.graph.memory.sizes import optimizer_memory
from estimator.graph.trace.own_steps import RECORDED
from estimator.timeline.rank.updates import Trained
from tests.synthetic import Machine

PROFILE = Machine(devices=2).profile()
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
StepLR = torch.optim.lr_scheduler.StepLR


class Module(nn.Module):
    """A module in the shape of Lightning's, with a trunk of 12 numbers and a head of 6."""

    def __init__(self, configure: Callable[[Any], Any]) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)
        self._configure = configure

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.head(self.trunk(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def log(self, _name: str, _value: Tensor) -> None:
        raise RuntimeError("no trainer")

    def configure_optimizers(self) -> Any:
        return self._configure(self)


def traced(configure: Callable[[Any], Any], **options: Any) -> OpGraph:
    return trace_model(Module(configure), torch.randn(8, 4), **options)


def updated(graph: OpGraph) -> dict[str, tuple[str, int]]:
    return {p.name: (p.optimizer or graph.optimizer, p.updates) for p in graph.parameters}


def state_bytes(graph: OpGraph) -> int:
    return optimizer_memory(graph).state_bytes


def adam_with_schedule(module: nn.Module) -> Any:
    optimizer = Adam(module.parameters())
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1)}}


@pytest.mark.parametrize(
    ("configure", "expected", "states"),
    [
        (lambda m: SGD(m.parameters(), lr=0.1), "sgd", 0),
        (lambda m: [SGD(m.parameters(), lr=0.1, momentum=0.9)], "sgd-momentum", 1),
        (lambda m: ([Adam(m.parameters())], [{"scheduler": None}]), "adam", 2),
        (lambda m: ([Adam(m.parameters())], []), "adam", 2),
        (adam_with_schedule, "adam", 2),
        (lambda m: (adam_with_schedule(m),), "adam", 2),
        (lambda m: Adam(m.parameters(), 1 / m.trainer.estimated_stepping_batches), "adam", 2),
    ],
    ids=["one", "list", "two lists", "no schedule", "mapping", "mappings", "of the trainer"],
)
def test_what_configure_optimizers_gives_updates_the_parameters(
    configure: Callable[[Any], Any], expected: str, states: int
) -> None:
    graph = traced(configure)
    assert graph.optimizer == expected
    assert updated(graph) == {"trunk.weight": (expected, 1), "head.weight": (expected, 1)}
    # 12 + 6 fp32 numbers.
    assert state_bytes(graph) == states * 18 * 4
    assert not any("configure_optimizers" in each for each in graph.assumptions)


def test_an_optimizer_that_is_asked_for_goes_before_what_is_configured() -> None:
    graph = traced(lambda m: SGD(m.head.parameters(), lr=0.1), optimizer="adamw")
    assert updated(graph) == {"trunk.weight": ("adamw", 1), "head.weight": ("adamw", 1)}


def test_what_no_optimizer_was_given_is_not_updated() -> None:
    graph = traced(lambda m: AdamW(m.head.parameters()))
    assert updated(graph) == {"trunk.weight": ("adamw", 0), "head.weight": ("adamw", 1)}
    assert state_bytes(graph) == 2 * 6 * 4
    assert [(name, part.elements) for name, part in Trained.of(graph.at()).parts] == [("adamw", 6)]


def test_several_optimizers_cost_the_sum_of_what_they_update() -> None:
    both = traced(lambda m: [AdamW(m.trunk.parameters()), SGD(m.head.parameters(), lr=0.1)])
    assert updated(both) == {"trunk.weight": ("adamw", 1), "head.weight": ("sgd", 1)}
    assert state_bytes(both) == 2 * 12 * 4
    parts = Trained.of(both.at()).parts
    assert {(name, part.tensors, part.elements) for name, part in parts} == {
        ("adamw", 1, 12),
        ("sgd", 1, 6),
    }
    update_s = estimate(both, "1x1:m", profile=PROFILE).breakdown.update_s
    (one, none) = (
        estimate(traced(configure), "1x1:m", profile=PROFILE).breakdown.update_s
        for configure in (
            lambda m: AdamW(m.trunk.parameters()),
            lambda m: SGD(m.head.parameters(), lr=0.1),
        )
    )
    assert update_s == pytest.approx(one + none)


@pytest.mark.parametrize(
    ("configure", "said"),
    [
        (lambda m: torch.optim.RMSprop(m.parameters()), "nothing is known of 'RMSprop', taken as"),
        (
            lambda m: m.missing,
            r"configure_optimizers\(\) raised AttributeError: .*: taken as adamw",
        ),
        (lambda m: None, r"configure_optimizers\(\) gave NoneType, in which no optimizer was"),
    ],
)
def test_optimizers_that_cannot_be_read_are_listed_as_assumptions(
    configure: Callable[[Any], Any], said: str
) -> None:
    graph = traced(configure)
    assert updated(graph) == {"trunk.weight": ("adamw", 1), "head.weight": ("adamw", 1)}
    with pytest.raises(AssertionError, match=said):
        raise AssertionError("\n".join(graph.assumptions))


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
    )


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(16, 16, 4, 1, 0, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def dcgan(batch: int = 8, *, critic_steps: int = 1) -> tuple[Any, Any, Any]:
    """The loop of PyTorch's tutorial on DCGAN (dcgan_faces_tutorial.py), on smaller images."""
    netG, netD = generator(), discriminator()
    criterion = nn.BCELoss()
    optimizerD = Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def step(models: Any, data: Any) -> None:
        netG, netD = models
        real = data[0]
        size = real.size(0)
        for _ in range(critic_steps):
            netD.zero_grad()
            label = torch.full((size,), 1.0, dtype=torch.float)
            output = netD(real).view(-1)
            errD_real = criterion(output, label)
            errD_real.backward()
            output.mean().item()
            fake = netG(torch.randn(size, 16, 1, 1))
            label.fill_(0.0)
            output = netD(fake.detach()).view(-1)
            errD_fake = criterion(output, label)
            errD_fake.backward()
            (errD_real + errD_fake).item()
            optimizerD.step()
        optimizerG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake).view(-1), label)
        errG.backward()
        optimizerG.step()

    return [netG, netD], (torch.randn(batch, 3, 16, 16), torch.zeros(batch)), step


def counted_flops(step: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def test_a_gan_that_trains_by_itself_is_traced_as_its_tutorial_writes_it() -> None:
    models, batch, step = dcgan()
    before = [copy.deepcopy(model.state_dict()) for model in models]
    graph = trace_model(models, batch, loss=step)
    for model, state in zip(models, before, strict=True):
        torch.testing.assert_close(model.state_dict(), state)
    assert step_flops(graph.at()).model == counted_flops(lambda: step(models, batch))
    assert (graph.batch, graph.other_batch) == (8, 16)
    assert graph.parameter_count == sum(p.numel() for m in models for p in m.parameters())
    assert set(updated(graph).values()) == {("adam", 1)}
    assert state_bytes(graph) == 2 * graph.parameter_bytes
    assert graph.unknown_ops == ()
    assert RECORDED in graph.assumptions
    # The discriminator's gradients are complete when its optimizer steps, before the generator's
    # backward pass adds to them.
    ready = {p.name.split(".")[1]: p.ready_after for p in graph.parameters}
    passes = [i for i, op in enumerate(graph.ops) if op.call.target == "aten.ones_like.default"]
    assert len(passes) == 3
    assert passes[1] < ready["1"] < passes[2] < ready["0"]
    asked = trace_model(models, batch, loss=step, optimizer="adamw")
    assert set(updated(asked).values()) == {("adamw", 1)}
    assert estimate(asked, "1x2:m", profile=PROFILE).step_time_s > 0


def test_several_updates_in_a_step_cost_as_often() -> None:
    models, batch, step = dcgan(critic_steps=3)
    graph = trace_model(models, batch, loss=step)
    assert step_flops(graph.at()).model == counted_flops(lambda: step(models, batch))
    counts = {p.name.split(".")[1]: p.updates for p in graph.parameters}
    assert counts == {"0": 1, "1": 3}
    ((name, part),) = Trained.of(graph.at()).parts
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert (name, part.elements) == ("adam", sizes[0] + 3 * sizes[1])
    assert state_bytes(graph) == 2 * graph.parameter_bytes


class Gan(nn.Module):
    """Lightning's example in manual optimization (basic_gan), without Lightning."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64))
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, z: Tensor) -> Tensor:
        found: Tensor = self.generator(z)
        return found

    def loss(self, scores: Tensor, wanted: float) -> Tensor:
        target = torch.full_like(scores, wanted)
        return functional.binary_cross_entropy_with_logits(scores, target)

    def training_step(self, batch: Any) -> None:
        images, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(images.shape[0], 16).type_as(images)
        self.toggle_optimizer(optimizer_g)
        self.generated = self(z)
        self.logger.experiment.add_image("images", self.generated[:6], self.current_epoch)
        g_loss = self.loss(self.discriminator(self(z)), 1.0)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        real = self.loss(self.discriminator(images), 1.0)
        fake = self.loss(self.discriminator(self(z).detach()), 0.0)
        d_loss = (real + fake) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self) -> Any:
        return [Adam(self.generator.parameters()), Adam(self.discriminator.parameters())], []


def test_a_gan_in_manual_optimization_is_traced_without_its_trainer() -> None:
    model, size = Gan(), 8
    before = dict(vars(model))
    graph = trace_model(model, (torch.randn(size, 64), torch.zeros(size)))
    assert vars(model) == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    # Multiply-adds of the layers of both, for each sample.
    g_first, g_last, d_first, d_last = 16 * 32, 32 * 64, 64 * 32, 32
    forward = 3 * (g_first + g_last) + 3 * (d_first + d_last)
    # Toggled, the generator's pass leaves out the weights of the discriminator, and the other the
    # generator; no layer needs the gradient of the batch or of what was detached.
    backward_g = d_last + d_first + 2 * g_last + g_first
    backward_d = 2 * (2 * d_last + d_first)
    expected = 2 * size * (forward + backward_g + backward_d)
    assert step_flops(graph.at()).model == expected
    assert set(updated(graph).values()) == {("adam", 1)}
    assert state_bytes(graph) == 2 * graph.parameter_bytes
    assert RECORDED in graph.assumptions
    with pytest.raises(WorkloadError, match="cannot make 2 stages"):
        estimate(graph, "1x2:m", profile=PROFILE, layout="pp=2")


def test_gradients_without_an_optimizers_step_are_updated_once() -> None:
    def step(model: nn.Module, batch: Tensor) -> None:
        model(batch).mean().backward()

    graph = trace_model(nn.Linear(4, 3), torch.randn(8, 4), loss=step)
    assert updated(graph) == {"weight": ("adamw", 1), "bias": ("adamw", 1)}
    assert any("calls no optimizer's step()" in each for each in graph.assumptions)


def test_a_closure_runs_as_often_as_its_optimizer_calls_it() -> None:
    model, calls = nn.Linear(4, 3), []
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(net: nn.Module, batch: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(batch).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            calls.append(loss)
            return loss

        optimizer.step(closure)

    graph = trace_model(model, torch.randn(8, 4), loss=step)
    # One for each of two batch sizes.
    assert len(calls) == 2
    assert set(updated(graph).values()) == {("sgd", 1)}
    assert [
        each is own
        for each, own in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
    ] == [True, True]


def test_nothing_of_torch_stays_replaced_after_a_step_that_fails() -> None:
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    before = Tensor.backward, torch.autograd.backward, torch.optim.Optimizer.zero_grad

    def step(net: nn.Module, batch: Tensor) -> None:
        def closure() -> Tensor:
            raise OSError("no such shard")

        optimizer.step(closure)

    with pytest.raises(TraceError, match="no such shard"):
        trace_model(model, torch.randn(8, 4), loss=step)
    assert before == (Tensor.backward, torch.autograd.backward, torch.optim.Optimizer.zero_grad)
    assert len(optimizer.param_groups[0]["params"]) == 2

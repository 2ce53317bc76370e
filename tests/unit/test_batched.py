"""Many clients' gradients in one pass are those of one pass each; and rows conditioned together those of one each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from common.aggregation.conditioned_rows import condition_rows
from common.aggregation.step import condition_row, grid_of, largest_square
from common.config import Model
from common.learning.batched import SAMPLES_AT_ONCE, BatchedGradients, batched_gradients
from common.learning.datasets import Dataset, Split, to_tensor
from common.learning.gradient import FlatModel
from common.learning.models import MODELS, build_model
from common.learning.resident import ResidentSplit

SHAPE = (1, 28, 28)
WITHIN = 1e-6
"""What is promised of the entries; on the CPUs seen so far they are the same."""


def a_model(name: str) -> FlatModel:
    return FlatModel(build_model(Model(name=name), SHAPE, 10, 7))


def batches(sizes: list[int], shape: tuple[int, int, int] = SHAPE) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(sum(sizes), *shape, generator=generator),
        torch.randint(0, 10, (sum(sizes),), generator=generator),
    )


def one_by_one(model: FlatModel, x: torch.Tensor, y: torch.Tensor, sizes: list[int], l2: float = 0.0) -> torch.Tensor:
    parts = zip(x.split(sizes), y.split(sizes), strict=True)
    return torch.stack([model.gradient(*part, l2).clone() for part in parts])


@pytest.mark.parametrize("sizes", [[5, 5, 5], [1, 7, 3]], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", MODELS)
def test_every_clients_gradient_is_its_own(name: str, sizes: list[int]) -> None:
    model = a_model(name)
    batched = batched_gradients(model, SHAPE)
    assert batched is not None
    x, y = batches(sizes)
    out = torch.full((len(sizes), model.num_parameters), 9.0)
    assert batched(x, y, sizes, out, 0.01) is out
    np.testing.assert_allclose(out, one_by_one(model, x, y, sizes, 0.01), rtol=0, atol=WITHIN)
    assert len({float(row.norm()) for row in out}) == len(sizes)


def test_the_parameters_are_those_it_was_given_and_the_model_is_left_alone() -> None:
    model = a_model("mlp")
    theta = model.parameters_flat().clone()
    batched = batched_gradients(model, SHAPE)
    assert batched is not None
    batched.model.set_parameters(2 * theta)
    x, y = batches([4, 4])
    got = batched(x, y, [4, 4], torch.empty((2, model.num_parameters)))
    assert torch.equal(model.parameters_flat(), theta)
    assert all(parameter.requires_grad for parameter in model.parameters)
    model.set_parameters(2 * theta)
    np.testing.assert_allclose(got, one_by_one(model, x, y, [4, 4]), rtol=0, atol=WITHIN)


def test_more_samples_than_go_through_at_once_make_no_difference() -> None:
    model = a_model("logistic")
    batched = batched_gradients(model, SHAPE)
    assert batched is not None
    sizes = [SAMPLES_AT_ONCE - 1, 2, SAMPLES_AT_ONCE + 3, 1]
    x, y = batches(sizes)
    got = batched(x, y, sizes, torch.empty((4, model.num_parameters)))
    np.testing.assert_allclose(got, one_by_one(model, x, y, sizes), rtol=0, atol=WITHIN)


class Twice(nn.Module):
    """Calls a layer twice, has one that nothing uses, one that is not trained, and one without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(784, 12, bias=False), nn.Linear(12, 12)
        self.unused, self.last = nn.Linear(3, 3), nn.Linear(12, 10)
        self.still = nn.Linear(12, 12)
        self.still.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.still(torch.tanh(self.first(x.flatten(1))))
        return self.last(torch.tanh(self.again(torch.tanh(self.again(hidden)))))


def test_layers_called_twice_never_or_untrained_are_counted_as_they_are() -> None:
    torch.manual_seed(3)
    model = FlatModel(Twice())
    batched = batched_gradients(model, SHAPE)
    assert batched is not None
    x, y = batches([3, 6])
    got = batched(x, y, [3, 6], torch.full((2, model.num_parameters), 9.0))
    np.testing.assert_allclose(got, one_by_one(model, x, y, [3, 6]), rtol=0, atol=WITHIN)


class Centred(nn.Module):
    """Subtracts the mean of the batch: a client's gradient depends on the others' samples when they share a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(784, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only((x - x.mean(0)).flatten(1))


class Functional(nn.Module):
    """Uses a layer's weight behind its back."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(784, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x.flatten(1)) + nn.functional.linear(x.flatten(1), self.only.weight)


@pytest.mark.parametrize(
    "module",
    [
        Centred(),
        Functional(),
        nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.Dropout(0.2)),
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784, affine=False), nn.Linear(784, 10)),
        nn.Sequential(nn.Flatten(), nn.LayerNorm(784), nn.Linear(784, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten(), nn.Linear(2 * 784, 10)),
    ],
    ids=["mixes samples", "weight elsewhere", "dropout", "batch norm", "layer norm", "string padding"],
)
def test_a_model_for_which_it_would_be_wrong_is_turned_down(module: nn.Module) -> None:
    before = torch.default_generator.get_state()
    assert batched_gradients(FlatModel(module), SHAPE) is None
    assert torch.equal(torch.default_generator.get_state(), before)


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_the_way_of_a_gpu_gives_the_same_on_a_cpu(name: str, monkeypatch) -> None:
    """All clients' products at once; written for a device that this machine may not have."""
    model = a_model(name)
    batched = BatchedGradients(model)
    x, y = batches([4, 4, 4])
    plain = batched(x, y, [4, 4, 4], torch.empty((3, model.num_parameters)))
    monkeypatch.setattr(batched, "_all_products_at_once", True)
    monkeypatch.setattr("common.learning.batched._by_itself", None)
    got = batched(x, y, [4, 4, 4], torch.empty((3, model.num_parameters)))
    np.testing.assert_allclose(got, plain, rtol=0, atol=WITHIN)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("sizes", [[5, 5, 5], [1, 7, 3]], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", MODELS)
def test_on_cuda_they_agree_with_a_cpus(name: str, sizes: list[int]) -> None:
    model = a_model(name)
    batched = batched_gradients(model, SHAPE, "cuda")
    assert batched is not None
    x, y = batches(sizes)
    out = torch.empty((len(sizes), model.num_parameters), device="cuda")
    got = batched(x.cuda(), y.cuda(), sizes, out)
    np.testing.assert_allclose(got.cpu(), one_by_one(model, x, y, sizes), rtol=0, atol=1e-4)


@pytest.mark.parametrize("channels_last", [False, True])
def test_samples_that_live_on_a_device_are_the_same_batch(channels_last: bool) -> None:
    random = np.random.default_rng(0)
    shape = (9, 5, 6, 3) if channels_last else (9, 5, 6)
    images, labels = random.integers(0, 256, shape, dtype=np.uint8), random.integers(0, 4, 9)
    channels = 3 if channels_last else 1
    split = Split(images, labels)
    dataset = Dataset("drawn", split, split, 4, mean=(0.3,) * channels, std=(0.2,) * channels)
    chosen = np.array([7, 0, 7, 3])
    x, y = ResidentSplit(split, dataset, torch.device("cpu")).take(chosen)
    expected_x, expected_y = to_tensor(split, chosen, dataset)
    assert torch.equal(x, expected_x)
    assert torch.equal(y, expected_y)


def hard_rows(clip_norm: float) -> torch.Tensor:
    random = torch.Generator().manual_seed(2)
    rows = torch.randn((400, 37), generator=random) * torch.logspace(-9, 12, 400)[:, None] * clip_norm
    rows[:4] = 0.0
    rows[5, 3], rows[6, 0], rows[7, 36] = torch.nan, torch.inf, -torch.inf
    rows[8], rows[9] = 3e38, 1e-42
    rows[10:200] *= clip_norm / rows[10:200].norm(dim=1, keepdim=True)  # at the surface
    return rows


@pytest.mark.parametrize("clip_norm", [1.0, 0.7, 1e-7, 3e8])
def test_rows_conditioned_together_are_in_the_ball_and_on_the_grid(clip_norm: float) -> None:
    rows, alone = hard_rows(clip_norm), hard_rows(clip_norm)
    finite = condition_rows(rows, clip_norm)
    expected = [condition_row(row, clip_norm) for row in alone]
    assert finite.tolist() == expected
    grid = grid_of(clip_norm)
    steps = rows.double() / grid
    assert torch.equal(steps, steps.round())
    assert bool((steps.square().sum(1) <= largest_square(clip_norm, grid)).all())
    assert float((rows.double() - alone.double()).abs().max()) <= grid  # a norm's last bit moves a step at most
    assert float((rows != alone).float().mean()) < 0.01
    again = rows.clone()
    condition_rows(again, clip_norm)
    assert torch.equal(again, rows)


def test_rows_without_a_ball_are_only_checked() -> None:
    rows = hard_rows(1.0)
    before = rows.clone()
    finite = condition_rows(rows)
    assert (~finite).nonzero().flatten().tolist() == [5, 6, 7]
    assert torch.equal(rows[finite], before[finite])
    assert not rows[5:8].any()

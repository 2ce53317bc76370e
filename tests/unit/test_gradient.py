"""The flat model computes what plain autograd computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from common.config import Model
from common.errors import ModelError
from common.learning.datasets import Dataset, Split
from common.learning.gradient import FlatModel, accuracy
from common.learning.models import MODELS, build_model

SHAPE = (1, 28, 28)


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(20, *SHAPE, generator=generator), torch.randint(0, 10, (20,), generator=generator)


def plain_gradient(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    module.zero_grad()
    functional.cross_entropy(module(x), y).backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_plain_autograd(name: str, batch) -> None:
    expected = plain_gradient(build_model(Model(name=name), SHAPE, 10, 7), *batch)
    model = FlatModel(build_model(Model(name=name), SHAPE, 10, 7))
    assert torch.equal(model.gradient(*batch), expected)
    assert float(expected.norm()) > 0


def test_the_gradient_does_not_depend_on_what_was_computed_before(batch) -> None:
    model = FlatModel(build_model(Model(name="cnn"), SHAPE, 10, 7))
    first = model.gradient(*batch).clone()
    model.gradient(batch[0] * 3, batch[1])
    model.predict(batch[0])
    assert torch.equal(model.gradient(*batch), first)


def test_a_step_against_the_gradient_lowers_the_loss(batch) -> None:
    model = FlatModel(build_model(Model(name="cnn"), SHAPE, 10, 7))
    before = functional.cross_entropy(model.predict(batch[0]), batch[1])
    model.set_parameters(model.parameters_flat() - 0.05 * model.gradient(*batch))
    assert functional.cross_entropy(model.predict(batch[0]), batch[1]) < before - 1e-3


def test_l2_adds_lambda_theta(batch) -> None:
    model = FlatModel(build_model(Model(name="mlp"), SHAPE, 10, 7))
    without = model.gradient(*batch).clone()
    with_l2 = model.gradient(*batch, l2=0.1)
    assert torch.allclose(with_l2, without + 0.1 * model.parameters_flat(), atol=1e-7)


@pytest.mark.parametrize("kind", ["tensor", "array", "read-only array"])
def test_set_parameters_reaches_every_layer(kind: str, batch) -> None:
    model, source = (FlatModel(build_model(Model(name="cnn"), SHAPE, 10, seed)) for seed in (1, 2))
    theta = source.parameters_flat().clone()
    given = theta if kind == "tensor" else theta.numpy()
    if kind == "read-only array":
        given.flags.writeable = False
    model.set_parameters(given)
    assert torch.equal(model.predict(batch[0]), source.predict(batch[0]))
    for mine, theirs in zip(model.module.parameters(), source.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("theta", [np.zeros(26_009, np.float32), np.zeros(26_010), torch.zeros(26_010, 1)])
def test_parameters_of_another_shape_or_type_are_refused(theta) -> None:
    with pytest.raises(ModelError, match=r"expected float32 \(26010,\)"):
        FlatModel(build_model(Model(name="cnn"), SHAPE, 10, 0)).set_parameters(theta)


def test_the_state_dict_of_theta_loads_into_a_fresh_model(batch) -> None:
    model = FlatModel(build_model(Model(name="cnn"), SHAPE, 10, 1))
    theta = torch.randn(model.num_parameters, generator=torch.Generator().manual_seed(3))
    fresh = build_model(Model(name="cnn"), SHAPE, 10, 2)
    fresh.load_state_dict(model.state_dict_from(theta))
    assert torch.equal(torch.cat([p.detach().flatten() for p in fresh.parameters()]), theta)
    assert not torch.equal(model.parameters_flat(), theta)  # the model itself is left alone


def test_the_schema_names_the_parameters_in_the_order_of_the_vector() -> None:
    model = FlatModel(build_model(Model(name="cnn"), SHAPE, 10, 1))
    schema = model.schema()
    assert sum(int(np.prod(shape)) for _, shape in schema) == model.num_parameters == 26_010
    assert [name for name, _ in schema] == [name for name, _ in model.module.named_parameters()]


def test_the_schema_hash_tells_models_apart_but_not_their_parameters() -> None:
    def hash_of(name: str, seed: int, classes: int = 10) -> bytes:
        return FlatModel(build_model(Model(name=name), SHAPE, classes, seed)).schema_hash()

    assert len(hash_of("cnn", 1)) == 32
    assert hash_of("cnn", 1) == hash_of("cnn", 2)
    assert len({hash_of("cnn", 1), hash_of("lenet", 1), hash_of("cnn", 1, classes=9)}) == 3


def normalised() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def test_the_schema_hash_covers_constants_that_do_not_travel() -> None:
    first, second = normalised(), normalised()
    assert FlatModel(first).schema_hash() == FlatModel(second).schema_hash()
    third = normalised()
    third[2].running_mean.add_(1)
    assert FlatModel(third).schema_hash() != FlatModel(second).schema_hash()
    fourth = normalised()
    fourth[1].requires_grad_(False)
    assert FlatModel(fourth).num_parameters == FlatModel(first).num_parameters - 785 * 8


def test_frozen_buffers_stay_as_they_are_in_training(batch) -> None:
    thawed, frozen = FlatModel(normalised()), FlatModel(normalised(), frozen_buffers=True)
    for model in (thawed, frozen):
        model.gradient(*batch)
        model.predict(batch[0])
        model.gradient(*batch)
    assert not torch.equal(thawed.module[2].running_mean, torch.zeros(8))
    assert torch.equal(frozen.module[2].running_mean, torch.zeros(8))


def test_dropout_draws_from_the_given_seed_and_not_from_the_global_generator(batch) -> None:
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10)))
    state = torch.get_rng_state()
    first = model.gradient(*batch, seed=1).clone()
    assert torch.equal(model.gradient(*batch, seed=1), first)
    assert not torch.equal(model.gradient(*batch, seed=2), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_parameter_the_loss_does_not_use_has_gradient_zero(batch) -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(784, 10), nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x.flatten(1))

    gradient = FlatModel(Spare()).gradient(*batch)
    assert torch.count_nonzero(gradient[-9:]) == 0
    assert torch.count_nonzero(gradient[:-9]) > 0


def test_tied_weights_travel_once_and_are_saved_under_each_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

    model = FlatModel(Tied())
    assert model.num_parameters == 16 + 4 + 4
    state = model.state_dict_from(torch.arange(24.0))
    assert torch.equal(state["a.weight"], torch.arange(16.0).view(4, 4))
    assert torch.equal(state["b.weight"], state["a.weight"])
    assert torch.equal(state["b.bias"], torch.arange(20.0, 24.0))


def test_only_float32_parameters_travel() -> None:
    with pytest.raises(ModelError, match=r"weight is torch\.float64"):
        FlatModel(nn.Linear(2, 2).double())
    with pytest.raises(ModelError, match="no parameter to train"):
        FlatModel(nn.Flatten())


@pytest.fixture
def sorted_set() -> Dataset:
    """400 samples, the class in the first feature, the last 100 of another class than the first 300."""
    labels = np.repeat([0, 1], [300, 100]).astype(np.int64)
    split = Split(np.eye(2, dtype=np.float32)[labels], labels)
    return Dataset("sorted", split, split, num_classes=2)


def constant_model() -> FlatModel:
    """Says class 0, with logits (1, 0)."""
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(2, 2)))
    model.set_parameters(np.array([0, 0, 0, 0, 1, 0], dtype=np.float32))
    return model


@pytest.mark.parametrize("batch_size", [1, 7, 500])
def test_accuracy_and_loss_are_those_of_all_samples_whatever_the_batch(sorted_set: Dataset, batch_size: int) -> None:
    score, loss = accuracy(constant_model(), sorted_set.test, sorted_set, batch=batch_size)
    assert score == 0.75
    assert loss == pytest.approx(np.log1p(np.e) - 0.75, rel=1e-6)


def test_fewer_images_are_taken_from_the_whole_test_set(sorted_set: Dataset) -> None:
    score, _ = accuracy(constant_model(), sorted_set.test, sorted_set, images=40)
    assert score == 0.75  # the first 40 alone would give 1.0

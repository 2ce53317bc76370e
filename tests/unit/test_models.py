"""The models are the papers', start where the seed says, and refuse what cannot be trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from common.config import Model
from common.errors import ConfigError, ModelError
from common.learning.gradient import FlatModel
from common.learning.models import MODELS, build_model, check_trainable, updated_buffers

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)


def vector(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("cnn", MNIST, 26_010),
        ("lenet", MNIST, 41_282),
        ("lenet", CIFAR, 797_962),
        ("mlp", MNIST, 178_110),
        ("mlp", CIFAR, 656_810),
        ("cnn_large", MNIST, 431_080),
        ("logistic", MNIST, 7_850),
    ],
)
def test_the_parameter_counts_are_the_papers(name: str, shape: tuple[int, int, int], parameters: int) -> None:
    assert len(vector(build_model(Model(name=name), shape, 10, 0))) == parameters


@pytest.mark.parametrize("shape", [MNIST, CIFAR, (3, 64, 64)])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_logits_for_every_image_size(name: str, shape: tuple[int, int, int]) -> None:
    assert build_model(Model(name=name), shape, 7, 0)(torch.zeros(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "logistic"])
def test_the_start_is_a_function_of_the_seed_alone(name: str) -> None:
    first = vector(build_model(Model(name=name), MNIST, 10, 3))
    torch.rand(5)
    assert torch.equal(vector(build_model(Model(name=name), MNIST, 10, 3)), first)
    assert not torch.equal(vector(build_model(Model(name=name), MNIST, 10, 4)), first)


def test_building_leaves_the_global_generators_alone() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    module = build_model(Model(name="cnn"), MNIST, 10, 3)
    check_trainable(module, MNIST, private=True, frozen_buffers=False)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_logistic_regression_starts_at_zero() -> None:
    assert torch.count_nonzero(vector(build_model(Model(name="logistic"), MNIST, 10, 0))) == 0


def test_an_unknown_model_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError, match="did you mean 'lenet'"):
        build_model(Model(name="lenett"), MNIST, 10, 0)


def test_images_too_small_for_the_model_are_refused() -> None:
    with pytest.raises(ModelError, match=r"cnn cannot be built for inputs \(1, 4, 4\)"):
        build_model(Model(name="cnn"), (1, 4, 4), 10, 0)


@pytest.fixture
def own_models(tmp_path) -> list:
    (tmp_path / "byzuldp_test_nets.py").write_text(
        "from torch import nn\n"
        "def good(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes))\n"
        "def narrow(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], 3))\n"
        "def double(shape, classes): return good(shape, classes).double()\n"
        "def nothing(shape, classes): return None\n"
    )
    return [tmp_path]


def test_a_model_of_ones_own_is_found_beside_the_experiment(own_models) -> None:
    module = build_model(Model(name="byzuldp_test_nets:good"), MNIST, 10, 0, own_models)
    assert len(vector(module)) == 7850
    assert torch.equal(vector(build_model(Model(name="byzuldp_test_nets:good"), MNIST, 10, 0)), vector(module))


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("narrow", r"gives \(2, 3\) for a batch of 2, expected logits \(2, 10\)"),
        ("double", r"1\.weight is torch\.float64; only float32 travels"),
        ("nothing", "returned NoneType"),
    ],
)
def test_a_model_of_ones_own_that_does_not_fit_is_refused(own_models, name: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        build_model(Model(name=f"byzuldp_test_nets:{name}"), MNIST, 10, 0, own_models)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("byzuldp_test_nets:goood", "did you mean 'good'"),
        ("byzuldp_test_absent:x", "no module 'byzuldp_test_absent', neither installed nor in"),
        ("byzuldp_test_nets:", "expected module:name"),
        ("../nets:x", "expected module:name"),
    ],
)
def test_a_plugin_that_is_not_there_is_a_clear_error(own_models, spec: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build_model(Model(name=spec), MNIST, 10, 0, own_models)


def test_a_file_beside_the_experiment_cannot_shadow_an_installed_module(tmp_path) -> None:
    (tmp_path / "json.py").write_text("good = None\n")
    with pytest.raises(ConfigError, match="installed modules come first"):
        build_model(Model(name="json:good"), MNIST, 10, 0, [tmp_path])


def test_a_plugin_that_fails_on_import_says_how(tmp_path) -> None:
    (tmp_path / "byzuldp_test_broken.py").write_text("1 / 0\n")
    (tmp_path / "byzuldp_test_needy.py").write_text("import byzuldp_test_no_such\n")
    with pytest.raises(ConfigError, match="importing byzuldp_test_broken failed: ZeroDivisionError"):
        build_model(Model(name="byzuldp_test_broken:x"), MNIST, 10, 0, [tmp_path])
    with pytest.raises(ConfigError, match="needs 'byzuldp_test_no_such', which is not installed"):
        build_model(Model(name="byzuldp_test_needy:x"), MNIST, 10, 0, [tmp_path])


def test_training_can_start_from_a_saved_model(tmp_path) -> None:
    flat = FlatModel(build_model(Model(name="cnn"), MNIST, 10, 1))
    save_file(flat.state_dict_from(flat.parameters_flat()), tmp_path / "model.safetensors")
    again = build_model(Model(name="cnn", init_from=tmp_path / "model.safetensors"), MNIST, 10, 2)
    assert torch.equal(vector(again), flat.parameters_flat())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda state: state.pop("head.1.bias"), "head.1.bias is missing"),
        (lambda state: state.update(more=torch.zeros(1)), "more is unknown"),
        (lambda state: state.update({"head.1.bias": torch.zeros(9)}), r"head.1.bias is \(9,\), the model's is \(32,\)"),
        (lambda state: state["head.1.bias"].fill_(float("nan")), "head.1.bias has entries that are not finite"),
    ],
)
def test_a_saved_model_that_differs_is_refused_by_the_difference(tmp_path, change, complaint: str) -> None:
    state = {name: tensor.clone() for name, tensor in build_model(Model(name="cnn"), MNIST, 10, 1).state_dict().items()}
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=complaint):
        build_model(Model(name="cnn", init_from=tmp_path / "model.safetensors"), MNIST, 10, 2)


def test_a_saved_model_that_cannot_be_read_is_named(tmp_path) -> None:
    (tmp_path / "torn.safetensors").write_bytes(b"\0" * 9)
    for name in ("torn.safetensors", "absent.safetensors"):
        with pytest.raises(ModelError, match=rf"{name}' cannot be read"):
            build_model(Model(name="cnn", init_from=tmp_path / name), MNIST, 10, 2)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 26 * 26, 10))


def test_running_statistics_are_refused_under_privacy_with_the_remedy() -> None:
    with pytest.raises(ModelError, match=r"1\.running_mean.*GroupNorm.*model\.frozen_buffers = true"):
        check_trainable(with_batch_norm(), MNIST, private=True, frozen_buffers=False)


@pytest.mark.parametrize(("private", "frozen"), [(True, True), (False, False), (False, True)])
def test_running_statistics_are_allowed_when_frozen_or_without_privacy(private: bool, frozen: bool) -> None:
    check_trainable(with_batch_norm(), MNIST, private=private, frozen_buffers=frozen)


def test_looking_for_running_statistics_does_not_change_them() -> None:
    module = with_batch_norm()
    assert updated_buffers(module, MNIST) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert torch.equal(module[1].running_mean, torch.zeros(4))


def test_buffers_that_stay_constant_are_fine_under_privacy() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1))
            self.linear = nn.Linear(784, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.flatten(1) * self.scale)

    check_trainable(Scaled(), MNIST, private=True, frozen_buffers=False)


@pytest.mark.parametrize("name", MODELS)
def test_our_own_models_can_be_trained_privately(name: str) -> None:
    check_trainable(build_model(Model(name=name), MNIST, 10, 0), MNIST, private=True, frozen_buffers=False)

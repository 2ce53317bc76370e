"""The models that are trained. A new one is a function and its line in the registry.

=========  ==============================================================  =================  ====================
name       layers                                                          parameters, MNIST  parameters, CIFAR-10
=========  ==============================================================  =================  ====================
cnn        conv8 16, pool, conv4 32, pool, linear 32; tanh                 26,010             37,274
lenet      conv5, pool, conv5, pool, two linear; ReLU; wider for colour    41,282             797,962
mlp        linear 200, linear 100 (200 for colour); ReLU                   178,110            656,810
cnn_large  conv5 20, pool, conv5 50, pool, linear 500; ReLU                431,080            657,080
logistic   none; starts at zero; strongly convex with ``model.l2`` > 0     7,850              30,730
=========  ==============================================================  =================  ====================

``cnn`` is that of the ByzULDP paper (Table 5), ``lenet`` and ``mlp`` are Fed-NGA's (section 4), ``cnn_large`` is
CafCor's (appendix D) and ByzFL's, with the softmax in the loss.

All give logits (b, num_classes) for cross-entropy. The parameters are a function of the seed; torch's global
generators are left alone.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from common import config
from common.errors import ModelError, nearest
from common.plugins import is_plugin, load_plugin
from common.randomness import stream_key

__all__ = ["MODELS", "build_model", "check_trainable", "updated_buffers"]

Shape = tuple[int, int, int]
Builder = Callable[[Shape, int], nn.Module]


class _ChannelsLast(nn.Module):
    """Lets the convolutions after it run in the layout that is 1.8 times as fast for the paper's CNN on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last)  # .contiguous() would leave one channel as it is


def _with_head(
    features: list[nn.Module], widths: Sequence[int], activation: type[nn.Module], shape: Shape
) -> nn.Module:
    """Convolutions, then linear layers of the given widths, the activation between them."""
    body = nn.Sequential(OrderedDict((f"{index}", layer) for index, layer in enumerate(features)))
    with torch.no_grad():
        inputs = body(torch.zeros(1, *shape)).numel()
    return nn.Sequential(OrderedDict(features=body, head=_linear_layers([inputs, *widths], activation)))


def _linear_layers(widths: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def _cnn(shape: Shape, num_classes: int) -> nn.Module:
    """The ByzULDP paper's (Table 5): two convolutions, a linear layer of 32; tanh; 26,010 parameters on MNIST."""
    features = [
        _ChannelsLast(),
        *(nn.Conv2d(shape[0], 16, kernel_size=8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1)),
        *(nn.Conv2d(16, 32, kernel_size=4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1)),
    ]
    return _with_head(features, (32, num_classes), nn.Tanh, shape)


def _two_conv5(shape: Shape, first: int, second: int, widths: Sequence[int]) -> nn.Module:
    features = [
        _ChannelsLast(),
        *(nn.Conv2d(shape[0], first, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2)),
    ]
    return _with_head(features, widths, nn.ReLU, shape)


def _lenet(shape: Shape, num_classes: int) -> nn.Module:
    """Fed-NGA's (section 4): two convolutions, two linear layers; ReLU; 41,282 parameters on MNIST."""
    if shape[0] == 1:
        return _two_conv5(shape, 6, 16, (120, 60, num_classes))
    return _two_conv5(shape, 64, 64, (384, 192, num_classes))


def _cnn_large(shape: Shape, num_classes: int) -> nn.Module:
    """CafCor's (appendix D) and ByzFL's: two convolutions, a linear layer of 500; ReLU; 431,080 parameters on MNIST."""
    return _two_conv5(shape, 20, 50, (500, num_classes))


def _mlp(shape: Shape, num_classes: int) -> nn.Module:
    """Fed-NGA's (section 4): linear layers of 200 and 100; ReLU; 178,110 parameters on MNIST."""
    hidden = (200, 100) if shape[0] == 1 else (200, 200)
    return _linear_layers([_size(shape), *hidden, num_classes], nn.ReLU)


def _logistic(shape: Shape, num_classes: int) -> nn.Module:
    """Logistic regression that starts at zero, strongly convex with model.l2 > 0; 7,850 parameters on MNIST."""
    model = _linear_layers([_size(shape), num_classes], nn.Identity)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def _size(shape: Shape) -> int:
    return shape[0] * shape[1] * shape[2]


MODELS: dict[str, Builder] = {
    "cnn": _cnn,
    "lenet": _lenet,
    "mlp": _mlp,
    "cnn_large": _cnn_large,
    "logistic": _logistic,
}


def build_model(
    model: config.Model, input_shape: Shape, num_classes: int, seed: int, folders: Sequence[Path] = ()
) -> nn.Module:
    """A model at its starting point, on the CPU.

    Parameters
    ----------
    model
        ``name``, one of :data:`MODELS` or ``module:name`` (a callable ``(input_shape, num_classes) -> nn.Module``),
        and ``init_from``, a safetensors file with the names of the state dict.
    input_shape
        (C, H, W).
    num_classes
        Width of the logits.
    seed
        The run's seed; equal seeds give equal parameters, whatever was drawn before from torch's generators.
    folders
        Where the module of ``module:name`` is looked for, beside the working directory.

    Raises
    ------
    ModelError
        Unknown name, images too small for the model, parameters that are not float32, output of another shape, or an
        ``init_from`` that does not fit.
    ConfigError
        The module of ``module:name`` cannot be loaded.
    """
    builder: Builder
    if is_plugin(model.name):
        builder = load_plugin(model.name, folders)
    elif model.name in MODELS:
        builder = MODELS[model.name]
    else:
        raise ModelError(f"model.name = {model.name!r}: {nearest(model.name, list(MODELS))} Yours is module:name")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream_key(seed, "model") % 2**63)
        try:
            module = builder(input_shape, num_classes)
            _check_shape(module, model.name, input_shape, num_classes)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as problem:
            raise ModelError(
                f"{model.name} cannot be built for inputs {input_shape} and {num_classes} classes: {problem}"
            ) from problem
    if model.init_from is not None:
        _load(module, model.init_from)
    return module


def _check_shape(module: object, name: str, input_shape: Shape, num_classes: int) -> None:
    if not isinstance(module, nn.Module):
        raise ModelError(f"{name} returned {type(module).__name__}, expected a torch.nn.Module")
    for key, parameter in module.named_parameters():
        if parameter.dtype != torch.float32:
            raise ModelError(f"{name}: parameter {key} is {parameter.dtype}; only float32 travels: call .float()")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError(f"{name} has no parameter to train")
    with torch.no_grad():
        logits = copy.deepcopy(module).eval()(torch.zeros(2, *input_shape))
    if not isinstance(logits, Tensor) or logits.shape != (2, num_classes):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(f"{name} gives {found} for a batch of 2, expected logits (2, {num_classes})")


def _load(module: nn.Module, source: Path) -> None:
    """Copy a safetensors file into the module; floats are converted to float32."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        given = load_file(source)
    except (OSError, SafetensorError) as problem:
        raise ModelError(f"model.init_from = {str(source)!r} cannot be read: {problem}") from None
    wanted = module.state_dict(keep_vars=False)
    optional = {name for name, tensor in wanted.items() if not tensor.is_floating_point()}  # counters, say
    problems = [f"{name} is missing" for name in wanted if name not in given and name not in optional]
    problems += [f"{name} is unknown" for name in given if name not in wanted]
    for name in wanted.keys() & given.keys():
        if given[name].shape != wanted[name].shape:
            problems.append(f"{name} is {tuple(given[name].shape)}, the model's is {tuple(wanted[name].shape)}")
        elif given[name].is_floating_point() != wanted[name].is_floating_point():
            problems.append(f"{name} is {given[name].dtype}, the model's is {wanted[name].dtype}")
        elif not torch.isfinite(given[name]).all():
            problems.append(f"{name} has entries that are not finite")
    if problems:
        more = f"; and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise ModelError(f"model.init_from = {str(source)!r} does not fit: {'; '.join(problems[:6])}{more}")
    with torch.no_grad():
        for name, tensor in given.items():
            wanted[name].copy_(tensor)  # shares the module's memory


def updated_buffers(module: nn.Module, input_shape: Shape) -> list[str]:
    """The buffers that a training step changes (running statistics), found by taking one on a copy."""
    trial = copy.deepcopy(module).train()
    before = {name: buffer.clone() for name, buffer in trial.named_buffers()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        trial(torch.randn(4, *input_shape))
    return [name for name, buffer in trial.named_buffers() if not torch.equal(buffer, before[name])]


def check_trainable(module: nn.Module, input_shape: Shape, *, private: bool, frozen_buffers: bool) -> None:
    """Refuse a model that differential privacy would not cover.

    Only parameters travel. Running statistics would stay with each client, or release its data if they were sent.

    Parameters
    ----------
    module
        As :func:`build_model` returned it.
    input_shape
        (C, H, W).
    private
        Whether the run is under differential privacy.
    frozen_buffers
        ``model.frozen_buffers``: the buffers stay as they are (see :class:`common.learning.gradient.FlatModel`).

    Raises
    ------
    ModelError
        Buffers change in training, under differential privacy, and are not frozen; the message has the remedies.
    """
    if not private or frozen_buffers:
        return
    if changing := updated_buffers(module, input_shape):
        raise ModelError(
            f"buffers change in training ({', '.join(changing[:4])}{', …' if len(changing) > 4 else ''}), and no noise "
            "covers them: use GroupNorm or LayerNorm instead of BatchNorm, or keep them as they are at the start with "
            "model.frozen_buffers = true (and model.init_from, if it was trained elsewhere)"
        )

"""Many clients' gradients at the same parameters, from one forward and one backward pass.

All clients of a simulation compute at the same θ. So their batches go through the model as one, the backward pass goes
through it once, down to the output of each layer, and only then each client's share of a layer's parameters is computed
by itself, from its own samples: by the very kernels that its own backward pass would have called. On a CPU that gives
the same bits as one pass per client, for the models here, in about half of the time. Nothing promises that of all
kernels, so what holds is agreement within float32 rounding, which is checked before a model is used like this.

It is right for models that treat the samples of a batch alike and apart, draw nothing, and have all of their parameters
in linear layers and two-dimensional convolutions. Others are turned down (:func:`batched_gradients`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.learning.gradient import FlatModel

__all__ = ["BatchedGradients", "batched_gradients"]

log = logging.getLogger("byzuldp.learning")

SAMPLES_AT_ONCE = 160
"""On a CPU: with more of them, what the layers keep leaves the cache, which costs more than fewer passes save."""

_CHECKED_WITHIN = 1e-5  # of the largest entry


def batched_gradients(
    model: FlatModel, input_shape: tuple[int, int, int], device: torch.device | str = "cpu"
) -> BatchedGradients | None:
    """The batched gradients of a model, on a copy of it; None when they would be others than one client's at a time.

    Parameters
    ----------
    model
        At any parameters; left alone.
    input_shape
        (C, H, W).
    """
    trained = {id(parameter) for parameter in model.parameters}
    placed = {id(parameter) for layer in _layers(model.module) for parameter in layer.parameters(recurse=False)}
    if trained - placed:
        log.info("gradients are computed client by client: the model has parameters of other layers than these")
        return None
    made = BatchedGradients(model, device)
    if not _agrees(made, model, input_shape):
        log.info("gradients are computed client by client: in one pass this model gives others")
        return None
    return made


class BatchedGradients:
    """See the module; made by :func:`batched_gradients`, which checks that a model can have them.

    Parameters
    ----------
    model
        Copied.
    device
        Where the copy lives.
    """

    def __init__(self, model: FlatModel, device: torch.device | str = "cpu") -> None:
        self.model = model.copied(device)
        self.device = torch.device(device)
        # Many small kernels cost a GPU more than one large one; a CPU the other way round.
        self._all_products_at_once = self.device.type != "cpu"
        self._at_once = SAMPLES_AT_ONCE if self.device.type == "cpu" else 1 << 30
        self._seen: list[tuple[nn.Linear | nn.Conv2d, Tensor, Tensor]] = []
        starts = accumulate((parameter.numel() for parameter in self.model.parameters), initial=0)
        self._start = {id(parameter): start for parameter, start in zip(self.model.parameters, starts, strict=False)}
        for parameter in self.model.parameters:
            parameter.requires_grad_(False)
        for layer in _layers(self.model.module):
            layer.register_forward_hook(self._remember)

    def __call__(self, x: Tensor, y: Tensor, sizes: Sequence[int], out: Tensor, l2: float = 0.0) -> Tensor:
        """The gradient of each client's mean cross-entropy, plus l2/2 ‖θ‖², at the parameters :attr:`model` holds.

        Parameters
        ----------
        x
            float32 (Σ sizes, C, H, W): the clients' batches, one after the other.
        y
            int64 (Σ sizes,).
        sizes
            Samples of each client, at least one.
        out
            float32 (n, d), overwritten and returned.
        """
        self.model.mode(training=True)
        first, begin = 0, 0
        while first < len(sizes):
            end, last = begin + sizes[first], first + 1
            while last < len(sizes) and end + sizes[last] - begin <= self._at_once:
                end, last = end + sizes[last], last + 1
            self._some(x[begin:end], y[begin:end], sizes[first:last], out[first:last])
            first, begin = last, end
        if l2:
            theta = self.model.parameters_flat()
            for row in out:  # one by one: what vectorised kernels do with a remainder depends on where it is
                row.add_(theta, alpha=l2)
        return out

    def _some(self, x: Tensor, y: Tensor, sizes: Sequence[int], out: Tensor) -> None:
        self._seen.clear()
        with torch.enable_grad():
            losses = functional.cross_entropy(self.model.module(x), y, reduction="none")
            share = torch.repeat_interleave(
                torch.tensor([1.0 / size for size in sizes]), torch.tensor(sizes), output_size=len(x)
            )
            outputs = [output for _, _, output in self._seen]
            slopes = torch.autograd.grad((losses * share.to(self.device)).sum(), outputs, allow_unused=True)
        written: set[int] = set()
        bounds = [0, *accumulate(sizes)]
        with torch.no_grad():
            for (layer, inputs, _), slope in zip(self._seen, slopes, strict=True):
                if slope is not None:
                    self._write(layer, inputs, slope, bounds, out, written)
            for parameter in self.model.parameters:
                if id(parameter) not in written:
                    self._place(parameter, out).zero_()
        self._seen.clear()

    def _write(
        self,
        layer: nn.Linear | nn.Conv2d,
        inputs: Tensor,
        slope: Tensor,
        bounds: Sequence[int],
        out: Tensor,
        written: set[int],
    ) -> None:
        """What one call of a layer adds to every client's gradient."""
        trained = [
            (which, parameter)
            for which, parameter in enumerate((layer.weight, layer.bias))
            if parameter is not None and id(parameter) in self._start
        ]
        kept = [which for which, _ in trained]
        if self._all_products_at_once and all(end == number * bounds[1] for number, end in enumerate(bounds)):
            found = _together(layer, inputs, slope, len(out))
            for which, parameter in trained:
                self._put(self._place(parameter, out), found[which], again=id(parameter) in written)
        else:
            for number, (begin, end) in enumerate(pairwise(bounds)):
                found = _by_itself(layer, inputs[begin:end], slope[begin:end], kept)
                for which, parameter in trained:
                    self._put(self._place(parameter, out)[number], found[which], again=id(parameter) in written)
        written |= {id(parameter) for _, parameter in trained}

    def _place(self, parameter: Tensor, out: Tensor) -> Tensor:
        """Where the clients' gradients of a parameter go: a view (n, …) of ``out``."""
        start = self._start[id(parameter)]
        return out[:, start : start + parameter.numel()].view(len(out), *parameter.shape)

    @staticmethod
    def _put(into: Tensor, values: Tensor, *, again: bool) -> None:
        values = values.reshape(into.shape)
        if again:  # the layer was called before in this pass, or shares the parameter
            into.add_(values)
        else:
            into.copy_(values)

    def _remember(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """A layer has been called: keep what its parameters' gradients are made of."""
        assert isinstance(layer, nn.Linear | nn.Conv2d)  # noqa: S101 - only these have the hook
        if not output.requires_grad:  # the first one: the backward pass ends here
            output = output.detach().requires_grad_()
        self._seen.append((layer, inputs[0].detach(), output))
        return output


def _by_itself(layer: nn.Linear | nn.Conv2d, x: Tensor, slope: Tensor, kept: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One client's gradient of a layer's weight and bias, by the kernels of an ordinary backward pass.

    ``kept`` says which of the two (0, 1) are asked for; the other is anything.
    """
    if isinstance(layer, nn.Linear):
        by_output = slope.reshape(-1, slope.shape[-1])
        return by_output.t() @ x.reshape(-1, x.shape[-1]), by_output.sum(0) if 1 in kept else by_output
    _, weights, biases = torch.ops.aten.convolution_backward(
        slope,
        x,
        layer.weight,
        [layer.out_channels] if 1 in kept else None,
        layer.stride,
        layer.padding,
        layer.dilation,
        False,
        [0, 0],
        layer.groups,
        [False, 0 in kept, 1 in kept],
    )
    return weights, biases


def _together(layer: nn.Linear | nn.Conv2d, x: Tensor, slope: Tensor, clients: int) -> tuple[Tensor, Tensor]:
    """All clients' gradients (n, …) of a layer's weight and bias at once, as one batched product: for a GPU."""
    if isinstance(layer, nn.Linear):
        into, by_output = x.reshape(clients, -1, x.shape[-1]), slope.reshape(clients, -1, slope.shape[-1])
        return by_output.transpose(1, 2) @ into, by_output.sum(1)
    groups, outputs = layer.groups, layer.out_channels
    assert not isinstance(layer.padding, str)  # noqa: S101 - turned down before
    patches = functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    patches = patches.view(clients, len(x) // clients, groups, -1, patches.shape[-1])
    by_output = slope.reshape(clients, len(x) // clients, groups, outputs // groups, -1)
    return torch.einsum("nbgop,nbgkp->ngok", by_output, patches), by_output.sum((1, 4))


def _layers(module: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """The layers whose parameters' gradients are known here."""
    return [
        layer
        for layer in module.modules()
        if type(layer) is nn.Linear
        or (type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str))
    ]


def _agrees(batched: BatchedGradients, model: FlatModel, input_shape: tuple[int, int, int]) -> bool:
    """Whether two clients' gradients are those of one pass each, and no random numbers are drawn."""
    sizes = (3, 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), *input_shape, generator=generator)
    batched.model.set_parameters(model.parameters_flat())
    out = torch.empty((2, model.num_parameters), device=batched.device)
    with torch.random.fork_rng(devices=[]):
        before = torch.default_generator.get_state()
        try:
            classes = model.predict(x[:1].to(model.device)).shape[1]
            y = torch.randint(classes, (len(x),), generator=generator)
            batched(x.to(batched.device), y.to(batched.device), sizes, out)
            expected = torch.stack(
                [
                    model.gradient(x[part].to(model.device), y[part].to(model.device)).clone()
                    for part in (slice(0, 3), slice(3, 5))
                ]
            )
        except (RuntimeError, AssertionError):
            return False
        if not torch.equal(before, torch.default_generator.get_state()):
            return False
    apart = (out.to(expected.device) - expected).abs().max()
    return bool(apart <= _CHECKED_WITHIN * expected.abs().max().clamp(min=1e-6))

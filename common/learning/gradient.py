"""A model as one flat vector, and the gradient of a batch as another.

What travels, is clipped, aggregated and noised is a float32 vector (d,). Here a module's parameters are views into
one such vector, so that setting them is one copy.
"""

from __future__ import annotations

import contextlib
import copy
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import ModelError
from common.learning.datasets import Dataset, Split, to_tensor

__all__ = ["FlatModel", "accuracy"]


class FlatModel:
    """A module whose trainable parameters live in one flat float32 vector, in the order of ``named_parameters``.

    Parameters
    ----------
    module
        Taken over: its parameters become views of the vector.
    frozen_buffers
        Layers with floating buffers of their own (BatchNorm) stay in evaluation mode while training, so that the
        buffers stay as they are.
    device
        Where it lives.

    Raises
    ------
    ModelError
        Nothing to train, or a trainable parameter that is not float32.
    """

    def __init__(self, module: nn.Module, *, frozen_buffers: bool = False, device: torch.device | str = "cpu") -> None:
        self.module = module.to(device)
        self.device = torch.device(device)
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        if not named:
            raise ModelError("the model has no parameter to train")
        if wrong := [f"{name} is {parameter.dtype}" for name, parameter in named if parameter.dtype != torch.float32]:
            raise ModelError(f"only float32 parameters travel: {', '.join(wrong)}")
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._flat = torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])
        self._gradient = torch.zeros_like(self._flat)
        for parameter, piece in zip(self._parameters, self.pieces(self._flat), strict=True):
            parameter.data = piece
        self._kept_in_eval = [
            layer
            for layer in module.modules()
            if frozen_buffers and any(buffer.is_floating_point() for buffer in layer.buffers(recurse=False))
        ]
        self._constants = self._digest_of_constants()
        self._training: bool | None = None

    @property
    def num_parameters(self) -> int:
        """d."""
        return self._flat.numel()

    def set_parameters(self, theta: Tensor | np.ndarray) -> None:
        """Copy θ, float32 (d,), into the model.

        Raises
        ------
        ModelError
            Another shape or type.
        """
        if tuple(theta.shape) != (self.num_parameters,) or str(theta.dtype).removeprefix("torch.") != "float32":
            raise ModelError(
                f"parameters are {theta.dtype} {tuple(theta.shape)}, expected float32 ({self.num_parameters},)"
            )
        if isinstance(theta, Tensor):
            self._flat.copy_(theta.detach())
        elif self.device.type == "cpu":
            np.copyto(self._flat.numpy(), theta)  # takes read-only arrays, which torch does not like
        else:
            self._flat.copy_(torch.from_numpy(np.array(theta)))

    def parameters_flat(self) -> Tensor:
        """θ, float32 (d,): the model's own memory, not a copy."""
        return self._flat

    def gradient(self, x: Tensor, y: Tensor, l2: float = 0.0, *, seed: int | None = None) -> Tensor:
        """The gradient of the mean cross-entropy over a batch, plus l2/2 ‖θ‖².

        Parameters
        ----------
        x
            float32 (b, C, H, W).
        y
            int64 (b,).
        l2
            λ.
        seed
            For layers that draw random numbers (dropout): what they draw is then a function of it, and torch's global
            generator is left alone.

        Returns
        -------
        torch.Tensor
            float32 (d,). The same memory at every call: it is overwritten by the next one.
        """
        self.mode(training=True)
        with contextlib.ExitStack() as stack:
            if seed is not None:
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.default_generator.manual_seed(seed % 2**63)
            loss = functional.cross_entropy(self.module(x), y)
            parts = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
        torch.cat([part.reshape(-1) for part in parts], out=self._gradient)
        if l2:
            self._gradient.add_(self._flat, alpha=l2)
        return self._gradient

    def predict(self, x: Tensor) -> Tensor:
        """Logits (b, num_classes) in evaluation mode."""
        self.mode(training=False)
        with torch.inference_mode():
            logits: Tensor = self.module(x)
        return logits

    def copied(self, device: torch.device | str | None = None) -> FlatModel:
        """Another model at the same parameters, with memory of its own: for another thread, or another device."""
        module = copy.deepcopy(self.module)
        return FlatModel(module, frozen_buffers=bool(self._kept_in_eval), device=device or self.device)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order of the vector: views of it."""
        return self._parameters

    def schema(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of each parameter, in the order of the vector."""
        return [(name, tuple(part.shape)) for name, part in zip(self._names, self._parameters, strict=True)]

    def schema_hash(self) -> bytes:
        """32 bytes that agree between two processes exactly when their vectors mean the same.

        SHA-256 over names, shapes and dtype; and over the *content* of what does not travel but shapes the model's
        output: parameters that are not trained, and floating buffers as they were at the start.
        """
        described = "\n".join(f"{name} {shape} float32" for name, shape in self.schema())
        return sha256(f"byzuldp/schema/1\n{described}\n".encode() + self._constants).digest()

    def state_dict_from(self, theta: Tensor) -> dict[str, Tensor]:
        """The module's state dict with θ in place of its own parameters: copies on the CPU, for saving.

        Parameters
        ----------
        theta
            float32 (d,).
        """
        if tuple(theta.shape) != (self.num_parameters,):
            raise ModelError(f"parameters have shape {tuple(theta.shape)}, expected ({self.num_parameters},)")
        pieces = self.pieces(theta.detach().to("cpu", torch.float32))
        # Weights that are tied have several names in a state dict and one place in the vector.
        place = {id(parameter): piece for parameter, piece in zip(self._parameters, pieces, strict=True)}
        state = self.module.state_dict(keep_vars=True)
        return {name: place.get(id(tensor), tensor.detach().cpu()).clone() for name, tensor in state.items()}

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Views of a vector (d,), one per trained parameter and of its shape, in the order of the vector."""
        pieces, begin = [], 0
        for parameter in self._parameters:
            pieces.append(flat[begin : begin + parameter.numel()].view(parameter.shape))
            begin += parameter.numel()
        return pieces

    def mode(self, *, training: bool) -> None:
        """Training or evaluation mode; frozen buffers stay as they are in both."""
        if self._training is training:
            return
        self.module.train(training)
        for layer in self._kept_in_eval:
            layer.eval()
        self._training = training

    def _digest_of_constants(self) -> bytes:
        travelling = {id(parameter) for parameter in self._parameters}
        digest = sha256()
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and id(tensor) not in travelling:
                content = tensor.detach().cpu().contiguous()
                digest.update(f"{name} {tuple(content.shape)} {content.dtype}\n".encode())
                digest.update(content.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.digest()


def accuracy(
    model: FlatModel, split: Split, dataset: Dataset, images: int | None = None, batch: int = 500
) -> tuple[float, float]:
    """Top-1 accuracy and mean cross-entropy.

    Parameters
    ----------
    model
        Evaluated at its present parameters.
    split, dataset
        The samples, and whose normalisation applies.
    images
        How many samples, spread evenly (some test sets are sorted by class); None is all.
    batch
        Samples at a time.

    Returns
    -------
    tuple of float
        Accuracy in [0, 1] and the mean loss, which is not finite for a model that diverged.
    """
    total = len(split) if images is None else min(images, len(split))
    chosen = np.arange(total, dtype=np.int64) * len(split) // total
    correct, loss = 0, 0.0
    for begin in range(0, total, batch):
        x, y = (part.to(model.device) for part in to_tensor(split, chosen[begin : begin + batch], dataset))
        logits = model.predict(x)
        correct += int((logits.argmax(dim=1) == y).sum())
        loss += float(functional.cross_entropy(logits, y, reduction="sum"))
    return correct / total, loss / total

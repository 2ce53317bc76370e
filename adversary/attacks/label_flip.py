"""Label flip: honest training on poisoned data."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from adversary.attacks.attack import Attack, Setting, Sight
from common.learning.datasets import Dataset, Split

__all__ = ["LabelFlip"]


class LabelFlip(Attack):
    """Each its own momentum, trained on labels K - 1 - y in place of y.

    Biggio et al. 2012, "Poisoning Attacks against Support Vector Machines", and, in this form, Karimireddy et al.
    2022. It is real training: the adversaries hold the shares of data dealt to them, clip and average as honest
    clients do, and only the labels are wrong. The ByzFL library instead lets honest clients compute what is sent.

    Notes
    -----
    No rule can tell such a momentum from that of a client with odd data, but neither does it do much more harm than
    one: it is as long as an honest one. With an odd K the middle class keeps its label.
    """

    name = "label_flip"
    needs = "its own data"
    source = "Biggio et al. 2012; Karimireddy et al. 2022"

    def __init__(self, setting: Setting) -> None:
        pass

    def poison(self, dataset: Dataset) -> Dataset:
        honest = dataset.train
        return replace(dataset, train=Split(honest.images, dataset.num_classes - 1 - honest.labels))

    def __call__(self, sight: Sight) -> Tensor:
        return sight.own

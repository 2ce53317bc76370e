"""Processes of :mod:`federations` that live in a network namespace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import federations
from federations import Child, ServerProcess

from common.config import Experiment
from deploy.chaos.backend import PS, Backend
from deploy.chaos.namespaces import CLONE_NEWNET, enter


def inside(say: Callable[..., None], netns: Path, target: Callable[..., None], *arguments: object) -> None:
    """The body of a child: go there, then do what others do here."""
    enter(netns, CLONE_NEWNET)
    target(say, *arguments)


class PlacedServer(ServerProcess):
    """A parameter server in the place that a backend has for it."""

    def __init__(self, experiment: Experiment, folder: Path, backend: Backend) -> None:
        self.experiment, self.run_dir = experiment, folder / "run"
        place = backend.placement(PS).netns
        Child.__init__(self, folder, "ps", inside, place, federations._serve, experiment, self.run_dir, False, None)


def placed_client(folder: Path, server: PlacedServer, backend: Backend, name: str, ids: Sequence[int]) -> Child:
    """Honest clients in the place of a peer."""
    place = backend.placement(name)
    return Child(
        folder,
        name,
        inside,
        place.netns,
        federations._take_part,
        server.experiment,
        place.address,
        dict(server.tokens(ids)),
    )

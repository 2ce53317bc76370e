"""One world of one setting, played: the canary goes in by RPC, the releases are read off the published models.

A client sees θ alone. With R_{t+1} = (θ_t − θ_{t+1}) / η the releases follow: Y_t = (R_{t+1} − β R_t) / (1 − β). θ and
R are float32, so this is rounded, which makes the audit no less valid (whatever is computed from θ is) but could make
it weaker; so it is measured against the noise.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from client.exchange import Exchange, Momentum, PublishedModel
from common.config import Experiment
from common.errors import NetworkProblem, PrivacyError, RunFailed
from common.learning.task import build_task
from deploy.audit.canary import Cells
from deploy.audit.server import Servers
from deploy.audit.setting import CELL, Claim, Setting
from ps.privacy.residuals import Residuals
from ps.privacy.rows import Genesis, LedgerEntry, from_json
from ps.reader import RunReader

__all__ = ["observe", "releases"]

LARGEST_ROUNDING = 1e-3
"""Of θ and R, relative to the noise on Y; beyond, the audit would measure float32 rather than the mechanism."""

SAME_MULTIPLIER = 1e-6

Rows = Callable[[int], Sequence[Momentum]]
"""The momenta of a round, by identity."""


def observe(
    setting: Setting, claim: Claim, world: int, servers: Servers, folder: Path, residuals: Residuals | None = None
) -> Cells:
    """Play world +1 or −1; returns Y of every cell, in units of the noise claimed for it.

    What is left of every release without its aggregate is added to ``residuals``.

    Raises
    ------
    RunFailed, NetworkProblem
        A server does not do what it should.
    PrivacyError
        A server's noise multiplier is not what its budget means, a release is not in its ledger, or rounding would
        hide the noise.
    """
    experiment, sigma = setting.experiment(claim), setting.sigma(claim.mu)
    signs, places = setting.signs(), setting.places()
    starts, rounds, cells = setting.shape
    found = np.empty(setting.shape)
    for run in [[0, 1]] if setting.starts == "restarted" else [[start] for start in range(starts)]:
        where = places[run].reshape(-1, cells)
        rows = _rows(setting, world, signs[run].reshape(-1, cells), where)
        run_dir = folder / "run"
        models = asyncio.run(_play(experiment, rows, servers, run_dir, rounds if len(run) > 1 else None))
        _require_multiplier(run_dir, setting.noise_multiplier(claim.mu))
        released = releases(models, setting.server_momentum, sigma)
        found[run] = np.take_along_axis(released, where, axis=-1).reshape(len(run), rounds, cells)
        if residuals is not None:
            directions = np.zeros_like(released)
            np.put_along_axis(directions, where, world * signs[run].reshape(-1, cells), axis=-1)
            claimed = np.maximum(_charged(setting, run_dir, len(released)), sigma)
            released -= setting.moved * directions
            released /= claimed[:, None]
            name = f"{setting.name!r}{f' (run {run[0] + 1})' if setting.starts == 'two runs' else ''}, world {world:+d}"
            residuals.add(name, released, along=directions, grid=setting.grid / sigma)
        shutil.rmtree(run_dir)
    found /= sigma
    return found


def releases(models: npt.NDArray[np.float32], server_momentum: float, sigma: float) -> npt.NDArray[np.float64]:
    """Y of every round, from θ before the first and after each; η = 1, and R = 0 before the first.

    Parameters
    ----------
    models
        float32 (rounds + 1, d).
    server_momentum
        β.
    sigma
        The noise on Y, to measure rounding against.

    Raises
    ------
    PrivacyError
        Rounding may reach :data:`LARGEST_ROUNDING` of the noise.
    """
    momenta = -np.diff(models.astype(np.float64), axis=0)
    before = np.vstack([np.zeros((1, momenta.shape[1])), momenta[:-1]])
    # θ − R is rounded once, the two products and the sum in β R + (1 − β) Y once each.
    theta, momentum = (float(np.spacing(np.abs(values).max().astype(np.float32))) / 2 for values in (models, momenta))
    error = ((1 + server_momentum) * theta + 3 * momentum) / (1 - server_momentum)
    if not error <= LARGEST_ROUNDING * sigma:
        raise PrivacyError(
            f"the models' rounding, up to {error:.2g}, would hide noise of {sigma:.2g} from the audit: audit a smaller "
            "epsilon, or a server momentum further from 1"
        )
    return (momenta - server_momentum * before) / (1 - server_momentum)


def _rows(setting: Setting, world: int, signs: Cells, places: npt.NDArray[np.intp]) -> Rows:
    """The construction that attains CWTM's sensitivity, round by round."""
    victim, *others = setting.roles().tolist()
    f, amplitude = setting.byzantine, CELL * setting.oversize

    def rows(round_id: int) -> Sequence[Momentum]:
        nothing = np.zeros(setting.num_parameters, dtype=np.float32)
        high = nothing.copy()
        high[places[round_id]] = amplitude * signs[round_id]
        momenta = [nothing] * setting.clients
        momenta[victim] = world * high
        for client_id in others[:f]:
            momenta[client_id] = -high
        for client_id in others[f : 2 * f]:
            momenta[client_id] = high
        return momenta

    return rows


async def _play(
    experiment: Experiment, rows: Rows, servers: Servers, run_dir: Path, restart_before: int | None
) -> npt.NDArray[np.float32]:
    """A run with all identities, up to its last round; returns the models of its rounds, float32 (rounds, d)."""
    task = build_task(experiment)
    models = np.full((experiment.training.rounds, task.num_parameters), np.nan, dtype=np.float32)
    tokens = {client_id: secrets.token_urlsafe(24) for client_id in range(experiment.federation.clients)}
    hashes = {client_id: sha256(token.encode()).digest() for client_id, token in tokens.items()}
    address = await asyncio.to_thread(servers.start, experiment, run_dir, hashes)
    restarting: list[asyncio.Task[None]] = []

    def restart() -> None:
        network = experiment.network.model_copy(update={"address": address})
        servers.kill()
        servers.start(experiment.model_copy(update={"network": network}), run_dir, hashes, resume=True)

    async def produce(model: PublishedModel) -> AsyncIterator[tuple[int, Momentum]]:
        models[model.round_id] = model.theta
        if model.round_id == restart_before and not restarting:
            restarting.append(asyncio.create_task(asyncio.to_thread(restart)))
            return  # the exchange finds out by itself, and joins again
        if model.round_id == len(models) - 1:
            raise _SeenAll
        for client_id, momentum in enumerate(rows(model.round_id)):
            yield client_id, momentum

    exchange = Exchange(
        experiment,
        address=address,
        tokens=tokens,
        schema_hash=task.schema_hash,
        num_parameters=task.num_parameters,
        produce=produce,
    )
    try:
        outcome = await exchange.run()
        raise RunFailed(f"a run of the audit ended early, as {outcome.status}: {outcome.message}")
    except _SeenAll:
        pass
    except NetworkProblem:
        await asyncio.gather(*restarting)  # its failure is the reason
        raise
    await asyncio.to_thread(servers.kill)  # no clients are left to take part in the last round
    if not np.isfinite(models).all():
        raise RunFailed("a run of the audit did not publish every model, or one that is not finite")
    return models


class _SeenAll(Exception):
    """Every model that the audit wants has been published."""


def _charged(setting: Setting, run_dir: Path, releases: int) -> npt.NDArray[np.float64]:
    """σ of each release, as the ledger has it, on Y."""
    rows = [from_json(row[1]) for row in RunReader(run_dir).ledger_rows()]
    sigmas = {row.round_id: row.sigma for row in rows if isinstance(row, LedgerEntry)}
    if not all(round_id in sigmas for round_id in range(releases)):
        raise PrivacyError("a release that was published is not in the server's ledger")
    on_momentum = 1.0 - setting.server_momentum if setting.form == "inside" else 1.0
    return np.array([sigmas[round_id] for round_id in range(releases)]) / on_momentum


def _require_multiplier(run_dir: Path, expected: float) -> None:
    """What the server charged for is what the budget means; otherwise the plan is wrong, before any noise is drawn."""
    genesis = from_json(RunReader(run_dir).ledger_rows()[0][1])
    found = genesis.noise_multiplier if isinstance(genesis, Genesis) else None
    if found is None or not abs(found / expected - 1) <= SAME_MULTIPLIER:
        raise PrivacyError(f"the server chose the noise multiplier {found!r} for its budget: expected {expected!r}")

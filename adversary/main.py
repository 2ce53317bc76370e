"""An adversary process: Byzantine identities that collude, and speak the protocol like everyone else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from adversary.attacks import Attack, Setting, Sight, make_attack
from adversary.collusion import Colluding, Ignorant, Knowledge
from adversary.misbehaviour import Ground, Kind, Misbehaviour, deal, make_misbehaviours
from adversary.omniscience import Omniscient
from adversary.party import take_part
from client.crew import build_crew
from client.exchange import Exchange, Momentum, Outcome, PublishedModel
from client.push import Push, Reply, deliver
from client.worker import Worker
from common.config import Experiment
from common.errors import ConfigError
from common.learning.datasets import Dataset, load_dataset
from common.learning.task import build_task, single_threaded
from common.rpc.addresses import parse_address, refuse_insecure
from common.rpc.credentials import channel_as, refuse_unusable
from common.rule_in_use import rule_in_use

__all__ = ["attack_of", "misbehaviours_of", "own_momenta", "run_adversary"]


def attack_of(experiment: Experiment) -> Attack:
    """The attack an experiment names.

    Raises
    ------
    AttackError
        Unknown attack or parameter, or knowledge that the attack cannot do without.
    """
    training = experiment.training
    setting = Setting(
        num_clients=experiment.federation.clients,
        num_byzantine=experiment.federation.byzantine,
        num_adversaries=experiment.num_adversaries,
        clip_norm=training.clip_norm,
        seed=training.seed,
        rule=lambda: rule_in_use(experiment, lambda: _dataset(experiment).train.labels),
        projects_rows=experiment.privacy.epsilon is not None,
        learning_rate=training.schedule_of("learning_rate"),
    )
    return make_attack(
        experiment.attack.name,
        setting,
        knowledge=experiment.attack.knowledge,
        folders=experiment.folders,
        **experiment.attack.parameters,
    )


def _dataset(experiment: Experiment) -> Dataset:
    return load_dataset(experiment.data.dataset, experiment.data.root, experiment.folders)


def misbehaviours_of(experiment: Experiment) -> dict[str, Kind]:
    """The misbehaviours an experiment names.

    Raises
    ------
    ConfigError, AttackError
        See :func:`adversary.misbehaviour.make_misbehaviours`.
    """
    chosen = experiment.misbehaviour
    return make_misbehaviours(chosen.names, chosen.parameters, experiment.folders)


def own_momenta(crew: Mapping[int, Worker], round_id: int) -> torch.Tensor:
    """What the adversaries' identities would send if they were honest (k, d), in the order of their ids."""
    return torch.stack([torch.from_numpy(worker.step(round_id)) for worker in crew.values()])


def run_adversary(
    experiment: Experiment, *, address: str, tokens: Mapping[int, str], wiretap_address: str | None = None
) -> Outcome:
    """Attack a run as the identities that ``tokens`` names, until it ends.

    Raises
    ------
    ByzULDPError
        A leaf that says why this process cannot take part (any longer).
    """
    network = experiment.network
    refuse_insecure(
        parse_address(address, setting="the PS's address"), insecure=network.insecure, tls=network.tls.enabled
    )
    refuse_unusable(network.tls, tokens)
    single_threaded()
    attack, kinds = attack_of(experiment), misbehaviours_of(experiment)
    dealt = deal(list(tokens), list(kinds))
    apart = {client_id for name, held in dealt.items() if not kinds[name].takes_part for client_id in held}
    ids = sorted(set(tokens) - apart)
    task = build_task(experiment)
    crew = build_crew(experiment, task, ids, dataset=attack.poison(task.dataset))
    ways: dict[int, Misbehaviour] = {}  # how each identity behaves; the others as clients do
    with ThreadPoolExecutor(1, thread_name_prefix="gradient") as computing:

        async def produce(model: PublishedModel) -> AsyncIterator[tuple[int, Momentum]]:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(computing, task.model.set_parameters, model.theta)
            own = await loop.run_in_executor(computing, own_momenta, crew, model.round_id)
            honest = await knowledge.estimate(model.round_id, own)
            sight = Sight(model.round_id, honest, own, task.model.parameters_flat().clone())
            rows = await loop.run_in_executor(computing, attack, sight)
            for client_id, row in zip(ids, rows, strict=True):
                yield client_id, row.numpy()

        async def deliver_in_its_way(push: Push) -> Reply | None:
            way = ways.get(push.caller.client_id)
            return await (deliver(push) if way is None else way.deliver(push))

        exchange = Exchange(
            experiment,
            address=address,
            tokens={client_id: tokens[client_id] for client_id in ids},
            schema_hash=task.schema_hash,
            num_parameters=task.num_parameters,
            produce=produce,
            deliver=deliver_in_its_way,
        )
        knowledge = _knowledge(experiment, exchange, wiretap_address, task.num_parameters)
        misbehaviours = []
        for name, held in dealt.items():
            ground = Ground(
                address=address,
                experiment=experiment,
                tokens={client_id: tokens[client_id] for client_id in held},
                schema_hash=task.schema_hash,
                num_parameters=task.num_parameters,
                callers=lambda: exchange.callers,
                channel=partial(channel_as, address, network=network),
            )
            misbehaviours.append(kinds[name].build(ground))
            ways.update(dict.fromkeys(held, misbehaviours[-1]))
        return asyncio.run(take_part(exchange if ids else None, misbehaviours))


def _knowledge(
    experiment: Experiment, exchange: Exchange, wiretap_address: str | None, num_parameters: int
) -> Knowledge:
    match experiment.attack.knowledge:
        case "none":
            return Ignorant()
        case "colluding":
            return Colluding()
        case "omniscient":
            if wiretap_address is None:
                raise ConfigError(
                    'attack.knowledge = "omniscient" needs the wiretap\'s address, which the parameter server prints; '
                    "give it with --wiretap"
                )
            address, network = parse_address(wiretap_address, setting="the wiretap's address"), experiment.network
            refuse_insecure(address, insecure=network.insecure, tls=network.tls.enabled)
            return Omniscient(
                wiretap_address,
                lambda: exchange.callers,
                num_parameters=num_parameters,
                chunk_bytes=experiment.network.chunk_bytes,
                wait_s=experiment.network.rpc_deadline_s,
                channel=partial(channel_as, network=network),
            )

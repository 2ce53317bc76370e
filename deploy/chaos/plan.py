"""What a scenario asks for, found out before anything starts: who is meant, and what the machine must be able to do.

Whatever cannot be done here is refused by name; nothing is left out unless that was asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config import Experiment
from common.errors import ConfigError, nearest
from deploy.chaos.backend import PS
from deploy.chaos.clocks import SETTING, library
from deploy.chaos.disk import problem_with_mounting
from deploy.chaos.faults import KINDS, Clock, DiskFull, Fault, Kill, LinkFault, Refuse, Restart, Stop
from deploy.chaos.scenario import Loaded
from deploy.chaos.targets import LinkEnd, links, processes
from deploy.local import assign

__all__ = ["Plan", "names_of", "planned"]


@dataclass(frozen=True)
class Plan:
    """The faults of a run, and whom each is about.

    Attributes
    ----------
    names
        All processes, ``ps`` first.
    left_out
        Kinds of faults that were asked to be left out, if the scenario has them.
    """

    names: tuple[str, ...]
    faults: tuple[Fault, ...]
    left_out: tuple[str, ...]

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name != PS)

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that a backend needs."""
        return frozenset().union(*(fault.needs() for fault in self.faults if isinstance(fault, LinkFault)))

    @property
    def needs_disk(self) -> bool:
        return any(isinstance(fault, DiskFull) for fault in self.faults)

    @property
    def clocks(self) -> frozenset[str]:
        """Processes whose clocks will jump."""
        return frozenset(name for fault in self.faults if isinstance(fault, Clock) for name in self.processes(fault))

    def processes(self, fault: Fault) -> tuple[str, ...]:
        """Whom a fault of processes is about."""
        return processes(fault.on, self.names)

    def links(self, fault: Fault) -> tuple[LinkEnd, ...]:
        """Which directions of links a fault of links is about; only peers dial, so only they can be refused."""
        found = links(fault.on, self.names)
        if isinstance(fault, Refuse):
            return tuple((peer, "up") for peer in dict.fromkeys(peer for peer, _ in found))
        return found


def names_of(experiment: Experiment) -> tuple[str, ...]:
    """The processes of a run, the parameter server first."""
    return tuple(part.name for part in assign(experiment, Path()) if part.role != "check")


def planned(loaded: Loaded, *, leave_out: Collection[str] = ()) -> Plan:
    """Read a scenario against its experiment.

    Parameters
    ----------
    leave_out
        Kinds of faults not to do, although the scenario has them.

    Raises
    ------
    ConfigError
        A fault names nobody, or cannot be done in this run or on this machine.
    """
    for kind in leave_out:
        if kind not in KINDS:
            raise ConfigError(f"--leave-out {kind}: {nearest(kind, list(KINDS))}")
    names = names_of(loaded.experiment)
    every = loaded.faults_of(names)
    plan = Plan(
        names,
        tuple(fault for fault in every if fault.do not in leave_out),
        tuple(sorted({fault.do for fault in every if fault.do in leave_out})),
    )
    for number, fault in enumerate(plan.faults, start=1):
        try:
            (plan.links if isinstance(fault, LinkFault) else plan.processes)(fault)
        except ConfigError as problem:
            raise ConfigError(f"fault {number} ({fault.do}): {problem}") from None
        if fault.lasting is None and isinstance(fault, Stop | DiskFull | Kill) and PS in fault.on:
            raise ConfigError(f"fault {number} ({fault.do}) ends the run: say how long it lasts with 'for'")
    _refuse_impossible(loaded.experiment, plan)
    return plan


def _refuse_impossible(experiment: Experiment, plan: Plan) -> None:
    restarting: Sequence[Fault] = [
        fault for fault in plan.faults if isinstance(fault, Kill | Restart | DiskFull) and PS in plan.processes(fault)
    ]
    if restarting and experiment.attack.knowledge == "omniscient" and experiment.num_adversaries:
        raise ConfigError(
            f"{restarting[0].do} on ps: an omniscient adversary does not survive a restart of the parameter server "
            '(its wiretap moves); set attack.knowledge = "colluding"'
        )
    if plan.clocks and library() is None:
        raise ConfigError(
            f"clock: libfaketime is not installed (Debian: apt install libfaketime; or name the library in {SETTING}); "
            "or --leave-out clock"
        )
    if plan.needs_disk and (problem := problem_with_mounting()) is not None:
        raise ConfigError(f"disk_full: no small file system can be mounted: {problem}; or --leave-out disk_full")

"""Every error a user can meet, as one tree.

    ByzULDPError                          status            exit code
    ├── UsageProblem
    │   ├── ConfigError                   config_invalid           10
    │   ├── DataError                     data_unavailable         11
    │   ├── ModelError                    model_invalid            12
    │   ├── RuleError                     rule_refused             13
    │   ├── AttackError                   attack_refused           14
    │   └── PrivacyError                  privacy_refused          15
    ├── RunEnded                                                       (a run that did not complete)
    │   ├── BudgetExhausted               budget_exhausted         20
    │   ├── QuorumLost                    quorum_lost              21
    │   ├── Interrupted                   interrupted              22
    │   └── RunFailed                     failed                   23
    ├── NetworkProblem
    │   ├── ServerUnreachable             server_unreachable       30
    │   ├── JoinRefused                   join_refused             31
    │   ├── Superseded                    superseded               32
    │   ├── AddressUnavailable            address_unavailable      33
    │   ├── InsecureRefused               insecure_refused         34
    │   ├── ServerRolledBack              ledger_rolled_back       35
    │   └── TlsRefused                    tls_refused              36
    └── StoreProblem
        ├── RunFolderInUse                run_folder_in_use        40
        ├── RunFolderExists               run_folder_exists        41
        ├── StoreDamaged                  store_damaged            42
        └── StoreUnwritable               store_unwritable         43

``completed`` is exit code 0; 1 is a defect of ours (a traceback is shown); 2 is a wrong command line.
docs/exit-codes.md has one line for each, and a test compares the two.

A message says what was given, what was expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import ClassVar

__all__ = [
    "AddressUnavailable",
    "AttackError",
    "BudgetExhausted",
    "ByzULDPError",
    "ConfigError",
    "DataError",
    "InsecureRefused",
    "Interrupted",
    "JoinRefused",
    "ModelError",
    "NetworkProblem",
    "PrivacyError",
    "QuorumLost",
    "RuleError",
    "RunEnded",
    "RunFailed",
    "RunFolderExists",
    "RunFolderInUse",
    "ServerRolledBack",
    "ServerUnreachable",
    "StoreDamaged",
    "StoreProblem",
    "StoreUnwritable",
    "Superseded",
    "TlsRefused",
    "UsageProblem",
    "exit_code_of",
    "leaves",
    "nearest",
    "publicly",
]


class ByzULDPError(Exception):
    """The root: never raised itself."""

    status: ClassVar[str]
    exit_code: ClassVar[int]


class UsageProblem(ByzULDPError):
    """What was asked for cannot be done as it was asked."""


class ConfigError(UsageProblem):
    """A value in the experiment is missing, unknown or out of range."""

    status, exit_code = "config_invalid", 10


class DataError(UsageProblem):
    """A data set is missing, damaged, or cannot be dealt as asked."""

    status, exit_code = "data_unavailable", 11


class ModelError(UsageProblem):
    """A model cannot be built, loaded or trained under this configuration."""

    status, exit_code = "model_invalid", 12


class RuleError(UsageProblem):
    """An aggregation rule is unknown, or its conditions on n, f or its parameters do not hold."""

    status, exit_code = "rule_refused", 13


class AttackError(UsageProblem):
    """An attack is unknown, or its conditions do not hold."""

    status, exit_code = "attack_refused", 14


class PrivacyError(UsageProblem):
    """A privacy claim was asked for that would not be true."""

    status, exit_code = "privacy_refused", 15


class RunEnded(ByzULDPError):
    """A run ended, in good order, before its last round."""


class BudgetExhausted(RunEnded):
    """The next round would exceed the privacy budget."""

    status, exit_code = "budget_exhausted", 20


class QuorumLost(RunEnded):
    """Too few clients answered, for too long."""

    status, exit_code = "quorum_lost", 21


class Interrupted(RunEnded):
    """Ctrl-C or SIGTERM; the run can be resumed."""

    status, exit_code = "interrupted", 22


class RunFailed(RunEnded):
    """A process of the run died, or the model became non-finite."""

    status, exit_code = "failed", 23


class NetworkProblem(ByzULDPError):
    """A peer cannot be reached, or will not have us."""


class ServerUnreachable(NetworkProblem):
    """The parameter server did not answer for longer than configured."""

    status, exit_code = "server_unreachable", 30


class JoinRefused(NetworkProblem):
    """The parameter server refused to let a client join."""

    status, exit_code = "join_refused", 31


class Superseded(NetworkProblem):
    """A newer incarnation of the same identity has taken over."""

    status, exit_code = "superseded", 32


class AddressUnavailable(NetworkProblem):
    """The address cannot be bound."""

    status, exit_code = "address_unavailable", 33


class InsecureRefused(NetworkProblem):
    """An address beyond loopback was asked for without TLS."""

    status, exit_code = "insecure_refused", 34


class ServerRolledBack(NetworkProblem):
    """The parameter server's round or ledger went backwards: a restored snapshot."""

    status, exit_code = "ledger_rolled_back", 35


class TlsRefused(NetworkProblem):
    """A certificate is missing, foreign, expired, revoked, for another use, another name or another identity."""

    status, exit_code = "tls_refused", 36


class StoreProblem(ByzULDPError):
    """The run folder cannot be used as it is."""


class RunFolderInUse(StoreProblem):
    """Another process has this run folder, or this client's state, open."""

    status, exit_code = "run_folder_in_use", 40


class RunFolderExists(StoreProblem):
    """The run folder holds a run already."""

    status, exit_code = "run_folder_exists", 41


class StoreDamaged(StoreProblem):
    """A file of a run folder, or a client's state, is missing, torn, or not what it should be."""

    status, exit_code = "store_damaged", 42


class StoreUnwritable(StoreProblem):
    """A file of the run folder cannot be written (or read): a full disk, a read-only folder, missing rights."""

    status, exit_code = "store_unwritable", 43


def leaves(root: type[ByzULDPError] = ByzULDPError) -> Iterator[type[ByzULDPError]]:
    """All classes that name a status, in the order of the drawing."""
    for child in root.__subclasses__():
        if "status" in vars(child):
            yield child
        yield from leaves(child)


def exit_code_of(status: str) -> int:
    """The exit code of a status; ``completed`` is 0.

    Raises
    ------
    KeyError
        The status is not in the tree.
    """
    codes = {"completed": 0} | {leaf.status: leaf.exit_code for leaf in leaves()}
    return codes[status]


def publicly(status: str) -> str:
    """How a run ended, for everybody: one sentence per status, whatever happened in particular.

    Raises
    ------
    KeyError
        The status is not in the tree.
    """
    if status == "completed":
        return "all rounds are done"
    said = {leaf.status: (leaf.__doc__ or "").partition("\n")[0] for leaf in leaves()}
    return said[status]


def nearest(word: str, known: list[str]) -> str:
    """``did you mean 'x'?`` when something known is close, else what is known."""
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"

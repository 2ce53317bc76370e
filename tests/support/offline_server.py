"""The parameter server's own parts without a network, on a clock that a test moves.

:class:`OfflineServer` is one life of a server: real coordinator, membership, reception, inbox, round maker and run
folder. What its thread would do, and when its timers fire, is for the test to say; so is where it dies.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from common.config import Experiment
from common.errors import RunFolderExists
from common.learning.task import Task, build_task
from common.rpc import PROTOCOL_VERSION
from common.rpc.frames import Frame, decode_frame, tensor_frames
from common.rpc.v1 import parameter_server_pb2 as pb
from ps.broadcast import Broadcast
from ps.coordinator import Coordinator
from ps.faults import Fault
from ps.founding import genesis_of
from ps.identity import ANYBODY, Gate
from ps.inbox import Inbox
from ps.mechanism import mechanism_of, noise_of, opened
from ps.membership import Attendance, Membership
from ps.privacy.ledger import Budget, Ledger
from ps.privacy.released import open_for_mechanism
from ps.reception import Reception
from ps.round_maker import RoundMaker
from ps.round_policy import RoundPolicy
from ps.rounds import CloseRound
from ps.store import CommittedRound, RunStore
from ps.timing import RoundTiming

Rows = np.ndarray[Any, np.dtype[np.float32]]
T = TypeVar("T")
TURNS = 12
OVER = None
"""The end of a stream."""


class Killed(BaseException):
    """The server dies here."""


class TestClock(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until it is moved, and whose threads work when they are told to."""

    __test__ = False

    def __init__(self) -> None:
        self.now = 1000.0
        self.work: list[Callable[[], None]] = []
        super().__init__()

    def time(self) -> float:
        return self.now

    def run_in_executor(self, _executor: Any, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Two pieces of work: do it, then say so."""
        future = self.create_future()

        def do() -> None:
            try:
                say = partial(future.set_result, function(*arguments))
            except BaseException as problem:
                say = partial(future.set_exception, problem)
            self.work.insert(0, lambda: None if future.cancelled() else say())

        self.work.append(do)
        return future

    def settle(self, event: Callable[[], T] = lambda: None) -> T:  # type: ignore[assignment]
        """Let everything happen that can happen now, an event first; returns what it returns."""
        return self.run_until_complete(_settle(event))

    def advance(self, seconds: float) -> None:
        """Time passes, and every timer fires when it is due."""
        until = self.now + seconds
        self.settle()
        while (due := self.next_timer()) <= until:
            self.now = max(self.now, due)
            self.settle()
        self.now = until

    def jump(self, seconds: float) -> None:
        """Time has passed while nothing could happen: all timers that were due fire late."""
        self.now += seconds
        self.settle()

    def next_timer(self) -> float:
        return min((timer.when() for timer in self._timers()), default=float("inf"))

    def forget_timers(self) -> None:
        for timer in self._timers():
            timer.cancel()

    def _timers(self) -> list[asyncio.TimerHandle]:
        return [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]


async def _settle(event: Callable[[], T]) -> T:
    try:
        return event()
    finally:
        for _ in range(TURNS):
            await asyncio.sleep(0)


class Stream:
    """A PushMomentum call, message by message, and how it was answered."""

    def __init__(self, server: OfflineServer, caller: pb.Caller, round_id: int, row: Rows, chunk_bytes: int) -> None:
        header = pb.MomentumHeader(
            caller=caller,
            round_id=round_id,
            schema_hash=server.task.schema_hash,
            element_count=row.size,
        )
        self.client_id, self.incarnation, self.round_id, self.row = caller.client_id, caller.incarnation, round_id, row
        self.frames = [decode_frame(frame, pb.MomentumHeader) for frame in tensor_frames(header, row, chunk_bytes)]
        self.holds = False  # for a test to remember that it may be accepted
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        self.answer = server.loop.create_task(Reception(server.coordinator, self._arrive(), ANYBODY, self).receive())

    async def _arrive(self) -> AsyncIterator[Frame[pb.MomentumHeader]]:
        while (frame := await self._sent.get()) is not OVER:
            yield frame

    def send(self, count: int | None = None) -> None:
        """Some of the messages that are left, or all."""
        count = len(self.frames) if count is None else count
        for frame in self.frames[:count]:
            self._sent.put_nowait(frame)
        del self.frames[:count]

    def break_off(self) -> None:
        self._sent.put_nowait(OVER)

    # what a reception asks of its stream

    async def first(self, frames: AsyncIterator[Any]) -> Any:
        return await anext(frames)

    def claim(self, client_id: int) -> None:
        assert client_id == self.client_id


class OfflineServer:
    """One life of a server on a run folder.

    Parameters
    ----------
    closing
        Told of every round that is closed, with the rows as they lie in the inbox, before it is made.
    published
        Told of every model that leaves.
    """

    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        loop: TestClock,
        *,
        fault: Fault,
        closing: Callable[[CloseRound, Rows], None],
        published: Callable[[CommittedRound], None],
    ) -> None:
        self.experiment, self.loop, self.fault = experiment, loop, fault
        self.task = task_of(experiment.model_dump_json())
        self.events: list[dict[str, Any]] = []
        self.store, ledger = self._opened(folder)
        try:
            budget = Budget.of(ledger.genesis)
            mechanism = mechanism_of(experiment, budget, lambda: self.task.dataset.train.labels)
            inbox = Inbox(mechanism.num_clients, self.task.num_parameters, mechanism.condition)
            maker = RoundMaker(
                experiment,
                store=self.store,
                ledger=ledger,
                budget=budget,
                mechanism=mechanism,
                noise=noise_of(experiment, self.task.num_parameters),
                inbox=inbox,
                fault=fault,
            )
            make = maker.make

            def made(closed: CloseRound, timing: RoundTiming) -> Any:
                closing(closed, open_for_mechanism(inbox.rows()).numpy().copy())
                return make(closed, timing)

            maker.make = made  # type: ignore[method-assign]
            self.coordinator = Coordinator(
                experiment,
                store=self.store,
                maker=maker,
                inbox=inbox,
                membership=self._membership,
                report=self.events.append,
                evaluate=published,
                fault=fault,
            )
        except BaseException:
            self.store.close()
            raise
        self.running = loop.create_task(self.coordinator.run())

    def _opened(self, folder: Path) -> tuple[RunStore, Ledger]:
        """A new run, or the one that the folder holds."""
        experiment, task = self.experiment, self.task
        with suppress(RunFolderExists):
            previous, _, mechanism = opened(experiment, lambda: task.dataset.train.labels)
            genesis = genesis_of(experiment, mechanism, previous, task.num_parameters, run_id=secrets.token_hex(8))
            store, _ = RunStore.create(
                folder,
                run_id=genesis.run_id,
                configuration=experiment.model_dump(mode="json"),
                fingerprint=experiment.fingerprint(),
                genesis_json=genesis.to_json(),
                theta=task.model.parameters_flat().numpy().copy(),
                fault=self.fault,
            )
            return store, Ledger.opened(genesis)
        store = RunStore.open(folder, fault=self.fault)
        return store, Ledger.restored((text, head) for _, text, head in store.ledger_rows())

    def _membership(self, roster: Any, clock: Callable[[], float], live_changed: Callable[[], None]) -> Membership:
        return Membership(
            roster,
            run_id=self.store.run_id,
            fingerprint=self.experiment.fingerprint(),
            schema_hash=self.task.schema_hash,
            token_hashes={i: sha256(_token(i).encode()).digest() for i in range(self.experiment.federation.clients)},
            gate=Gate(self.experiment.network.tls, self.experiment.federation.clients),
            clock=clock,
            live_changed=live_changed,
        )

    @property
    def policy(self) -> RoundPolicy:
        return self.coordinator.rounds.policy

    def join(self, client_id: int) -> pb.Caller:
        request = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            client_id=client_id,
            token=_token(client_id),
            schema_hash=self.task.schema_hash,
            fingerprint=self.experiment.fingerprint(),
        )
        incarnation = self.coordinator.join(request, ANYBODY)
        return pb.Caller(run_id=self.store.run_id, client_id=client_id, incarnation=incarnation)

    def attend(self, caller: pb.Caller) -> Attendance:
        return self.coordinator.members.attend([caller], ANYBODY)

    def leave(self, caller: pb.Caller) -> None:
        self.coordinator.members.leave(caller, ANYBODY)

    def push(self, caller: pb.Caller, round_id: int, row: Rows, chunk_bytes: int) -> Stream:
        return Stream(self, caller, round_id, row, chunk_bytes)

    async def pull(self, round_id: int) -> bytes | None:
        """The whole broadcast of the open round's model, if that is ``round_id`` or a later one."""
        answer = await self.coordinator.model(round_id, 0.0)
        if not isinstance(answer, Broadcast):
            return None
        return b"".join(answer.frame(index) or b"" for index in range(answer.count))

    def die(self) -> None:
        """Nothing of this life goes on; the files are closed as the system closes those of a dead process."""
        self.loop.work.clear()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(_ended(tasks))
        self.loop.forget_timers()
        self.store.close()


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _token(client_id: int) -> str:
    return f"token of {client_id}"


@cache
def task_of(experiment_json: str) -> Task:
    return build_task(Experiment.model_validate_json(experiment_json))

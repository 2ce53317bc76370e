"""The inbox: one (n, d) float32 buffer, one row per identity, in which the momenta land.

A row has one writer at a time. It counts only once it is complete: its element count and digest were checked against
the row's own content, and it was conditioned (see :meth:`ps.update.Mechanism.condition`). Opening and closing
a round changes the fence, after which every older writer is refused; so no late byte can reach a matrix that is
being aggregated. The inbox is keyed by identity, never by incarnation: one identity, one row.

On CUDA the buffer is pinned and a complete row travels to the device at once, on a stream of its own, so that the
matrix is there when the round closes. (A chunk cannot: a row has to be whole to be conditioned.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch

from common.rpc.digests import digest_of
from ps.privacy.released import Unreleased

__all__ = ["Inbox", "Outcome", "RowError", "Writer"]


class Outcome(Enum):
    """What became of a momentum that arrived in full."""

    ACCEPTED = "accepted"
    NON_FINITE = "non_finite"


class RowError(Exception):
    """A write that the inbox turns away; ``reason`` names which."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(eq=False, slots=True)
class Writer:
    """One stream's right to write one row in one round."""

    client_id: int
    fence: int
    received: int = 0  # bytes


@dataclass(slots=True)
class _Row:
    writer: Writer | None = None
    digest: bytes | None = None  # of the complete momentum as it arrived
    outcome: Outcome = Outcome.ACCEPTED
    touched: bool = False  # holds bytes of some round


@dataclass
class Inbox:
    """The buffer and its bookkeeping.

    Parameters
    ----------
    num_clients, num_parameters
        n and d.
    condition
        Makes a complete row (d,) safe in place; False if it was not finite, and is zero now.
    device
        Where :meth:`rows` returns the matrix.
    """

    num_clients: int
    num_parameters: int
    condition: Callable[[torch.Tensor], bool]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        on_cuda = self.device.type == "cuda"
        shape = (self.num_clients, self.num_parameters)
        self._host = torch.zeros(shape, dtype=torch.float32, pin_memory=on_cuda)
        self._bytes = self._host.numpy().view(np.uint8)
        self._device = torch.zeros(shape, dtype=torch.float32, device=self.device) if on_cuda else self._host
        self._travel = torch.cuda.Stream(self.device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._rows = [_Row() for _ in range(self.num_clients)]
        self._fence = 0
        self._open = False

    @property
    def row_bytes(self) -> int:
        return 4 * self.num_parameters

    def open(self) -> None:
        """Forget the last round and let writers in."""
        self._fence += 1
        self._open = True
        if self._travel is not None:  # nothing overtakes what still reads the last round's rows
            self._travel.wait_stream(torch.cuda.current_stream(self.device))
        for row in self._rows:
            row.writer, row.digest = None, None

    def begin(self, client_id: int) -> Writer:
        """The right to write a row.

        Raises
        ------
        RowError
            ``busy``: another stream is writing it; ``closed``: no round is collecting.
        """
        row = self._rows[client_id]
        if not self._open:
            raise RowError("closed", "the round is closed")
        if row.writer is not None:
            raise RowError("busy", "another stream is writing this momentum")
        if row.digest is not None:
            raise RowError("complete", "this momentum is complete")
        row.writer = Writer(client_id, self._fence)
        row.touched = True
        return row.writer

    def write(self, writer: Writer, offset: int, payload: memoryview) -> None:
        """Put a chunk where it belongs: chunks come in order and without gaps.

        Raises
        ------
        RowError
            ``closed``: the round closed meanwhile; ``order``: not the next byte; ``too_large``: beyond the row.
        """
        self._check(writer)
        if offset != writer.received:
            raise RowError("order", f"a chunk starts at byte {offset}, expected {writer.received}")
        end = offset + len(payload)
        if end > self.row_bytes:
            raise RowError("too_large", f"{end} bytes or more, expected {self.row_bytes}")
        self._bytes[writer.client_id, offset:end] = np.frombuffer(payload, dtype=np.uint8)
        writer.received = end

    def digest(self, writer: Writer) -> bytes:
        """Of the row's content so far (:mod:`common.rpc.digests`)."""
        return digest_of(self._bytes[writer.client_id, : writer.received].data)

    def complete(self, writer: Writer, element_count: int, announced: bytes, found: bytes) -> Outcome:
        """Accept the row if all of it is there and its digest is the announced one; condition it.

        Raises
        ------
        RowError
            ``closed``, ``incomplete`` or ``checksum``; the row counts as absent.
        """
        self._check(writer)
        if element_count != self.num_parameters or writer.received != self.row_bytes:
            raise RowError(
                "incomplete",
                f"{writer.received} bytes and a count of {element_count}, expected {self.row_bytes} bytes and "
                f"{self.num_parameters} elements",
            )
        if announced != found:
            raise RowError("checksum", "the digest is not that of the bytes received")
        row = self._rows[writer.client_id]
        vector = self._host[writer.client_id]
        row.outcome = Outcome.ACCEPTED if self.condition(vector) else Outcome.NON_FINITE
        row.writer, row.digest = None, found
        self._send(writer.client_id)
        return row.outcome

    def abandon(self, writer: Writer) -> None:
        """A stream broke off: the row is free for another try."""
        row = self._rows[writer.client_id]
        if row.writer is writer:
            row.writer = None

    def expel(self, client_id: int) -> None:
        """Whoever is writing this row is fenced out: the row is free for a new incarnation."""
        self._rows[client_id].writer = None

    def digest_of(self, client_id: int) -> bytes | None:
        """The digest of an identity's complete momentum, or None."""
        return self._rows[client_id].digest

    def close(self) -> list[int]:
        """Fence every writer out; rows that are not complete become zero. Returns the complete identities, sorted."""
        self._open = False
        self._fence += 1
        complete = []
        for client_id, row in enumerate(self._rows):
            row.writer = None
            if row.digest is not None:
                complete.append(client_id)
            elif row.touched:
                self._host[client_id].zero_()
                self._send(client_id)
                row.touched = False
        return complete

    def rows(self) -> Unreleased[torch.Tensor]:
        """The matrix (n, d) of a closed round: no copy, valid until the next :meth:`open`."""
        if self._travel is not None:
            self._travel.synchronize()
        return Unreleased(self._device)

    def row(self, client_id: int) -> Unreleased[torch.Tensor]:
        """One complete row (d,) on the host."""
        return Unreleased(self._host[client_id])

    def _send(self, client_id: int) -> None:
        """Begin to copy a row to the device; it stays as it is until :meth:`rows` has waited for it."""
        if self._travel is not None:
            with torch.cuda.stream(self._travel):
                self._device[client_id].copy_(self._host[client_id], non_blocking=True)

    def _check(self, writer: Writer) -> None:
        if not self._open or writer.fence != self._fence or self._rows[writer.client_id].writer is not writer:
            raise RowError("closed", "the round closed while the momentum was on its way")

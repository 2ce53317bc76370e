"""What an inbox on CUDA asks of the device, in which order; the device is a record of what it was asked.

Whether the device does it is seen by ``benchmarks/gpu_check.sh``, where there is one.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.rpc.digests import digest_of
from ps.inbox import Inbox
from ps.privacy.released import open_for_mechanism

N, D = 3, 4


class Matrix:
    """The device's: a copy of a row is kept back until its stream has been waited for."""

    def __init__(self, device):
        self._device, self.values = device, torch.full((N, D), -1.0)

    def __getitem__(self, client_id):
        return SimpleNamespace(copy_=lambda row, non_blocking: self._copy(client_id, row, non_blocking))

    def _copy(self, client_id, row, non_blocking):
        assert non_blocking
        assert self._device.current == "travel"
        self._device.said.append(("copy", client_id))
        self._device.pending.append((client_id, row.clone()))


class Device:
    """``torch`` as :mod:`ps.inbox` sees it."""

    float32 = torch.float32

    def __init__(self):
        self.said, self.pending, self.current = [], [], "default"
        self.matrix = Matrix(self)
        self.cuda = SimpleNamespace(
            Stream=lambda _: SimpleNamespace(wait_stream=self._wait, synchronize=self._synchronize),
            current_stream=lambda _: "default",
            stream=self._on,
        )

    def zeros(self, shape, dtype, pin_memory=None, device=None):
        assert pin_memory or device is not None
        return self.matrix if device is not None else torch.zeros(shape, dtype=dtype)

    @contextmanager
    def _on(self, _stream):
        self.current = "travel"
        yield
        self.current = "default"

    def _wait(self, stream):
        self.said.append(("wait for", stream))

    def _synchronize(self):
        self.said.append(("synchronize",))
        for client_id, row in self.pending:
            self.matrix.values[client_id] = row
        self.pending.clear()


@pytest.fixture
def device(monkeypatch):
    found = Device()
    monkeypatch.setattr("ps.inbox.torch", found)
    return found


def push(inbox, client_id, value, part=1.0):
    row = np.full(D, value, dtype=np.float32)
    writer = inbox.begin(client_id)
    inbox.write(writer, 0, memoryview(row.tobytes())[: int(part * 4 * D)])
    if part == 1.0:
        inbox.complete(writer, D, digest_of(row.tobytes()), inbox.digest(writer))


def test_a_row_travels_as_soon_as_it_is_complete_and_the_round_waits_for_all_of_them(device):
    inbox = Inbox(N, D, lambda row: bool(row.mul_(2.0).any()), torch.device("cuda"))
    inbox.open()
    assert device.said == [("wait for", "default")]
    push(inbox, 1, 5.0)
    assert device.said[1:] == [("copy", 1)]
    push(inbox, 0, 3.0, part=0.5)
    assert device.said[2:] == []
    assert inbox.close() == [1]
    assert device.said[2:] == [("copy", 0)]  # half a row counts for nothing
    matrix = open_for_mechanism(inbox.rows())
    assert device.said[3:] == [("synchronize",)]
    assert matrix.values[1].tolist() == [10.0] * D  # conditioned before it left
    assert matrix.values[0].tolist() == [0.0] * D


def test_a_row_of_the_round_before_is_zero_on_the_device_when_nobody_sends_it_again(device):
    inbox = Inbox(N, D, lambda _row: True, torch.device("cuda"))
    inbox.open()
    push(inbox, 2, 7.0)
    inbox.close()
    assert open_for_mechanism(inbox.rows()).values[2].tolist() == [7.0] * D
    inbox.open()
    assert inbox.close() == []
    assert open_for_mechanism(inbox.rows()).values[2].tolist() == [0.0] * D

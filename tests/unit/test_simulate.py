"""``make simulate``: what it says of a failure is enough to see it again."""

from __future__ import annotations

import pytest
import simulate
from round_mutants import ClosesBelowQuorum
from round_stage import Stage


def test_a_failure_comes_with_its_seed_a_short_story_and_the_command_that_plays_it_again(monkeypatch, capsys):
    monkeypatch.setattr(Stage, "rounds_type", ClosesBelowQuorum)
    with pytest.raises(SystemExit) as failure:
        simulate.play(range(1000, 4000), processes=1)
    first_line, steps, *story, again, in_full = str(failure.value).splitlines()
    seed = int(again.removeprefix("Again: make simulate SCHEDULES=1 SEED="))
    assert first_line.startswith(f"seed {seed}: AssertionError: ")
    assert "below the quorum" in story[-1]
    assert "steps, of which" in steps
    with pytest.raises(SystemExit) as repeated:
        simulate.play(range(seed, seed + 1), processes=1)
    assert str(repeated.value) == str(failure.value)

    arguments = in_full.removeprefix("In full: python tests/support/simulate.py ").split()
    monkeypatch.setattr("sys.argv", ["simulate", *arguments, "--processes", "1"])
    with pytest.raises(SystemExit):
        simulate.main()
    assert f"seed {seed}\n" in capsys.readouterr().out


def test_progress_and_pace_are_told(monkeypatch, capsys):
    monkeypatch.setattr(simulate, "PIECE", 100)
    seen = simulate.play(range(250), processes=1)
    assert seen["completed"] > 100
    assert "250 of 250, " in capsys.readouterr().err

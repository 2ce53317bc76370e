"""The privacy claim: how much noise, what was spent, what must not leave, and under which premises.

:mod:`~ps.privacy.calibration` turns (ε, δ, T) into a noise multiplier and back; :mod:`~ps.privacy.ledger` records what
was released and refuses what does not fit; :mod:`~ps.privacy.released` keeps un-noised values in;
:mod:`~ps.privacy.premises` says what the claim assumes. None of them reaches the network.
"""

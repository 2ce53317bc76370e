"""The privacy claim: what was spent, what must not leave, and under which premises.

:mod:`~ps.privacy.ledger` records what was released and refuses what does not fit; :mod:`~ps.privacy.released` keeps
un-noised values in; :mod:`~ps.privacy.premises` says what the claim assumes. None of them reaches the network. How much
noise a claim needs is in :mod:`common.privacy`, since clients account for themselves too.
"""

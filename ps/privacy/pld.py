"""An independent check of our ε: the privacy loss distribution of Google's dp-accounting.

Our closed formula and this library share nothing but the question. A release is a plain Gaussian event under the
add-or-remove relation, since the sensitivity in z is already the one for a replaced client; under that library's
replacement relation the factor two would be counted again.
"""

from __future__ import annotations

import math
from collections import Counter

from ps.privacy.ledger import Ledger

__all__ = ["epsilon_pld"]

_LARGEST = 200.0
_SMALLEST = 1e-12


def epsilon_pld(ledger: Ledger, delta: float) -> float | None:
    """ε at ``delta`` of all releases in the ledger, earlier runs' included, by a numerical accountant.

    Agrees with the ``exact`` conversion to about 1e-5 relative: the library rounds losses up to a grid. None where the
    library's plain Gaussian is not what was added (discrete noise), without any release, beyond ε = 200 (the grid
    grows with ε, and at 10⁵ takes all memory), and below δ = 1e-12 (the tails that the library cuts off).

    Notes
    -----
    Importing the library takes some seconds; nothing in a round calls this.
    """
    if ledger.genesis.mechanism != "gaussian" or ledger.spent is None or ledger.spent == 0:
        return None
    if ledger.epsilon_spent(delta) > _LARGEST or delta < _SMALLEST:
        return None
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    for multiplier, times in Counter(entry.noise_multiplier for entry in ledger.entries).items():
        accountant.compose(SelfComposedDpEvent(GaussianDpEvent(multiplier), times))
    if ledger.genesis.carried:
        accountant.compose(GaussianDpEvent(1.0 / math.sqrt(ledger.genesis.carried)))
    return float(accountant.get_epsilon(delta))

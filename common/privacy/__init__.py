"""The arithmetic of (ε, δ): what the server accounts with, and what a client checks it by.

:mod:`~common.privacy.calibration` turns (ε, δ, T) into a noise multiplier and back; :mod:`~common.privacy.conversions`
holds the conversions between ε, δ and μ.
"""

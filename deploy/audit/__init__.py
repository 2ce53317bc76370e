"""The privacy audit: an empirical lower bound on ε, through real parameter servers over real RPC.

:mod:`canary` decides what is sent and how what it moved is read again, :mod:`setting` what is run, :mod:`server`
keeps the parameter servers, :mod:`observation` plays one run against one, :mod:`suite` counts. The statistics are
:mod:`ps.privacy.audit`'s, and, of the noise itself, :mod:`ps.privacy.residuals`'s.
"""

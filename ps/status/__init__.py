"""The live status page of a parameter server, and its figures for Prometheus: read-only, on a thread of their own."""

from ps.status.facts import RunFacts
from ps.status.members import Members
from ps.status.page import StatusPage

__all__ = ["Members", "RunFacts", "StatusPage"]

"""Addresses: reading them, and refusing to leave this machine without protection."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from common.errors import ConfigError, InsecureRefused

__all__ = ["Address", "parse_address", "refuse_insecure"]


@dataclass(frozen=True)
class Address:
    """A host and a port; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether nothing beyond this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str, *, setting: str = "network.address") -> Address:
    """Read ``host:port``; an IPv6 host stands in brackets.

    Raises
    ------
    ConfigError
        There is no port, or it is not a number up to 65535.
    """
    host, separator, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not bracketed):
        raise ConfigError(f"{setting} = {text!r}: expected host:port, for instance 127.0.0.1:8080 or [::1]:8080")
    return Address(host[1:-1] if bracketed else host, int(port))


def refuse_insecure(address: Address, *, insecure: bool, tls: bool = False) -> None:
    """Let an unprotected address beyond loopback pass only when that was asked for by name.

    Raises
    ------
    InsecureRefused
        Join tokens and momenta would travel in the clear over a network.
    """
    if not (address.is_loopback or insecure or tls):
        raise InsecureRefused(
            f"{address} is not a loopback address: join tokens and momenta would travel unencrypted. Make "
            "certificates (`byzuldp certs`) and set network.tls, use 127.0.0.1, or accept the risk with --insecure "
            "(network.insecure = true)"
        )

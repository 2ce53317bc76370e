"""A network in namespaces: the parameter server and each peer in one of their own, joined by a bridge in another.

Nothing of it has a name outside, and nothing outlives its makers. A namespace is held by a descriptor of this process
and by the processes that live there; when the last of them is gone the kernel takes it away, with its devices, routes
and filters, whatever ended them. The machine's own interfaces, routes and filters are never touched, so two labs
cannot meet, and there is nothing for a janitor to do.

Inside, the devices are::

    peer k:  eth0 ── hub: v<k> ── br0 ── v-ps :hub ── eth0  :ps

Neighbours are known beforehand, so a cut line is silent: there is no ARP to fail, which would tell the sender that the
host is unreachable. What a sender's device would split into packets is split before it (no segmentation offload), so
that a packet that is lost is one packet.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.errors import RunFailed
from deploy.chaos.backend import PS
from deploy.chaos.namespaces import CLONE_NEWNET, CLONE_NEWUSER, enter, unshare

__all__ = ["HUB", "PORT", "Star"]

HUB = "hub"
PORT = 20_001  # below the ports that a new namespace gives to outgoing connections
PREFIX, PREFIX_BITS = "198.18", 15  # for tests of networks, RFC 2544
MOST_PEERS = 1000  # a bridge of Linux has 1024 ports
CONGESTION_CONTROLS = ("cubic", "reno")  # wanted, in this order; a kernel lets a namespace choose among some of its own
COMMAND_S = 30.0


class Star:
    """The namespaces ``hub``, ``ps`` and one for each peer.

    All calls in one thread: the one that made it is the one that goes inside and comes back.

    Parameters
    ----------
    peers
        At most :data:`MOST_PEERS`.

    Raises
    ------
    RunFailed
        It could not be made; nothing is left.
    """

    def __init__(self, peers: Sequence[str]) -> None:
        if len(peers) > MOST_PEERS:
            raise RunFailed(f"{len(peers)} peers: a network in namespaces has room for {MOST_PEERS}")
        self._numbers = {PS: 0} | {peer: number for number, peer in enumerate(peers, start=1)}
        self._spaces: dict[str, int] = {}
        self.congestion_control = "unknown"
        try:
            self._home = _private_home()
            for name in (HUB, *self._numbers):
                self._new_space(name)
            self._connect()
        except OSError as problem:
            self.close()
            raise RunFailed(f"the network of {len(peers)} peers could not be made: {problem}") from None
        except BaseException:
            self.close()
            raise

    @property
    def peers(self) -> list[str]:
        return [name for name in self._numbers if name != PS]

    def ip(self, name: str) -> str:
        """The address of ``ps`` or of a peer."""
        number = self._numbers[name] + 1
        return f"{PREFIX}.{number >> 8}.{number & 255}"

    def port_device(self, name: str) -> str:
        """The device in the hub that leads to ``ps`` or to a peer."""
        return "v-ps" if name == PS else f"v{self._numbers[name]}"

    def number(self, peer: str) -> int:
        """Tells a peer's devices from those of others."""
        return self._numbers[peer]

    def path(self, name: str) -> Path:
        """A namespace as a file to give to ``setns``; good as long as this process has not closed the star."""
        return Path(f"/proc/{os.getpid()}/fd/{self._spaces[name]}")

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """This thread, and what it starts, in a namespace for a while."""
        enter(self.path(name), CLONE_NEWNET)
        try:
            yield
        finally:
            enter(Path(f"/proc/self/fd/{self._home}"), CLONE_NEWNET)

    def run(self, name: str, *command: str, text: str | None = None) -> str:
        """Run a command in a namespace; returns what it printed.

        Parameters
        ----------
        text
            For its standard input.

        Raises
        ------
        RunFailed
            It failed, with what it said.
        """
        with self.inside(name):
            try:
                done = subprocess.run(  # noqa: S603 - names and numbers of our own making
                    command,
                    input=text or "",
                    text=True,
                    capture_output=True,
                    timeout=COMMAND_S,
                    check=False,
                    start_new_session=True,  # Ctrl-C is for us
                )
            except (OSError, subprocess.TimeoutExpired) as problem:
                raise RunFailed(f"{' '.join(command)} in the namespace {name}: {problem}") from None
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            given = f" < {text.strip()!r}" if text else ""
            raise RunFailed(f"{' '.join(command)}{given} in the namespace {name} failed ({done.returncode}): {said}")
        return done.stdout

    def batch(self, name: str, lines: Sequence[str]) -> None:
        """Run ``ip`` commands in a namespace."""
        self.run(name, "ip", "-batch", "-", text="\n".join(lines) + "\n")

    def close(self) -> None:
        """Let go of the namespaces; a second call does nothing."""
        while self._spaces:
            os.close(self._spaces.popitem()[1])
        home, self._home = getattr(self, "_home", -1), -1
        if home >= 0:
            os.close(home)

    def _new_space(self, name: str) -> None:
        try:
            unshare(CLONE_NEWNET)
        except OSError as problem:
            raise RunFailed(f"no network namespace can be made: {problem.strerror}") from None
        try:
            self._spaces[name] = _open_net()
            for scope in ("all", "default"):  # its neighbour discovery is nobody's traffic
                with contextlib.suppress(FileNotFoundError):
                    Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").write_text("1", encoding="ascii")
            self.congestion_control = _choose_congestion_control()
        finally:
            enter(Path(f"/proc/self/fd/{self._home}"), CLONE_NEWNET)

    def _connect(self) -> None:
        lines = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
        for name in self._numbers:
            port = self.port_device(name)
            lines += [
                f"link add {port} type veth peer name eth0 address {self._mac(name)} netns {self.path(name)}",
                f"link set {port} master br0 up",
            ]
        self.batch(HUB, lines)
        for name in self._numbers:
            neighbours = self.peers if name == PS else [PS]
            self.batch(
                name,
                [
                    "link set lo up",
                    f"addr add {self.ip(name)}/{PREFIX_BITS} dev eth0",
                    "link set eth0 gso_max_segs 1 up",
                    *(
                        f"neigh add {self.ip(other)} lladdr {self._mac(other)} nud permanent dev eth0"
                        for other in neighbours
                    ),
                ],
            )

    def _mac(self, name: str) -> str:
        number = self._numbers[name]
        return f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"


def _private_home() -> int:
    """Where this thread comes back to: its namespace; or, without the right to make others, a new one that is ours.

    In the latter case this process becomes root of a user namespace, in which it has all the rights it needs; files
    that it makes are still its user's.
    """
    home = _open_net()
    try:
        unshare(CLONE_NEWNET)
        enter(Path(f"/proc/self/fd/{home}"), CLONE_NEWNET)
    except PermissionError:
        os.close(home)
    else:
        return home
    user, group = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    except OSError as problem:
        raise RunFailed(
            f"no network namespace can be made: this user may not, nor a user namespace to do it in ({problem}; "
            "that needs a process with a single thread, and a system that allows it); run it as root"
        ) from None
    home = _open_net()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=False)  # noqa: S607 - found as all other tools are
    return home


def _choose_congestion_control() -> str:
    """Set that of this namespace; returns what it is."""
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    for wanted in CONGESTION_CONTROLS:
        try:
            setting.write_text(wanted, encoding="ascii")
            break
        except OSError:  # not here, or not for us
            continue
    return setting.read_text(encoding="ascii").strip()


def _open_net() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

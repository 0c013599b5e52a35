"""Two simulated hosts: network namespaces with a link between them that can be cut. `hosts.py WORKER FOLDER`.

It has to run in a network namespace of its own, as root there: `unshare -n` does that for root, `unshare -rn` for
others where the system lets them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["WAYS", "possible_way", "simulate"]

WAYS = (
    ("unshare", "--net"),
    ("unshare", "--map-root-user", "--net"),
    ("bwrap", "--unshare-net", "--dev-bind", "/", "/"),
)
"""Commands that run another one in a network namespace of its own."""
CHECK = "ip link add ppa type veth peer name ppb && unshare --net true"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = "29477"


def possible_way() -> tuple[tuple[str, ...] | None, str]:
    """Return the first of the ways that works here, or None and what each of them said."""
    reasons = []
    for way in WAYS:
        try:
            done = subprocess.run([*way, "sh", "-c", CHECK], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{' '.join(way)}: {error}")
            continue
        if done.returncode == 0:
            return way, ""
        reasons.append(f"{' '.join(way)}: {done.stderr.strip()}")
    return None, "; ".join(reasons)


class Host:
    """One namespace, and what runs in it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.link = f"pp{'ab'[number]}"
        # It keeps the namespace alive.
        self.holder = subprocess.Popen(["unshare", "--net", "sleep", "600"])
        ours, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{self.holder.pid}/ns/net")
        while theirs.readlink() == ours.readlink():
            time.sleep(0.01)
        self.agent: subprocess.Popen[bytes] | None = None

    def command(self, *words: str) -> list[str]:
        """Return a command that runs on this host."""
        return ["nsenter", "--net", f"--target={self.holder.pid}", *words]

    def do(self, *words: str) -> None:
        """Run a command here."""
        subprocess.run(self.command(*words), check=True)

    def connect(self) -> None:
        """Bring the network up."""
        self.do("ip", "link", "set", "lo", "up")
        self.do("ip", "address", "add", f"{ADDRESSES[self.number]}/24", "dev", self.link)
        self.do("ip", "link", "set", self.link, "up")

    def start(self, worker: str, folder: Path) -> None:
        """Start torchrun with one process."""
        words = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(self.number),
            "--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", PORT, worker, str(folder),
        ]  # fmt: skip
        log = (folder / f"log-{self.number}").open("wb")
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.link}
        self.agent = subprocess.Popen(
            self.command(*words), env=environment, stdout=log, stderr=log, start_new_session=True
        )

    def end(self) -> None:
        """End what is left of it."""
        for process in (self.agent, self.holder):
            if process is not None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()


def simulate(worker: str, folder: Path, seconds: float) -> None:
    """Run a worker on two hosts; it asks for the link to be cut and to be joined again by files in the folder."""
    hosts = [Host(0), Host(1)]
    try:
        subprocess.run(["ip", "link", "add", "ppa", "type", "veth", "peer", "name", "ppb"], check=True)
        for host in hosts:
            subprocess.run(["ip", "link", "set", host.link, "netns", str(host.holder.pid)], check=True)
            host.connect()
        for host in hosts:
            host.start(worker, folder)
        end = time.monotonic() + seconds
        for number in (1, 2):
            if not _wait(lambda number=number: (folder / f"cut-{number}").exists(), end, hosts):
                return
            hosts[0].do("ip", "link", "set", "ppa", "down")
            (folder / f"is-cut-{number}").touch()
            if number == 1:
                _wait(lambda: all((folder / f"joins-{rank}").exists() for rank in range(2)), end, hosts)
                hosts[0].do("ip", "link", "set", "ppa", "up")
        dones = [folder / f"done-{rank}" for rank in range(2)]
        if _wait(lambda: all(done.exists() and done.read_text() for done in dones), end, hosts):
            # Processes end, although the way between them is cut.
            pids = [done.read_text() for done in dones]
            if _wait(lambda: not any(_runs(pid) for pid in pids), end, hosts):
                (folder / "ended").touch()
    finally:
        for host in hosts:
            host.end()


def _runs(pid: str) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def _wait(ready: Callable[[], bool], end: float, hosts: list[Host]) -> bool:
    while not ready():
        ended = not ready() and all(host.agent is not None and host.agent.poll() is not None for host in hosts)
        if ended or time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


if __name__ == "__main__":
    simulate(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))

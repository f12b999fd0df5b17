"""A Slurm cluster: a controller and nodes, each in a network namespace with its own host name.

The cluster uses the system's munged, slurmctld and slurmd (Debian packages slurmctld, slurmd, slurm-client and munge).
They write only to one directory, which is removed when the cluster is closed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hosts.namespaces import enter
from hosts.network import Network, ipv4
from launching import ENVIRONMENT, kill, processes_with, wait_until

from clusters.programs import SYSTEM

_PATH = f"{Path(sys.executable).parent}:{SYSTEM}"
_CORES = 4  # per node, regardless of the machine
# /etc/hosts is replaced by the cluster's, so that the names of the nodes can be resolved as on a real cluster.
_INSIDE = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"']


class Cluster:
    """Nodes h1, h2, ... and a controller on h0, which considers a node lost after ten seconds without a response."""

    def __init__(self, nodes: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="paceline-slurm-"))
        self.directory.chmod(0o755)  # munged requires its socket to be accessible to all users
        name, value = "PACELINE_TEST_MARK", secrets.token_hex(8)
        self._mark = f"{name}={value}"
        self.environment = {
            **{key: text for key, text in ENVIRONMENT.items() if not key.startswith("SLURM_")},
            name: value,
            "PATH": _PATH,
            "SLURM_CONF": str(self.directory / "slurm.conf"),
            "HOME": str(self.directory),
        }
        self._started: list[subprocess.Popen[bytes]] = []
        self.network = Network(nodes + 1, 1, 1500, None, None)
        try:
            self._configure(nodes)
            self._serve(nodes)
        except BaseException:
            self.close()
            raise

    def run(self, *words: str, timeout_s: float = 120, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs a command on the controller's machine and waits for its exit."""
        with open(self.directory / "out", "w+") as out, open(self.directory / "err", "w+") as err:
            process = self._start(0, [*words], out.fileno(), err.fileno(), more)
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
                err.write(f"\n{words[0]} was still running after {timeout_s:.0f} s; {self.logs()}")
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(words, code, out.read(), err.read())

    def state_of(self, job: str) -> str:
        """Returns the state of a job, such as RUNNING."""
        said = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return said.partition("JobState=")[2].split(" ")[0]

    def lose(self, node: int, silently: bool = True) -> None:
        """Kills all processes of a node; with `silently`, its network is removed first, as in a power loss."""
        if silently:
            self.network.inside[node].configure("ip", ["link set eth0 down"])

        def ended() -> bool:
            left = self._processes_of(node)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        wait_until(ended)

    def wait(self, condition: Callable[[], object], timeout_s: float) -> None:
        try:
            wait_until(condition, timeout_s)
        except AssertionError:
            raise AssertionError(f"it did not happen within {timeout_s:.0f} s; {self.logs()}") from None

    def logs(self) -> str:
        """Returns the last lines of the logs, for an error message."""
        parts = [f"--- {path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.directory.glob("*.log"))]
        return "\n".join(["the cluster's logs:", *parts])

    def close(self) -> None:
        for process in reversed(self._started):
            process.kill()
            process.wait()
        kill(processes_with(self._mark))
        self.network.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _configure(self, nodes: int) -> None:
        here = self.directory
        known = "".join(f"{ipv4(host)} h{host}\n" for host in range(nodes + 1))
        (here / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        (here / "state").mkdir()
        (here / "munge.key").write_bytes(secrets.token_bytes(1024))
        (here / "munge.key").chmod(0o600)
        machines = "".join(
            f"NodeName=h{node} NodeAddr={ipv4(node)} CPUs={_CORES} State=UNKNOWN\n" for node in range(1, nodes + 1)
        )
        (here / "slurm.conf").write_text(f"""ClusterName=paceline
SlurmctldHost=h0({ipv4(0)})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket
CredType=cred/munge
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool-%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=5
KillWait=5
{machines}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")

    def _serve(self, nodes: int) -> None:
        here = self.directory
        self._daemon(
            0,
            *("munged", "--foreground", "--force", f"--key-file={here}/munge.key", f"--socket={here}/munge.socket"),
            *(f"--pid-file={here}/munge.pid", f"--log-file={here}/munged.log", f"--seed-file={here}/munge.seed"),
        )
        wait_until((here / "munge.socket").exists)
        self._daemon(0, "slurmctld", "-D")
        for node in range(1, nodes + 1):
            self._daemon(node, "slurmd", "-D")
        self.wait(lambda: self._idle() == nodes, 60)

    def _idle(self) -> int:
        said = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").stdout
        return sum(line.split()[-1] == "idle" for line in said.splitlines() if line.strip())

    def _daemon(self, host: int, *words: str) -> None:
        with open(self.directory / f"{words[0]}-{host}.out.log", "wb") as out:
            self._started.append(self._start(host, list(words), out.fileno(), out.fileno(), {}))

    def _start(self, host: int, words: list[str], out: int, err: int, more: dict[str, str]) -> subprocess.Popen[bytes]:
        def inside() -> subprocess.Popen[bytes]:
            enter(self.network.hosts[host])
            return subprocess.Popen(
                [*_INSIDE, str(self.directory / "hosts"), *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.directory,
                env={**self.environment, **more},
            )

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(inside).result()

    def _processes_of(self, node: int) -> list[int]:
        network = os.stat(self.network.hosts[node].network).st_ino
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (directory / "ns" / "net").stat().st_ino == network:
                    found.append(int(directory.name))
        return found

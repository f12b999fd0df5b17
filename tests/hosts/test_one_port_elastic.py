"""An elastic job whose machines accept connections at one port only."""

from __future__ import annotations

import os
import signal

from launching import processes_with

from hosts.elastic_machines import machines
from hosts.network import ipv4
from hosts.test_run_handover import TRAINS_ON
from paceline.cli.doctor.listening import Listener, listeners_of

__all__ = ["machines"]  # a fixture

PORT = 29500


def test_an_elastic_job_needs_one_port_of_each_machine(machines):
    """A worker that is killed is replaced by one that learns the state from a worker of the other machine."""
    here = machines(2, bridged=True)
    here.network.close_ports(0, 1, but=PORT)
    here.script.write_text(TRAINS_ON.replace('os.environ["PACELINE_WORKER"]', "str(os.getpid())"))
    words = ("--elastic", "--port", str(PORT), "--nnodes=2", "--rdzv-endpoint", ipv4(0), str(here.script))
    launchers = [here.start(host, *words, str(here.directory)) for host in range(2)]
    here.wait(lambda: len(here.notes("began")) == 2)
    listening = {each for each in listeners_of(processes_with(here.mark)) if each.kind != "unix"}
    assert listening == {Listener("tcp", ipv4(host), PORT) for host in range(2)}
    os.kill(int(here.notes("began")[0]), signal.SIGKILL)
    here.wait(lambda: here.notes("learned") != [])
    assert not any(launcher.poll() for launcher in launchers)

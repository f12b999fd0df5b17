"""`paceline run` in the pods of an indexed Job; Kubernetes restarts pods that fail."""

from __future__ import annotations

import subprocess

from hosts.machines import Machines
from hosts.network import ipv4


def start_pod(here: Machines, host: int) -> subprocess.Popen[str]:
    """Starts a launcher with a pod's variables. The address is given, because test hosts have no DNS names."""
    pod = {
        "KUBERNETES_SERVICE_HOST": "10.77.0.100",
        "JOB_COMPLETION_INDEX": str(host),
        "PACELINE_NODES": "2",
        "MASTER_ADDR": ipv4(0),
    }
    return here.start(host, str(here.script), str(here.directory), more=pod)


def test_pods_that_are_started_anew_meet_again(machines):
    here = machines(2)
    first, lost = (start_pod(here, host) for host in range(2))
    here.wait_for(2)
    lost.kill()
    here.expect(first, 1)  # so that Kubernetes also restarts this one
    pods = [start_pod(here, host) for host in (1, 0)]
    here.wait_for(2, generations=2)
    here.say("end")
    for pod in pods:
        here.expect(pod, 0)

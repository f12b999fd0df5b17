"""Settings under which NCCL lets several ranks share a GPU."""

from __future__ import annotations

import os

# If ranks have different host ids, NCCL uses sockets between them, as between hosts, and lets them share a GPU.
SHARING = {
    "PACELINE_NCCL_SHARED_GPU": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}


def share_gpu(rank: int) -> None:
    """Prepares this process for sharing a GPU with other ranks over NCCL; must be called before NCCL is used."""
    os.environ.update(SHARING, NCCL_HOSTID=f"host-{rank}")

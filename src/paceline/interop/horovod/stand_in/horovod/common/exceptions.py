"""Horovod's exception classes, for programs that catch them."""

from paceline.errors import CollectiveError as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """In Horovod, signals that the job's machines have changed. Never raised by Paceline."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """In Horovod, signals that an extension was built for a different release. Never raised by Paceline."""

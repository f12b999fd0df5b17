"""Horovod's exception classes that programs may catch."""

from paceline.errors import CollectiveError as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """Signals a change of the job's machines in Horovod. Never raised by Paceline."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Signals in Horovod that an extension was built for a different release. Never raised by Paceline."""

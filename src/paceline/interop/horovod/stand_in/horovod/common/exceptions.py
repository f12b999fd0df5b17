"""The errors that programs catch."""

from paceline.errors import CollectiveError as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """Would say that machines came or went; is never raised, since the machines of a job do not change here."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Would say that Horovod was built for another release of a library; is never raised, since nothing is built."""

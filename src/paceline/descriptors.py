"""What to say when the system gives this process no more file descriptors."""

from __future__ import annotations

import errno
import resource

from paceline.errors import OutOfDescriptorsError

_SHORTAGES = (errno.EMFILE, errno.ENFILE)


def is_shortage(error: BaseException | None) -> bool:
    """Whether `error`, or what it arose from, is that there are no descriptors left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_descriptors(who: str, what: str) -> OutOfDescriptorsError:
    """The error for `who`, a rank or process, that needed descriptors for `what`."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return OutOfDescriptorsError(
        f"{who}: out of file descriptors ({limit} of {limit}), needed for {what}. Raise the limit (ulimit -n, or "
        "LimitNOFILE= of a systemd unit), or look for what the program leaves open (ls -l /proc/PID/fd)",
    )

"""Output of workers for the dashboard."""

from __future__ import annotations

from paceline.operate.launch.job_dashboard import RemoteDashboardFeed, decode_update
from paceline.operate.launch.local_activity import LocalActivity
from paceline.operate.launch.multinode.protocol import DashboardUpdate


class Watch:
    """A launcher that has no page of its own, but whose state another launcher can observe."""

    def __init__(self) -> None:
        self.local = LocalActivity(is_observed=False, has_all_events=False)
        self.sent: list[DashboardUpdate] = []
        self.ear = self.local.sink(1, 1)

    def begin(self) -> RemoteDashboardFeed:
        return RemoteDashboardFeed(self.local, list, lambda: 0.0, self.sent.append)

    def lines(self) -> list[str]:
        return [line.text for seen in self.sent for line in decode_update(seen.body).lines]

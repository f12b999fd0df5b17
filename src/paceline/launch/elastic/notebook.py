"""What a launcher remembers of an elastic job, for a coordinator that it follows later."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from paceline.elastic import messages
from paceline.elastic.account import Account
from paceline.elastic.knowledge import Report as MachineReport
from paceline.elastic.messages import View
from paceline.launch.elastic.blame import Blame
from paceline.launch.nodes.messages import (
    Begin,
    Departing,
    Follow,
    Join,
    Leave,
    Order,
    Remember,
    Report,
    Slots,
    TellWorker,
    WorkerEnded,
    WorkerSaid,
    WorkerStalled,
    WorkerStarted,
)
from paceline.security.received import decoded

_reports = msgspec.json.Decoder(MachineReport)


@dataclass
class Notebook:
    """The account of this machine, how it has introduced itself, and the failures that the user is shown at the end.

    Attributes:
        join: what it said when it came.
        leave: what it says when it goes, once it does.
    """

    account: Account
    blame: Blame = field(default_factory=Blame)
    join: Join | None = None
    leave: Leave | None = None

    def reported(self, report: Report) -> None:
        """Notes what this launcher tells the coordinator."""
        account = self.account
        match report:
            case Join():
                self.join = report
            case WorkerStarted(uid):
                account.started(uid)
            case WorkerSaid(uid, body):
                account.said(uid, messages.from_worker(body.encode()))
            case WorkerStalled(uid, why):
                account.stalled(uid, why)
            case WorkerEnded(uid, how, exit_code):
                account.ended(uid, how, exit_code)
            case Slots(count, failures):
                account.slots = count
                self.blame.add(failures)
            case Departing():
                account.is_leaving = True
            case Leave():
                self.leave = report

    def ordered(self, order: Order) -> None:
        """Notes what the coordinator orders; views before any worker hears of them."""
        match order:
            case Begin():
                self.account.number, self.account.first_slot = order.machine, order.first_slot
            case TellWorker(_, body):
                message = messages.to_worker(body.encode())
                if isinstance(message, View):
                    self.account.passes_on(message)
            case Remember(failures):
                self.blame.add(failures)

    def follow(self) -> Follow:
        """Returns what a coordinator that is followed from now on is told."""
        return Follow(msgspec.json.encode(self.account.report()).decode(), self.blame.failures)


def report_in(follow: Follow) -> MachineReport | None:
    """Returns a machine's report; None if it is none, so that the machine gets no answer."""
    try:
        return decoded(_reports.decode, follow.body)
    except ValueError:
        return None

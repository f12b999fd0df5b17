"""The coordinator of an elastic job: a state machine without torch, sockets or clocks.

May use: only the messages in `train/elastic/protocol.py`. Start reading at `coordinator.py`; `membership_rules.py`
implements the coordinator's decisions, and `election.py` and `handover.py` implement the change to another coordinator.
"""

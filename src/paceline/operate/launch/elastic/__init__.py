"""Launcher of an elastic job: runs one worker in each slot, and replaces workers that die.

May use: the rest of `launch`; the coordinator, the messages and the priorities from `train/elastic`; and
`train/checkpoint/peer_memory`. Start reading at `elastic_agent.py`. `worker_replacement.py` uses neither processes nor
a clock.
"""

"""The launcher of an elastic job: it runs one worker in each slot, and replaces workers that die.

May use: the rest of `launch`; from `train` the coordinator, the messages and the priorities of `elastic`, and
`checkpoint/peer_memory`. Start reading at `elastic_agent.py`; `worker_replacement.py` and `elastic_options.py` use no
processes and no clock.
"""

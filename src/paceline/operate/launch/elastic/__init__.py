"""Keeps the workers of an elastic job running: one worker in each slot, another in its place when it dies.

May use: the rest of `launch`, and of `paceline.train.elastic` the coordinator and the messages. Start reading at `agent.py`;
`replacement.py` and `chaos.py` decide without a process or a clock.
"""

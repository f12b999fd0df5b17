"""Training that goes on when workers die, leave or join: nobody who lives is restarted, and no step is lost.

`coordinator.py` and `messages.py` are protocol without torch, sockets or clocks, which the launcher runs; the rest is
the worker's side and may use `parallel` and below. Start reading at `state.py`.
"""

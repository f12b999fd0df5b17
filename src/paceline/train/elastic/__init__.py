"""Training that goes on when workers die, leave or join: nobody who lives is restarted, and no step is lost.

May use: `parallel` and below; `coordinator.py`, `orders.py`, `messages.py` and what they import are protocol without
torch, sockets or clocks, which the launcher runs. Start reading at `state.py` and `rounds.py`, a worker's part.
"""

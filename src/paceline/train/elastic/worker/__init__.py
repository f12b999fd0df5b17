"""A worker in an elastic job: its loops, its rounds, and its membership in views.

May use: `state_transfer` and everything below `elastic`. Start reading at `elastic_state.py`, whose loops run
`rounds.py`.
"""

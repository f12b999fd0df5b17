"""`paceline doctor SCRIPT`: finds mistakes in a training script by interpreting it for every rank of a simulated job.

May use: the diagnostics of the folder above, and nothing else; it does not import torch. Start reading at
`interpreter.py`, which tracks values; `library.py` models library calls, and the rules compare the traces of the ranks.
"""

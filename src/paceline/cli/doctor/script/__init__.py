"""`paceline doctor SCRIPT`: finds mistakes in a training script by interpreting it for every rank of a simulated job.

May use: the diagnostics in the folder above, and nothing else; it does not import torch. Start reading at
    `interpreter.py`, which interprets statements and expressions. `execution_state.py` contains a rank's variables and
    path, `library.py` models library calls, and the rules compare the traces of the ranks.
"""

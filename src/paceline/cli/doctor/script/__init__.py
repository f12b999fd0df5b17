"""`paceline doctor SCRIPT`: finds mistakes in a training script by interpreting it for every rank of an imaginary job.

May use: the diagnostics of the folder above, and nothing else; it does not import torch. Start reading at `check.py`;
`interpreter.py` follows the values, `library.py` gives the calls of libraries their meaning, and the rules compare the
traces of the ranks.
"""

"""The cases of `bench/elastic.py`, the programs that their workers run, and shared code.

The workers run `train_*.py` as scripts. `timeline.py` records each step that they commit, and `pauses.py` computes
figures from these records. Start reading at `death.py`.
"""

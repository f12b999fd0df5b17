"""The cases of `bench/elastic.py`: one file each, the programs whose workers are killed, and what they share.

`train_*.py` run as scripts in the workers; `timeline.py` is where they note each step, and `pauses.py` turns these
notes into figures. Start reading at `death.py`.
"""

"""Schedules say, as plain data, what each rank does in a collective; algorithms make them, a cost model chooses.

May use: `errors` only, and no torch. Start reading at `steps.py` (the data and what it means), then `ring.py`;
`verify/symbolic.py` proves a world's schedules right, `registry.py` lists the algorithms, `cost.py` predicts and
chooses.
"""

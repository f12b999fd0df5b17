"""Paceline in other frameworks, by the names that their users know: a module for each, imported only by its users.

May use: `plugin`, and the framework. Each module says what to install where its framework is missing. Start reading at
`lightning.py`; `ray.py` is for Ray Train.
"""

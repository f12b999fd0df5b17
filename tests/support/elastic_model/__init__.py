"""Simulates elastic jobs in virtual time. `World(seed).run()` in `world.py` runs one schedule; start reading there."""

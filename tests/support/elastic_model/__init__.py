"""An elastic job in virtual time. `World(seed).run()` in `world.py` plays one schedule; start reading there."""

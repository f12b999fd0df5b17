"""Starting, watching and ending worker processes.

May use: `store`, `security`; imports no torch, so that a launcher starts at once. Start reading at `agent.py`.
"""

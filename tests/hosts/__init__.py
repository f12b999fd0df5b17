"""Tests between hosts, and the network namespaces that stand for hosts. Start reading at `fixture.py`."""

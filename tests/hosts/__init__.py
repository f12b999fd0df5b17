"""Tests between hosts, which are emulated by network namespaces. Start reading at `fixture.py`."""

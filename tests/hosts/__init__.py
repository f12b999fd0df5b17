"""Tests on several hosts, which are emulated by network namespaces. Start reading at `fixture.py`."""

"""Integrations with Lightning and Ray Train, one module for each framework. Users import the module explicitly.

If the framework is not installed, the import raises an error with the name of the missing package.

May use: `torch_backend`, and the framework. Start reading at `lightning.py` or `ray.py`.
"""

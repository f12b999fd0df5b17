"""Integrations with Lightning and Ray Train: one module for each framework, which only its users import.

If the framework is missing, the import raises an error that names the package to install.

May use: `torch_backend`, and the framework. Start reading at `lightning.py` or `ray.py`.
"""

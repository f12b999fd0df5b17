"""Tests that require cluster software, which few machines have. `make nightly` runs them where it is installed."""

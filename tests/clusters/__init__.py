"""Tests on the software of clusters, which few machines have. `make nightly` runs them where it is installed."""

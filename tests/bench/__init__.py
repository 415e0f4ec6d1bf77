"""Benchmarks of the suite itself; `make bench` runs them, pytest tests their arithmetic."""

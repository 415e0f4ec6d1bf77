"""Timing, statistics, and the checks that make a number believable."""

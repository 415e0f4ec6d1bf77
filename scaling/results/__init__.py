"""The record of a run: what is written, where, and how it is read back. Imports no torch."""

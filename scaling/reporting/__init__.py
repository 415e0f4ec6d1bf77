"""Tables for people. Imports no torch."""

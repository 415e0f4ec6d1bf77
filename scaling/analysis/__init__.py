"""Records in, tables out. Imports no torch, so that it runs on a laptop from the records alone."""

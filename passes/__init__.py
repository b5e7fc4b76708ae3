"""The passes of fxpipe: one file, one pass."""

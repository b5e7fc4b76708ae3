"""The fastest of many ways to run a model on some devices, see :func:`fxpipe.tune`."""

"""fxpipe: a compiler that turns any PyTorch model into a pipeline over several devices."""

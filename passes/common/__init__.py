"""What passes of several levels share: skips, checkpoint modes, runs on fake tensors."""

"""The cut: every node of the model graph gets the number of its stage."""

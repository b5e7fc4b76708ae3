"""The passes from the model graph to the stage graph."""

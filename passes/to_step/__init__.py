"""The passes from the stage graph to the step graph, which ``pipe.step`` runs."""

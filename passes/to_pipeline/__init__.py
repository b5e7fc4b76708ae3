"""The passes from the stage graph to the pipeline graph, which ``pipe(x)`` runs."""

"""The verifier: it proves, before a graph runs, that the graph keeps the promises of a pipeline."""

"""The cut of a weighted DAG into stages: pure graph theory, without torch."""

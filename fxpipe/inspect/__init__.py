"""Looking at graphs: drawings and reports."""

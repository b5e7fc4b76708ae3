"""The compiler: from a call of the model to a program that runs, and what is kept of it."""

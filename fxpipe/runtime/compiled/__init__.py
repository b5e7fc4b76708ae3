"""Stages that another compiler, such as Inductor, has compiled, forward and backward."""

"""What the nodes of a compiled graph do, and what runs them: lanes, streams, copies, portals.

Nothing here knows of passes: a pass writes the graph, and the functions of this room run it.
"""

"""What a user can look at: drawings of graphs, the report, the report page, and dumps of a
compilation."""

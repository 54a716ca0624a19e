"""Tables that grow: more rows, rows for other ids, and which id has which row."""

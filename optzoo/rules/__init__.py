"""From a rule for one array to a transformation of a whole tree."""

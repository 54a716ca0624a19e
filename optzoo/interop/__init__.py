"""From and to other libraries."""

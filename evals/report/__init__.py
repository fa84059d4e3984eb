"""What every measurement has in common: statistics, tables, files."""

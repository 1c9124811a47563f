"""What was traced, cut, compiled and recorded, left readable in a folder."""

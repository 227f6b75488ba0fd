"""What the format composer is made of: how its runs are stored."""

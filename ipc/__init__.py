"""What the processes say to each other, and how it travels."""

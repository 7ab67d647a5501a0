"""What a program in another thread or process asks of a group, as data, and its carrying out."""

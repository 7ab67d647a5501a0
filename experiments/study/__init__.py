"""A sweep: a file of grids becomes cells, cells are run and kept, and what they came to becomes tables."""

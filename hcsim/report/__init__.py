"""Pages that stand by themselves: one HTML file with text, tables and drawings, and nothing from outside.

`page` puts a page together, `chart` draws figures, `home` the machines of a home and what joins them."""

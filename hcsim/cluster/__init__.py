"""Who is there, who leads, who is well."""

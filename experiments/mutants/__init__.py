"""Planted bugs: does the search for broken invariants find them?"""
